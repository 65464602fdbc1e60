#!/usr/bin/env bash
# Benchmark on a machine with a CUDA device, in three stages of less than 8 minutes each:
#   ./scripts/bench_gpu.sh --stage 1            correctness
#   ./scripts/bench_gpu.sh --stage 2            speed
#   ./scripts/bench_gpu.sh --stage 3            benefits
#   ./scripts/bench_gpu.sh --stage 1 --smoke    the same code on a CPU and tiny shapes
# Needs torch, triton, transformers and pydantic (with pydantic-core, annotated-types and typing-inspection), and for
# stage 1 pytest, pytest-xdist, hypothesis and Pillow; no network. Results are saved in benchmarks/results/gpu as they
# come; the same command resumes an interrupted run. See --help. PYTHON selects the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
