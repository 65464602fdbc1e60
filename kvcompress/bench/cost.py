"""A cost model of a decode step on a GPU: the bytes that it must read and the kernels that it must launch.

No number here was measured on a device; `Assumptions` lists everything that is assumed about kernels and devices. Not
counted: activations, which are less than a hundredth of the weights up to 32 rows, and everything outside the language
model's step."""

from dataclasses import dataclass
from typing import Any

import torch

# Kernels per layer and decode step. Counted by `kvcompress bench launches` (benchmarks/results/gpu/launches.md: `full`,
# `snapkv`), and in Inductor's code by tests/kvcompress/cache/test_static_graph.py.
EAGER_KERNELS = 45
GRAPH_KERNELS = 14
NUMBER = 2  # bytes per number


@dataclass(frozen=True)
class Device:
    """A GPU; `bandwidth` is the bytes per second of a kernel that only reads."""

    name: str
    bandwidth: float


H200, H100 = Device("H200", 4.3e12), Device("H100", 3.0e12)


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about kernels and devices.

    Attributes:
        launch: seconds from one kernel of an eager step to the next, if the kernel is shorter.
        launch_in_graph: the same in a CUDA graph.
        product_share: fraction of the bandwidth reached by a product of few rows with a matrix.
        block_bandwidth: bytes per second read by one thread block; a few of them do not saturate the device.
        rate_share: fraction of the specified memory rate reached by a kernel that only reads.
    """

    launch: float = 5e-6
    launch_in_graph: float = 2e-6
    product_share: float = 0.9
    block_bandwidth: float = 60e9
    rate_share: float = 0.9


ASSUMED = Assumptions()


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


def device_of(properties: Any, assumed: Assumptions = ASSUMED) -> Device:
    """Return a device from `torch.cuda.get_device_properties`; its memory transfers twice per clock."""
    rate = 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8
    return Device(properties.name, assumed.rate_share * rate)


def launches_bind(layers: int, weights: int, cache: int, device: torch.device, assumed: Assumptions = ASSUMED) -> bool:
    """Whether launching an eager step takes longer than reading `weights` and `cache`, in bytes; False off CUDA.

    A static graph is then faster."""
    if device.type != "cuda":
        return False
    reading = (weights + cache) / device_of(torch.cuda.get_device_properties(device), assumed).bandwidth
    return layers * EAGER_KERNELS * assumed.launch > reading
