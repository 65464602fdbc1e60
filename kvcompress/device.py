"""Device helpers: copy numbers to a device and back, wait for it, and read its peak memory."""

import gc
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from .errors import KVCompressError, one_line


def default_device() -> torch.device:
    """Return a CUDA GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def checked_device(name: str | None) -> torch.device:
    """Return the device of a name, or the default. Raises KVCompressError if torch cannot use it here."""
    device = torch.device(name) if name else default_device()
    try:
        torch.empty(0, device=device)
    except Exception as error:  # its kind varies by the kind of device
        raise KVCompressError(f"device {str(device)!r} cannot be used: {one_line(error, 200)}") from None
    return device


def runs_triton(device: torch.device) -> bool:
    """Whether our Triton kernels run on the device: on CUDA, where Triton is installed."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def device_of(module: torch.nn.Module) -> torch.device | None:
    """Return the device on which a module computes, None without weights.

    Weights that accelerate offloads are on "meta" between their own passes; its hooks then name the device."""
    weight = next(module.parameters(), None)
    if weight is None:
        return None
    if weight.device.type != "meta":
        return weight.device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    named = (getattr(hook, "execution_device", None) for hook in hooks)
    device = next((device for device in named if device is not None), None)
    return weight.device if device is None else torch.device(device)


def on_device(numbers: object, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy numbers or a tensor from the host to `device`.

    The host does not wait for a CUDA device: the copy from pinned memory is asynchronous."""
    made = torch.as_tensor(numbers, dtype=dtype)
    if device.type != "cuda" or made.device.type == "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


def fetched(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Copy integer or bool tensors to host memory, with one copy, and so one wait, for all tensors on a device."""
    there = [each for each in tensors if each is not None and each.device.type != "cpu"]
    if len(there) < 2:
        return [None if each is None else each.cpu() for each in tensors]
    parts = iter(torch.cat([each.flatten().long() for each in there]).cpu().split([each.numel() for each in there]))
    return [
        next(parts).view(each.shape).to(each.dtype) if each is not None and each.device.type != "cpu" else each
        for each in tensors
    ]


def own_dtypes(device: torch.device) -> AbstractContextManager:
    """Return a context without autocast, which would compute fp32 scores in 16 bits."""
    is_autocast = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_autocast else nullcontext()


class Arriving:
    """Integers that are copied from a device to the host while it does other work."""

    def __init__(self, numbers: torch.Tensor):
        on_cuda = numbers.device.type == "cuda"
        self._here = numbers.to("cpu", non_blocking=on_cuda)  # into pinned memory
        self._arrived = torch.cuda.current_stream(numbers.device).record_event() if on_cuda else None

    def tolist(self) -> list[int]:
        """Return all of them as a flat list, after waiting for the copy."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        return self._here.flatten().tolist()

    def __reduce__(self) -> tuple:
        return Arriving, (torch.tensor(self.tolist()),)  # events cannot be copied


def synchronise(device: torch.device) -> None:
    """Wait until all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def now(device: torch.device) -> float:
    """Return `time.perf_counter()` once all work given to the device is done."""
    synchronise(device)
    return time.perf_counter()


def release_memory() -> None:
    """Collect garbage, and give back what the CUDA allocator holds unused."""
    gc.collect()
    torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now on."""
    if device.type == "cuda":
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(gpu)
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif (mark := Path("/proc/self/clear_refs")).exists():
        with suppress(PermissionError):  # some containers forbid it: the peak then covers the whole process
            mark.write_text("5")  # resets VmHWM


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes; see `Measurement.peak_memory_bytes`."""
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
    if device.type == "mps":  # has no peak counter; the driver's memory does not shrink before `reset_peak_memory`
        return torch.mps.driver_allocated_memory()
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes
