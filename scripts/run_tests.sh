#!/usr/bin/env bash
# Run the tests on two processes; arguments go to pytest:
#   ./scripts/run_tests.sh                       everything that is neither slow nor needs a GPU
#   ./scripts/run_tests.sh -m slow               what takes longer
#   ./scripts/run_tests.sh -n 0 -k snapkv        in one process, by name
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" dev
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tiny models: more threads only disturb the other process
exec "$PYTHON" -m pytest -n 2 "$@"
