#!/usr/bin/env bash
# Write constraints.txt: for each Python from 3.10 on, one release of everything that any extra needs.
#   ./scripts/lock.sh              keeps the releases in the file that still fit
#   ./scripts/lock.sh --upgrade    takes the newest; run the tests afterwards
# flash-attn is not included: it is built against the installed torch.
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
