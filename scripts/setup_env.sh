# Sourced by the other scripts, with the extras of pyproject.toml that they need. Sets ROOT (this repository) and PYTHON
# (an interpreter with everything installed).
#
# Uses the active virtual or conda environment, or creates .venv in the repository. Installs what is missing there or
# predates a change of pyproject.toml or constraints.txt, using uv, which pip installs if necessary. .venv gets the
# releases of constraints.txt; your own environment keeps what fits the ranges of pyproject.toml, unless
# IS_TESTED_SET=yes. Quiet and quick when up to date.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

_find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
        if _supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python from 3.10 on found (python3 is: $(python3 --version 2>&1)); install one" >&2
    return 1
}

_follow() { # PID LOG: show the installer's progress in one line until it ends
    local start=$SECONDS seconds=0 line
    while kill -0 "$1" 2>/dev/null; do
        sleep 0.1
        [ $((SECONDS - start)) -gt "$seconds" ] || continue
        seconds=$((SECONDS - start))
        line="  $seconds s: $(tail -n 1 "$2" | tr -d '\r' | cut -c 1-90)"
        if [ -t 2 ]; then
            printf '\r\033[K%s' "$line" >&2
        elif [ $((seconds % 20)) = 0 ]; then
            echo "$line" >&2
        fi
    done
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
    wait "$1"
}

_pip_install() { # LOG COMMAND...: run an installer in the repository root, with its output in a file
    local log="$1"
    shift
    (cd "$ROOT" && exec "$@") >>"$log" 2>&1 </dev/null &
    _follow $! "$log"
}

_install() { # ENVIRONMENT IS_OURS EXTRAS...
    local environment="$1" is_ours="$2" stamp="$1/.kvcompress-installed" log="$1/kvcompress-install.log"
    shift 2
    # The stamp contains the path, because an editable install points at one checkout.
    local wanted extra extras="" missing="" constraints=""
    wanted="$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
    local other # the checkout that the environment has
    other="$(sed '1s/ [0-9]* [0-9]*$//; q' "$stamp" 2>/dev/null || true)"
    if [ "$is_ours" != yes ] && [ -n "$other" ] && [ "$other" != "$ROOT" ] && [ -d "$other/kvcompress" ]; then
        echo "error: the active environment $environment has kvcompress of $other: deactivate it, or activate another" >&2
        exit 1
    fi
    for extra in "$@" $(tail -n +2 "$stamp" 2>/dev/null); do
        case ",$extras," in *",$extra,"*) continue ;; esac
        extras="$extras${extras:+,}$extra"
        if [ ! -x "$PYTHON" ] || [ "$(head -n 1 "$stamp" 2>/dev/null)" != "$wanted" ] ||
            ! tail -n +2 "$stamp" | grep -qx "$extra"; then
            missing="$missing${missing:+,}$extra"
        fi
    done
    [ -n "$missing" ] || return 0
    echo "Installing kvcompress[$missing] into $environment (the first time about 3 GB to download)" >&2
    if [ ! -x "$PYTHON" ]; then
        if ! "$(_find_python)" -m venv "$environment" >&2; then
            rm -rf "$environment" # half of one would pass for whole
            echo "error: $environment could not be created" >&2
            return 1
        fi
    fi
    : >"$log"
    if [ "$is_ours" = yes ]; then constraints="--constraint=constraints.txt"; fi
    local uv
    if ! uv="$(command -v uv || command -v "$environment/bin/uv")"; then
        uv="$environment/bin/uv"
        _pip_install "$log" "$PYTHON" -m pip install --disable-pip-version-check uv || uv=""
    fi
    # uv ignores pip's settings; use a mirror configured for pip with uv too.
    local mirror
    mirror="$("$PYTHON" -m pip config get global.index-url 2>/dev/null || true)"
    export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-${mirror:-https://pypi.org/simple}}}"
    # Compiled like pip does: else the first command pays for it, or, with PYTHONDONTWRITEBYTECODE, every one.
    if [ -z "$uv" ] ||
        ! _pip_install "$log" "$uv" pip install --compile-bytecode --python "$PYTHON" $constraints -e ".[$extras]"; then
        echo "  uv failed (see $log); installing with pip, which takes longer" >&2
        if ! _pip_install "$log" "$PYTHON" -m pip install --disable-pip-version-check $constraints -e ".[$extras]"; then
            tail -n 15 "$log" >&2
            echo "error: the installation failed; the full log is in $log" >&2
            return 1
        fi
    fi
    { echo "$wanted" && echo "$extras" | tr , '\n'; } >"$stamp"
}

if [ -n "${VIRTUAL_ENV:-}" ] || { [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; }; then
    PYTHON="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python"
    if ! _supported "$PYTHON"; then
        echo "error: the active environment has $("$PYTHON" --version 2>&1), but Python 3.10 or later is needed" >&2
        exit 1
    fi
    _install "${VIRTUAL_ENV:-$CONDA_PREFIX}" "${IS_TESTED_SET:-no}" "$@"
else
    PYTHON="$ROOT/.venv/bin/python"
    if [ ! -x "$PYTHON" ]; then _find_python >/dev/null; fi
    _install "$ROOT/.venv" yes "$@"
fi
export PYTHON
case "$0" in
    *.sh) export KVCOMPRESS_SCRIPTS="$(dirname "$0")" ;; # messages name commands as they were called
esac
