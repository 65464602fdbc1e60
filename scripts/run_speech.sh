#!/usr/bin/env bash
# Measure how soon an omni model speaks under KV-cache compression: time to first audio and real-time factor, cold and
# warm.
#   ./scripts/run_speech.sh MODEL METHOD[:OPTION=VALUE...] RATIO [flags]
#   ./scripts/run_speech.sh Qwen/Qwen2.5-Omni-7B snapkv 0.2
#   ./scripts/run_speech.sh --help                   all flags; more in docs/speech.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" eval
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m kvcompress speech "$@"
