#!/usr/bin/env bash
# Run the tests on two processes; arguments go to pytest:
#   ./scripts/run_tests.sh                       a sample of the tests that are neither slow nor need a GPU
#   ./scripts/run_tests.sh --every-case          all of them
#   ./scripts/run_tests.sh tests/kvcompress/cache      all of a folder
#   ./scripts/run_tests.sh -m slow               the slow tests
#   ./scripts/run_tests.sh -n 0 -k snapkv        in one process, selected by name
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" dev
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tiny models: more threads only slow down the other process
unset PYTHONDONTWRITEBYTECODE # containers set it, and the tests start many processes that import the same modules
exec "$PYTHON" -m pytest -n 2 "$@"
