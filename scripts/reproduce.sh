#!/usr/bin/env bash
# Run a paper's grid and write a table of our results beside the paper's; complete cells are skipped. More in
# docs/reproduce.md.
#   ./scripts/reproduce.sh effivlm_bench --dry-run
#   ./scripts/reproduce.sh effivlm_bench --limit 100 --only model=Qwen2-VL-7B,task=TextVQA
#   ./scripts/reproduce.sh tiny --limit 16           everything on the bundled model, without GPU or hub
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" eval
# Works from any working directory, where it creates results/ and looks for data/.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m lmms_eval_plugins.reproduce "$@"
