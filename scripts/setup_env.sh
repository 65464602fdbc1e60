# Sourced by the other scripts: sets ROOT (this repository) and PYTHON (an interpreter with everything installed).
#
# Takes the active virtual or conda environment, else makes .venv in the repository, and installs requirements.txt
# into it when requirements.txt or pyproject.toml changed since the last time. Quiet and quick when up to date.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

_find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.10 python; do
        if _supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.10 to 3.12 found (python3 is: $(python3 --version 2>&1)); install one" >&2
    return 1
}

_install() {
    local stamp="$1/.kvcompress-requirements" wanted
    # The path belongs to the stamp: the install is editable, so it points at one checkout.
    wanted="$ROOT $(cat "$ROOT/requirements.txt" "$ROOT/pyproject.toml" | cksum)"
    if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ -n "${2:-}" ]; then
        echo "Setting up $1 (first run or changed requirements: some minutes, about 3 GB to download)" >&2
        "$2" -m venv "$1"
    else
        echo "Installing requirements.txt into $1" >&2
    fi
    # in the repository root, because requirements.txt installs "-e ."
    (cd "$ROOT" && "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt)
    echo "$wanted" >"$stamp"
}

if [ -n "${VIRTUAL_ENV:-}" ] || { [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; }; then
    PYTHON="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python"
    if ! _supported "$PYTHON"; then
        echo "error: the active environment has $("$PYTHON" --version 2>&1), but Python 3.10 to 3.12 is needed" >&2
        exit 1
    fi
    _install "${VIRTUAL_ENV:-$CONDA_PREFIX}"
else
    PYTHON="$ROOT/.venv/bin/python"
    _base_python="$(_find_python)" || exit 1
    _install "$ROOT/.venv" "$_base_python"
fi
export PYTHON
