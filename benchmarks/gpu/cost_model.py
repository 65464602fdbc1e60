"""The modelled cost of a decode step on a GPU (kvcompress/bench/cost.py), compared with the limit.

python -m benchmarks.gpu.cost_model      # writes benchmarks/results/gpu/cost_model.md"""

import re
from dataclasses import asdict
from pathlib import Path

from kvcompress.bench.cost import ASSUMED, GRAPH_KERNELS, H100, H200, Shape, Way, limit, step
from kvcompress.bench.shapes import SHAPES
from kvcompress.files import write_text
from kvcompress.flag_types import path

from ..driver import new_parser, start

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
OUT = RESULTS / "cost_model.md"
SHAPE, CONTEXT, KEPT = "qwen2-7b", 32768, 0.1
BATCHES, DEVICES = (1, 8, 32), (H200, H100)
MOST = {1: 1.3, 32: 1.2}  # target of a static step, times the limit, by batch
CONCATENATING = 3  # kernels over the cache: keys and values are copied, then attended to
STATIC = Way("static, one graph", GRAPH_KERNELS, in_graph=True)
UNSPLIT = Way("the same, were it not split over the keys", GRAPH_KERNELS, in_graph=True, blocks=1)


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
        "to read all weights and entries once. **Nothing here was measured.** Assumed "
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
    out = parser.parse_args(argv).out
    write_text(out, markdown())
    print(out.read_text())


if __name__ == "__main__":
    start(main)
