#!/usr/bin/env bash
# Run OpenVINO GenAI on exported settings; arguments go to pytest.
# Its environment lies on top of the ordinary one: torch is taken from there, while the converter needs an older
# transformers of its own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" dev
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

overlay="$ROOT/.venv-openvino"
"$PYTHON" -m venv "$overlay"
packages="$("$overlay/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/below.pth"
"$overlay/bin/python" -m pip install --quiet --disable-pip-version-check \
  "openvino-genai>=2026.4,<2027" "openvino-tokenizers>=2026.4,<2027" "optimum-intel>=2.2,<3" "datasets<5"
export KVCOMPRESS_OPENVINO_PYTHON="$overlay/bin/python"
"$PYTHON" -m pytest -m slow -s tests/kvcompress/engines/test_openvino.py "$@"
