#!/usr/bin/env bash
# Run all trials of a wandb sweep file, without an account; an interrupted sweep resumes where it stopped.
#   ./scripts/run_sweep.sh configs/sweeps/demo.yaml
#   ./scripts/run_sweep.sh CONFIG [--limit N] [--trials N] [--ray ADDRESS|local] [parameter=value ...]
#   ./scripts/run_sweep.sh --help                    all flags; more in docs/sweeps.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" sweep
# Works from any working directory, where it creates results/ and looks for data/.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m lmms_eval_plugins.sweep run "$@"
