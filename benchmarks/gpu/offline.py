"""Compile every Triton kernel for absent GPUs with Triton's ptxas: registers, stack and shared memory of each.

python -m benchmarks.gpu.offline                    # for sm_80, sm_90 and sm_100, into benchmarks/results/gpu/
python -m benchmarks.gpu.offline --quick            # head sizes 64 and 128 in bf16 and fp32, for sm_90
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.driver import RESULTS, new_parser, page_of_answers, start
from kvcompress.bench.timing import table
from kvcompress.files import write_text
from kvcompress.flag_types import path

ARCHITECTURES = (80, 90, 100)
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = 7
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@dataclass(frozen=True)
class Kernel:
    """A kernel and its launch.

    Attributes:
        types: Triton types of its arguments, by name.
        fixed: values of its constexpr arguments.
        options: launch options.
        aligned: numeric arguments that are multiples of 16.
    """

    name: str
    function: Any
    types: dict[str, str]
    fixed: dict[str, int]
    options: dict[str, int]
    aligned: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel: registers and bytes of stack per thread, bytes of shared memory."""

    kernel: str
    architecture: int
    registers: int
    stack: int
    shared: int


def kernels(head_dim: int, dtype: torch.dtype) -> Iterator[Kernel]:
    """Yield all kernels that run for this head size and dtype."""
    import triton

    from kvcompress.kernels import (
        adaptive_triton,
        column_sums_triton,
        fp8_triton,
        grouped_triton,
        likeness_triton,
        ragged_decode_triton,
        ragged_layout_triton,
        turboquant_triton,
    )

    pointer, name = POINTERS[dtype], f"{str(dtype).removeprefix('torch.')}, head size {head_dim}"
    rows = {f"{of}_{what}" for of in ("query", "key") for what in ("row", "head", "column")}
    blocks = column_sums_triton.blocks_of(head_dim, dtype)
    options = {"num_warps": blocks.pop("num_warps")}
    types = {"queries": pointer, "keys": pointer, "padding": "*i64", "first": "*i64", "weights": "*fp32"}
    types |= {"log_sums": "*fp32", "sums": "*fp32", "scaling": "fp32", "columns": "i32", "heads": "i32"}
    types |= dict.fromkeys(rows, "i32")
    fixed = {"GROUPS": GROUPS, "HEAD_DIM": head_dim, **blocks}
    for function in ("_sum_rows", "_sum_columns"):
        aligned = frozenset({*rows, "columns"})
        yield Kernel(f"{function}, {name}", getattr(column_sums_triton, function), types, fixed, options, aligned)

    if head_dim == HEAD_DIMS[0] and dtype == torch.float32:  # the same for all
        types = {"ordered": "*fp32", "order": "*i64", "totals": "*i64", "is_lost": "*i8", "counts": "*i64"}
        types |= {"kept": "*i64", "columns": "i32", "kv_heads": "i32", "most": "i32"}
        for heads in (2, 8, 32):
            fixed = {"SAFEGUARD": 0.2, "BLENDS": True, "HEADS": heads, "BLOCK": adaptive_triton.block_of(heads)}
            exact = {"num_warps": adaptive_triton.WARPS, "enable_fp_fusion": False}
            yield Kernel(f"_drop, {heads} heads", adaptive_triton._drop, types, fixed, exact)
        yield Kernel("_list", adaptive_triton._list, types, {"BLOCK": adaptive_triton.LIST_BLOCK}, {})
    types = {"keys": pointer, "norms": "*fp32", "padding": "*i64", "left_out": "*i32", "means": "*fp32"}
    of_keys = frozenset({"key_row", "key_head", "key_column", "columns"})
    types |= dict.fromkeys((*of_keys, "kv_heads"), "i32") | {"similar": "fp32"}
    blocks = likeness_triton.blocks_of(head_dim, dtype)
    options = {"num_warps": blocks.pop("num_warps")}
    fixed = {"PADDED": True, "SPARES_FIRST": True, "HEAD_DIM": head_dim, **blocks}
    for function in (likeness_triton._leave_out, likeness_triton._average):
        exact = {name: value for name, value in fixed.items() if name in function.arg_names}
        yield Kernel(f"{function.__name__}, {name}", function, types, exact, options, of_keys)

    few = head_dim * 3 // 5  # channels that a key of ThinK's keeps
    of = ((0, False), (0, True), (2, False), (3, False), (4, False), (8, False))
    for bits, appends, key_dim in ((0, False, few), *((*each, head_dim) for each in of)):
        is_few = key_dim == few
        blocks = ragged_decode_triton.blocks_of(head_dim, head_dim, dtype, bool(bits))
        blocks = ragged_decode_triton.few_blocks_of(few, head_dim, dtype) if is_few else blocks
        options = {name: blocks.pop(name) for name in ("num_stages", "num_warps")}
        stored, book = ("*u8", "*fp32") if bits else (pointer, pointer)
        types = {"query": pointer, "output": pointer, "keys": stored, "values": stored, "scaling": "fp32"}
        types |= {"key_codebook": book, "value_codebook": book, "starts": "*i64", "lengths": "*i64"}
        types |= {"new_keys": pointer, "new_values": pointer, "appended": "*i64", "behind": "i32", "channels": "*i16"}
        types |= {"partial": "*fp32", "maxima": "*fp32", "sums": "*fp32"}
        sizes = {"KEY_DIM": key_dim, "VALUE_DIM": head_dim, "BLOCK_GROUPS": max(16, triton.next_power_of_2(GROUPS))}
        fixed = {"BITS": bits, "APPENDS": appends, "COUNTED": appends, "GROUPS": GROUPS, **sizes, **blocks}
        fixed |= {"CHOOSES": is_few, "PART": 0, "PARTS": 1 + is_few, "QUERY_DIM": head_dim}
        of = f", {bits} bits" if bits else ", with a new token" if appends else ""
        of += f", {few} channels" if is_few else ""
        yield Kernel(f"_attend, {name}{of}", ragged_decode_triton._attend, types, fixed, options)
    types |= {"table": "*i64", "ends": "*i64", "recent_keys": pointer, "recent_values": pointer, "scale": pointer}
    types |= dict.fromkeys(("blocks", "batch", "recent", "capacity"), "i32")
    blocks = grouped_triton.group_blocks_of(head_dim, head_dim, dtype)
    options = {name: blocks.pop(name) for name in ("num_stages", "num_warps")}
    for bits, is_hqq in ((4, False), (4, True), (1, True)):
        exact = {"BITS": bits, "IS_HQQ": is_hqq, "GROUP_SIZE": 64, "KV_HEADS": 4, "GROUPS": GROUPS, **sizes, **blocks}
        of = f"{'hqq' if is_hqq else 'quanto'}, {bits} bits"
        yield Kernel(f"_attend_groups, {name}, {of}", grouped_triton._attend_groups, types, exact, options)
    fixed = {"SPLITS": 32, "VALUE_DIM": head_dim, "BLOCK_VALUE_DIM": blocks["BLOCK_VALUE_DIM"]}
    yield Kernel(f"combine, {name}", ragged_decode_triton.combine, types, fixed, {})

    sizes = ragged_layout_triton.sizes_of(head_dim, head_dim, dtype)
    types = dict.fromkeys(("keys", "values", "flat_keys", "flat_values", "dense_keys", "dense_values"), pointer)
    types |= dict.fromkeys(("counts", "starts", "lengths", "dense_columns"), "*i64") | {"flat_columns": "*i32"}
    types |= dict.fromkeys(("slots", "room", "behind", "appended", "seen"), "i32")
    layout = ragged_layout_triton._to_segments, ragged_layout_triton._from_segments
    yield Kernel(f"_to_segments, {name}", layout[0], types | {"columns": "*i64"}, {"SEGMENTS": 256, **sizes}, {})
    yield Kernel(f"_from_segments, {name}", layout[1], types | {"columns": "*i32"}, sizes, {})

    block_dim, chunk = turboquant_triton.block_of(head_dim), turboquant_triton.CHUNK
    types = {"vectors": pointer, "keys": pointer, "values": pointer, "rotated": pointer, "output": pointer}
    types |= dict.fromkeys(
        ("rotation", "key_rotation", "value_rotation", "key_boundaries", "value_boundaries"), "*fp32"
    )
    types |= {"partial": "*fp32", "maxima": "*fp32", "sums": "*fp32", "ends": "*i64", "count": "i32", "new": "i32"}
    types |= {"packed_keys": "*u8", "packed_values": "*u8", "first": "i32"}
    types |= {"key_scale": "*fp32", "value_scale": "*fp32"}
    fixed = {"DIM": head_dim, "BLOCK_DIM": block_dim, "CHUNK": chunk}
    tile = {"BLOCK_ROWS": turboquant_triton.BLOCK_ROWS}
    warps = {"num_warps": turboquant_triton.warps_of(head_dim)}
    yield Kernel(f"_rotate, {name}", turboquant_triton._rotate, types, fixed | tile, warps)
    yield Kernel(f"_combine_back, {name}", turboquant_triton._combine_back, types, fixed | {"SPLITS": 32}, {})
    fixed = {"KEY_DIM": head_dim, "VALUE_DIM": head_dim, "BLOCK_KEY_DIM": block_dim, "BLOCK_VALUE_DIM": block_dim}
    exact = fixed | {"BLOCK_ROWS": fp8_triton.BLOCK_ROWS}
    yield Kernel(f"_pack_fp8, {name}", fp8_triton._pack_fp8, types, exact, {})
    for bits in (2, 3, 4):
        exact = fixed | tile | {"CHUNK": chunk, "BITS": bits}
        yield Kernel(f"_pack, {name}, {bits} bits", turboquant_triton._pack, types, exact, {})


