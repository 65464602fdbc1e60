#!/usr/bin/env bash
# Evaluate a model under KV-cache compression; METHOD and RATIO may be comma lists. Without arguments: the demo.
#   ./scripts/run_eval.sh
#   ./scripts/run_eval.sh TASK MODEL METHOD RATIO [lmms-eval flags] [key=value model arguments and method options]
#   ./scripts/run_eval.sh textvqa_val llava-hf/llava-onevision-qwen2-7b-ov-hf snapkv,streamingllm 0.2,0.1 --limit 100
#   NUM_PROCESSES=4 ./scripts/run_eval.sh ...        one process per GPU
#   ./scripts/run_eval.sh list tasks|methods|models [WORD]
#   ./scripts/run_eval.sh --help                     all flags; more in docs/run-eval.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" eval
# Works from any working directory, where it creates results/ and looks for data/.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m lmms_eval_plugins.evaluate "$@"
