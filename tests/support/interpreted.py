"""`TRITON_INTERPRET=1 python -m tests.support.interpreted` checks the Triton kernels against their references on a CPU.

Triton reads that variable when a kernel is defined, so this needs a process of its own."""

import sys
import types
from pathlib import Path

import torch

# The kernels need nothing else of the package, and importing all of it, with transformers, takes most of the time.
package = types.ModuleType("kvcompress")
package.__path__ = [str(Path(__file__).parents[2] / "kvcompress")]
sys.modules["kvcompress"] = package

from tests.support import grouped_cases, kernel_cases, ragged_cases  # noqa: E402

if __name__ == "__main__":
    assert not any(name.endswith("_triton") for name in sys.modules if "kvcompress" in name)  # works without triton
    kernel_cases.check_column_sums(torch.float32, kernel_cases.SHAPES, "cpu")
    # The interpreter (triton 3.9) multiplies the bits of bfloat16.
    kernel_cases.check_column_sums(torch.float16, kernel_cases.SHAPES[4:5], "cpu")
    kernel_cases.check_adaptive("cpu")
    kernel_cases.check_likeness(torch.float32, kernel_cases.SHAPES, "cpu")
    kernel_cases.check_likeness(torch.float16, kernel_cases.SHAPES[4:6], "cpu")
    ragged_cases.check_triton(torch.float32, "cpu")
    ragged_cases.check_triton(torch.float16, "cpu", ragged_cases.SHAPES[4:])
    ragged_cases.check_few_channels_triton(torch.float32, "cpu")
    ragged_cases.check_few_channels_triton(torch.float16, "cpu", ragged_cases.SHAPES[4:])
    ragged_cases.check_layout_triton(torch.float32, "cpu")
    ragged_cases.check_layout_triton(torch.uint8, "cpu")
    ragged_cases.check_turboquant_triton(torch.float32, "cpu", ragged_cases.SHAPES[::3])
    ragged_cases.check_turboquant_triton(torch.float16, "cpu", ragged_cases.SHAPES[4:])
    ragged_cases.check_turboquant_pack_triton(torch.float32, "cpu", ragged_cases.SHAPES[::2])
    ragged_cases.check_turboquant_pack_triton(torch.bfloat16, "cpu", ragged_cases.SHAPES[1:2])
    ragged_cases.check_fp8_triton(torch.float32, "cpu", ragged_cases.SHAPES[::2])
    ragged_cases.check_fp8_triton(torch.float16, "cpu", ragged_cases.SHAPES[1:2])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        ragged_cases.check_fp8_pack_triton(dtype, "cpu")
    grouped_cases.check_grouped_triton(torch.float32, "cpu")
    grouped_cases.check_grouped_triton(torch.float16, "cpu", grouped_cases.SHAPES[:1])
    for splits in (1, 4):
        ragged_cases.check_static_triton(torch.float32, "cpu", 10, splits)
    ragged_cases.check_static_triton(torch.float16, "cpu", 3, 2)
