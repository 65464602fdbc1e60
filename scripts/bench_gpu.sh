#!/usr/bin/env bash
# On a machine with a CUDA device, in three stages of less than 8 minutes each (meant for an H200; not yet tried):
#   ./scripts/bench_gpu.sh --stage 1            is it right
#   ./scripts/bench_gpu.sh --stage 2            is it fast
#   ./scripts/bench_gpu.sh --stage 3            what does it buy
#   ./scripts/bench_gpu.sh --stage 1 --smoke    the same lines on a CPU and tiny shapes
# Needs torch, triton, transformers and pydantic (carry pydantic-core, annotated-types and typing-inspection with it),
# for stage 1 pytest, pytest-xdist, hypothesis and Pillow; no network. Results go to
# benchmarks/results/gpu as they come; the same command goes on where it was cut. --help says more. PYTHON says which
# Python.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
