"""The modelled cost of a decode step on a GPU (kvcompress/bench/cost.py), compared with the limit.

Not counted: activations, which are less than a hundredth of the weights up to 32 rows, and everything outside the
language model's step.

python -m benchmarks.gpu.cost_model      # writes benchmarks/results/gpu/cost_model.md"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcompress.bench.cost import ASSUMED, GRAPH_KERNELS, Assumptions, Device
from kvcompress.bench.shapes import SHAPES
from kvcompress.flag_types import path

from ..driver import new_parser, publish, start

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
OUT = RESULTS / "cost_model.md"
SHAPE, CONTEXT, KEPT = "qwen2-7b", 32768, 0.1
NUMBER = 2  # bytes per number
H200, H100 = Device("H200", 4.3e12), Device("H100", 3.0e12)
BATCHES, DEVICES = (1, 8, 32), (H200, H100)
MOST = {1: 1.3, 32: 1.2}  # target of a static step, times the limit, by batch
CONCATENATING = 3  # kernels over the cache: keys and values are copied, then attended to


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in bytes, in 16 bits.

    Attributes:
        layers: number of layers.
        products: of each matrix of a layer.
        head: of the matrix that computes logits.
        entry: of a token's keys and values in one layer.
        kv_heads: number of KV heads in a layer.
    """

    layers: int
    products: tuple[int, ...]
    head: int
    entry: int
    kv_heads: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """Create a shape from a `config` in `shapes.SHAPES`."""
        hidden, mlp, kv_heads = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
        kv = kv_heads * hidden // config["num_attention_heads"]
        products = (hidden * hidden, hidden * kv, hidden * kv, hidden * hidden, *[hidden * mlp] * 3)
        return cls(
            config["num_hidden_layers"],
            tuple(NUMBER * size for size in products),
            NUMBER * hidden * config["vocab_size"],
            2 * NUMBER * kv,
            kv_heads,
        )

    @property
    def weights(self) -> int:
        return self.layers * sum(self.products) + self.head


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        kernels: all kernels per layer.
        kv_kernels: how many of them read or write the layer's whole cache.
        in_graph: whether they run in one CUDA graph.
        blocks: thread blocks per row and KV head that read the cache at once; None for enough to saturate the device.
    """

    name: str
    kernels: float
    kv_kernels: int = 1
    in_graph: bool = False
    blocks: int | None = None


STATIC = Way("static, one graph", GRAPH_KERNELS, in_graph=True)
UNSPLIT = Way("the same, were it not split over the keys", GRAPH_KERNELS, in_graph=True, blocks=1)


def limit(shape: Shape, device: Device, batch: int, entries: int) -> float:
    """Return the seconds to read weights and cache once; `entries` are per row and layer."""
    return (shape.weights + batch * entries * shape.layers * shape.entry) / device.bandwidth


def step(shape: Shape, device: Device, batch: int, entries: int, way: Way, assumed: Assumptions = ASSUMED) -> float:
    """Return the seconds of a decode step, in which each kernel takes as long as its bytes, but at least its launch."""
    least = assumed.launch_in_graph if way.in_graph else assumed.launch

    def product(size: int) -> float:
        return max(least, size / (assumed.product_share * device.bandwidth))

    bandwidth = device.bandwidth
    if way.blocks is not None:
        bandwidth = min(bandwidth, batch * shape.kv_heads * way.blocks * assumed.block_bandwidth)
    over_cache = max(least, batch * entries * shape.entry / bandwidth)
    others = way.kernels - len(shape.products) - way.kv_kernels
    layer = sum(map(product, shape.products)) + way.kv_kernels * over_cache + others * least
    return shape.layers * layer + product(shape.head)


def counted_kernels() -> dict[str, float]:
    """Return the kernels per layer of an eager step, by the cache's name in launches.md."""
    page = (RESULTS / "launches.md").read_text()
    return {name: float(kernels) for name, kernels in re.findall(r"^\| (\S+) \| ([\d.]+) \|", page, re.MULTILINE)}


def ways() -> dict[float, list[Way]]:
    """Return the ways to run a step, by the fraction of the context that is kept."""
    kernels = counted_kernels()
    eager = {name: Way(f"{name.partition('@')[0]}, eager", each) for name, each in kernels.items()}
    full = [Way("DynamicCache, eager", kernels["DynamicCache"], CONCATENATING), eager["full"], STATIC, UNSPLIT]
    return {1.0: full, KEPT: [eager["snapkv@0.2"], eager["adakv@0.2"], STATIC, UNSPLIT]}


def markdown() -> str:
    shape = Shape.of(SHAPES[SHAPE])
    assumed = ", ".join(f"`{name}` {value:g}" for name, value in asdict(ASSUMED).items())
    devices = ", ".join(f"{device.name} {device.bandwidth / 1e12:g} TB/s" for device in DEVICES)
    lines = [
        "# A decode step's cost, on paper",
        "",
        f"Milliseconds per step of {SHAPE}'s shape in 16 bits behind {CONTEXT:,} tokens, and times the limit, which is "
        "to read all weights and entries once. Nothing here was measured; [h100.md](h100.md) has what was. Assumed "
        f"(`kvcompress/bench/cost.py`): {assumed}; bandwidth: {devices}. Kernels per layer: eager by "
        f"[launches.md](launches.md), {GRAPH_KERNELS} in a graph by Inductor's code "
        "(`tests/kvcompress/cache/test_static_graph.py`).",
    ]
    for device in DEVICES:
        lines += ["", f"## {device.name}", "", "| | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |"]
        lines.append("|---" + "|---:" * len(BATCHES) + "|")
        for share, some in ways().items():
            entries = round(share * CONTEXT)
            limits = [limit(shape, device, batch, entries) for batch in BATCHES]
            cells = [f"{1e3 * least:.1f}" for least in limits]
            lines.append(f"| **limit, {share:.0%} kept** | " + " | ".join(cells) + " |")
            for way in some:
                taken = [step(shape, device, batch, entries, way) for batch in BATCHES]
                cells = [f"{1e3 * each:.1f} ({each / least:.2f}x)" for each, least in zip(taken, limits, strict=True)]
                lines.append(f"| {way.name} | " + " | ".join(cells) + " |")
    aims = ", ".join(f"{most}x at batch {batch}" for batch, most in MOST.items())
    lines += ["", f"Aim for the static step, all or {KEPT:.0%} kept: at most {aims}.", ""]
    return "\n".join([*lines, "Made by `python -m benchmarks.gpu.cost_model`.", ""])


def main(argv: list[str]) -> None:
    parser = new_parser("gpu.cost_model", __doc__)
    parser.add_argument("--out", type=path, default=OUT, help="the page")
    publish(parser.parse_args(argv).out, markdown())


if __name__ == "__main__":
    start(main)
