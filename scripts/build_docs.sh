#!/usr/bin/env bash
# Build the documentation site; a broken link is an error.
#   ./scripts/build_docs.sh            writes site/
#   ./scripts/build_docs.sh serve      shows it while you write: http://127.0.0.1:8000
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" docs
cd "$ROOT"
export NO_MKDOCS_2_WARNING=1
COMMAND="${1:-build}"
[ $# -eq 0 ] || shift
exec "$PYTHON" -m mkdocs "$COMMAND" "$@"
