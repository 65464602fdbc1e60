#!/usr/bin/env bash
# Run the tests on every installed Python from 3.10 on; for one that is missing, check that its requirements resolve to
# wheels.
#   ./scripts/test_pythons.sh                    all versions
#   ./scripts/test_pythons.sh 3.10 3.13          these versions
#   ARGUMENTS="-n 2 -k snapkv" ./scripts/test_pythons.sh 3.13     arguments of pytest, in place of -n 2 --every-case
# Each version has its own environment: .venv-py3.13 and so on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ $# -gt 0 ] || set -- 3.10 3.11 3.12 3.13 3.14
COMPILED=(torch torchvision av pyarrow numpy pandas ray tokenizers safetensors pydantic-core scipy scikit-learn)

for version in "$@"; do
  environment="$PWD/.venv-py$version"
  if "python$version" -c '' 2>/dev/null; then
    [ -x "$environment/bin/python" ] || "python$version" -m venv "$environment"
    # a subshell, so that setting up one version does not affect the next
    (
      export VIRTUAL_ENV="$environment" IS_TESTED_SET=yes
      source scripts/setup_env.sh dev
      "$PYTHON" -m pytest ${ARGUMENTS:--n 2 --every-case}
    )
    echo "Python $version: tests are green"
  else
    uv="$(command -v uv)" || { echo "error: no python$version, and no uv to resolve its requirements" >&2; exit 1; }
    "$uv" pip compile pyproject.toml --extra dev --constraint constraints.txt --python-version "$version" --quiet \
      --python-platform linux "${COMPILED[@]/#/--only-binary=}" --output-file /dev/null >/dev/null
    echo "Python $version: not installed; its requirements resolve, with wheels for all compiled packages"
  fi
done
