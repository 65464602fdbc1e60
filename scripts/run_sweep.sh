#!/usr/bin/env bash
# Run a sweep: all trials of a wandb sweep file, without an account; a sweep that was cut goes on where it stopped.
#   ./scripts/run_sweep.sh configs/sweeps/demo.yaml
#   ./scripts/run_sweep.sh CONFIG [--limit N] [--trials N] [--ray ADDRESS|local] [parameter=value ...]
#   ./scripts/run_sweep.sh --help                    all flags; more in docs/sweeps.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" sweep
# Found from any working directory, in which results/ is made and data/ is looked for.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m lmms_eval_plugins.sweep run "$@"
