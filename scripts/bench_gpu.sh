#!/usr/bin/env bash
# On a machine with a CUDA device: the GPU tests, then the speed grid in Qwen2-7B's shape; meant to take under 9 minutes
# on an H100, which is not yet tried.
#   ./scripts/bench_gpu.sh [FOLDER]              results to FOLDER, by default benchmarks/results
#   ./scripts/bench_gpu.sh --smoke [FOLDER]      the same commands on the CPU and a tiny model, in a minute
# Needs torch, triton, transformers and pydantic, no network; pytest and hypothesis for the tests, matplotlib for plots.
# PYTHON says which Python.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
WHERE=(--shape qwen2-7b --device cuda --dtype bfloat16)
KERNELS=(--device cuda --dtype bfloat16 --lengths 2048 8192 32768)
SHORT=8192 LONG=32768 MANY="1 8 32" MINUTES=(2 1.5 1) DEVICE_NAME=cuda
if [[ "${1:-}" == --smoke ]]; then
  shift
  WHERE=(--shape tiny --device cpu)
  KERNELS=(--device cpu --lengths 64 --repeats 2)
  SHORT=64 LONG=128 MANY="1 4" MINUTES=(0.3 0.3 0.3) DEVICE_NAME=smoke
fi
OUT="${1:-benchmarks/results}"
METHODS="snapkv adakv tova knorm pyramidkv"

bench() { # NAME MINUTES ARGUMENTS...
  local name="$1" minutes="$2"
  shift 2
  echo "== $name"
  "$PYTHON" -m kvcompress bench "${WHERE[@]}" --minutes "$minutes" --out "$OUT/bench_${DEVICE_NAME}_$name" "$@"
}

if "$PYTHON" -c "import pytest, hypothesis" 2>/dev/null; then
  [[ "$DEVICE_NAME" == smoke ]] || "$PYTHON" -m pytest -p no:cacheprovider -m gpu \
    tests/kvcompress/test_gpu.py tests/kvcompress/kernels/test_kernels.py
else
  echo "no tests: pytest or hypothesis is not installed" >&2
fi
# The prefill's kernels beside the plain ways.
"$PYTHON" -m benchmarks.kernels "${KERNELS[@]}" --out "$OUT/kernels_$DEVICE_NAME"
# Scoring share of the prefill and decoding, against both of transformers' caches.
bench prompt "${MINUTES[0]}" --methods $METHODS h2o full:cache_implementation=static snapkv:cache_implementation=static \
  --lengths "$SHORT" --batches 1 --new 16 --repeats 3 --peers dynamic static --compile
# Decoding in VL-Cache's regime, many rows with long prompts.
bench decode "${MINUTES[1]}" --methods $METHODS --lengths "$SHORT" "$LONG" --batches $MANY --new 16 --repeats 2 --one-prompt
# The largest batch that decodes.
if [[ "$DEVICE_NAME" != smoke ]]; then
  bench largest_batch "${MINUTES[2]}" --methods snapkv adakv --lengths "$SHORT" --new 4 --repeats 1 --largest-batch --one-prompt
fi
echo "took $SECONDS s"
