"""What a decode step costs a GPU, on paper: the bytes that it has to read, and the kernels that it has to launch.

No number here was measured on a device: `Assumptions` has all that is assumed, of kernels and of devices. Left out:
activations, which are below a hundredth of the weights up to 32 rows, and all that is not the language model's step.
"""

from dataclasses import dataclass
from typing import Any

import torch

# Of a decode step, per layer. Counted by `kvcompress bench launches` (benchmarks/results/gpu/launches.md: `full`,
# `snapkv`), and in Inductor's code by tests/kvcompress/cache/test_static_graph.py.
EAGER_KERNELS = 45
GRAPH_KERNELS = 14
NUMBER = 2  # bytes, in 16 bits


@dataclass(frozen=True)
class Device:
    """bandwidth: bytes per second that a kernel which only reads reaches."""

    name: str
    bandwidth: float


H200, H100 = Device("H200", 4.3e12), Device("H100", 3.0e12)


@dataclass(frozen=True)
class Assumptions:
    """Attributes:
    launch: seconds from one kernel of an eager step to the next, if the kernel is shorter.
    launch_in_graph: the same inside of a CUDA graph.
    product_share: of the bandwidth, what a product of few rows with a matrix reaches.
    block_bandwidth: bytes per second that one thread block reads: few of them do not fill the device.
    rate_share: of the rate that a device's memory is sold with, what a kernel that only reads reaches.
    """

    launch: float = 5e-6
    launch_in_graph: float = 2e-6
    product_share: float = 0.9
    block_bandwidth: float = 60e9
    rate_share: float = 0.9


ASSUMED = Assumptions()


@dataclass(frozen=True)
class Shape:
    """Bytes of a model in 16 bits.

    Attributes:
        layers: how many.
        products: of each matrix of a layer.
        head: of the matrix of the logits.
        entry: of a token's keys and values in one layer.
        kv_heads: of a layer.
    """

    layers: int
    products: tuple[int, ...]
    head: int
    entry: int
    kv_heads: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """`config`: as in `shapes.SHAPES`."""
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
    """How a step is run.

    Attributes:
        kernels: per layer, all of them.
        kv_kernels: of these, those that move all that the layer's cache holds.
        in_graph: whether one CUDA graph has them.
        blocks: thread blocks per row and KV head that read the cache at once; None for enough to fill the device.
    """

    name: str
    kernels: float
    kv_kernels: int = 1
    in_graph: bool = False
    blocks: int | None = None


def limit(shape: Shape, device: Device, batch: int, entries: int) -> float:
    """Seconds that reading weights and cache once takes; `entries` per row and layer."""
    return (shape.weights + batch * entries * shape.layers * shape.entry) / device.bandwidth


def step(shape: Shape, device: Device, batch: int, entries: int, way: Way, assumed: Assumptions = ASSUMED) -> float:
    """Seconds of a decode step: each kernel takes as long as its bytes, and no less than its launch."""
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


def device_of(properties: Any, assumed: Assumptions = ASSUMED) -> Device:
    """A device by what `torch.cuda.get_device_properties` says of it: its memory sends twice per clock."""
    rate = 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8
    return Device(properties.name, assumed.rate_share * rate)


def launches_bind(layers: int, weights: int, cache: int, device: torch.device, assumed: Assumptions = ASSUMED) -> bool:
    """Whether an eager step takes longer to launch than the device needs to read `weights` and `cache`, in bytes. One
    static graph would then be faster. False off CUDA."""
    if device.type != "cuda":
        return False
    reading = (weights + cache) / device_of(torch.cuda.get_device_properties(device), assumed).bandwidth
    return layers * EAGER_KERNELS * assumed.launch > reading
