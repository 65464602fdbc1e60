#!/usr/bin/env bash
# Run the core tests on the oldest and the newest supported transformers; arguments go to pytest.
# Each version is installed in a small environment on top of the ordinary one, so only it and its pins are downloaded.
set -euo pipefail
OLDEST="transformers==5.14.0" # the lower bound in pyproject.toml
NEWEST="transformers>=5.14,<6"
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" dev
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

test_on() { # name of the overlay environment, requirement, pytest arguments
    local overlay="$ROOT/.venv-$1" requirement="$2" packages
    shift 2
    "$PYTHON" -m venv --without-pip "$overlay"
    packages="$("$overlay/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/below.pth"
    "$overlay/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$requirement"
    "$overlay/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
    "$overlay/bin/python" -m pytest -n 2 tests/kvcompress tests/support "$@"
}

test_on oldest "$OLDEST" "$@"
test_on newest "$NEWEST" "$@"
