#!/usr/bin/env bash
# Write constraints.txt: of everything that any extra needs one release for each Python from 3.10 on, as resolved today.
#   ./scripts/lock.sh              keeps the releases that are in the file where they still fit
#   ./scripts/lock.sh --upgrade    takes the newest; run the tests after it
# flash-attn is not in it: it is built against the torch that is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
UV="$(command -v uv || true)"
if [ -z "$UV" ]; then
  source scripts/setup_env.sh eval
  UV="$(dirname "$PYTHON")/uv"
fi
"$UV" pip compile pyproject.toml --extra all --extra dev --universal --python-version 3.10 --no-annotate --no-header \
  --quiet --output-file constraints.txt "$@"
wc -l constraints.txt
