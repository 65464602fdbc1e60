#!/usr/bin/env bash
# Run a paper's grid and write a table of ours against theirs; complete cells are skipped. docs/reproduce.md says more.
#   ./scripts/reproduce.sh effivlm_bench --dry-run
#   ./scripts/reproduce.sh effivlm_bench --limit 100 --only model=Qwen2-VL-7B,task=TextVQA
#   ./scripts/reproduce.sh tiny --limit 16           the whole path on the bundled model, without GPU and hub
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" eval
# Found from any working directory, in which results/ is made and data/ is looked for.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m lmms_eval_plugins.reproduce "$@"
