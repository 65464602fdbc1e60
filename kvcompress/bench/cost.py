"""What a decode step costs on a GPU: the bytes that it must read and the kernels that it must launch.

`Assumptions` lists everything that is assumed about kernels and devices. benchmarks/gpu/cost_model.py makes a table of
it, and benchmarks/gpu/measured.py puts it beside what was measured."""

from dataclasses import dataclass
from typing import Any

import torch

# Kernels per layer and decode step. Counted by `kvcompress bench launches` (benchmarks/results/gpu/launches.md: `full`,
# `snapkv`), and in Inductor's code by tests/kvcompress/cache/test_static_graph.py.
EAGER_KERNELS = 45
GRAPH_KERNELS = 14


@dataclass(frozen=True)
class Device:
    """A GPU; `bandwidth` is the bytes per second of a kernel that only reads."""

    name: str
    bandwidth: float


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about kernels and devices.

    Attributes:
        launch: seconds from one kernel of an eager step to the next, if the kernel is shorter; as measured on an H100
            (benchmarks/results/gpu/h100.md).
        launch_in_graph: the same in a CUDA graph.
        product_share: fraction of the bandwidth reached by a product of few rows with a matrix.
        block_bandwidth: bytes per second read by one thread block; a few of them do not saturate the device.
        rate_share: fraction of the specified memory rate reached by a kernel that only reads.
    """

    launch: float = 18e-6
    launch_in_graph: float = 2e-6
    product_share: float = 0.9
    block_bandwidth: float = 60e9
    rate_share: float = 0.9


ASSUMED = Assumptions()


def device_of(properties: Any) -> Device:
    """Return a device from `torch.cuda.get_device_properties`; its memory transfers twice per clock."""
    rate = 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8
    return Device(properties.name, ASSUMED.rate_share * rate)


def launches_bind(layers: int, weights: int, cache: int, device: torch.device) -> bool:
    """Whether launching an eager step takes longer than reading `weights` and `cache`, in bytes; False off CUDA.

    A static graph is then faster."""
    if device.type != "cuda":
        return False
    reading = (weights + cache) / device_of(torch.cuda.get_device_properties(device)).bandwidth
    return layers * EAGER_KERNELS * ASSUMED.launch > reading
