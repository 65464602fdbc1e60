#!/usr/bin/env bash
# Build the documentation site; a link that leads nowhere is an error.
#   ./scripts/build_docs.sh            to site/
#   ./scripts/build_docs.sh serve      and look at it while writing: http://127.0.0.1:8000
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" docs
cd "$ROOT"
export NO_MKDOCS_2_WARNING=1
COMMAND="${1:-build}"
[ $# -eq 0 ] || shift
exec "$PYTHON" -m mkdocs "$COMMAND" "$@"