def compiled(kernel: Kernel, architecture: int) -> Resources:
    """Compile a kernel. Raises Triton's own error if it does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    signature = {name: "constexpr" if name in kernel.fixed else kernel.types[name] for name in names}
    fixed = {(names.index(name),): value for name, value in kernel.fixed.items()}
    is_aligned = [kernel.types.get(name, "").startswith("*") or name in kernel.aligned for name in names]
    attributes = {(place,): [["tt.divisibility", 16]] for place, aligned in enumerate(is_aligned) if aligned}
    source = ASTSource(kernel.function, signature, fixed, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=kernel.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    return Resources(kernel.name, architecture, registers, stack, made.metadata.shared)


def measured(architectures: tuple[int, ...], head_dims: tuple[int, ...], dtypes: list[torch.dtype]) -> list[Resources]:
    return [
        compiled(kernel, architecture)
        for head_dim in head_dims
        for dtype in dtypes
        for kernel in kernels(head_dim, dtype)
        for architecture in architectures
    ]


def markdown(found: list[Resources], argv: list[str]) -> str:
    import triton

    what = (
        f"By Triton {triton.__version__} and the ptxas that it ships: registers / bytes of stack per thread / KiB of "
        "shared memory."
    )
    rows: dict[str, list[str]] = {}
    for one in sorted(found, key=lambda one: one.architecture):
        rows.setdefault(one.kernel, []).append(f"{one.registers} / {one.stack} / {one.shared / 1024:.0f}")
    header = ["kernel", *(f"sm_{each}" for each in sorted({one.architecture for one in found}))]
    shown = table(header, [[name, *cells] for name, cells in rows.items()], names=1)
    return page_of_answers(["gpu.offline", *argv], "Triton kernels, compiled without a GPU", what, shown)


def main(argv: list[str]) -> None:
    parser = new_parser("gpu.offline", __doc__)
    parser.add_argument("--quick", action="store_true", help="compile only a few")
    parser.add_argument("--out", type=path, default=RESULTS / "gpu" / "offline.md", help="the page")
    given = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)  # Triton reads this on import
    if given.quick:
        found = measured((90,), (64, 128), [torch.bfloat16, torch.float32])
    else:
        found = measured(ARCHITECTURES, HEAD_DIMS, list(POINTERS))
    write_text(given.out, markdown(found, argv))
    for one in found:
        if one.stack:
            print(f"{one.kernel}, sm_{one.architecture}: {one.stack} bytes of stack")
    print(f"{len(found)} kernels compiled: {given.out}")


if __name__ == "__main__":
    start(main)
