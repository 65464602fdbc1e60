"""The device: wait for it, and read its peak of memory."""

from pathlib import Path

import torch


def default_device() -> torch.device:
    """A CUDA GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise(device: torch.device) -> None:
    """Wait until all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    if device.type == "mps":
        torch.mps.empty_cache()
        return
    mark = Path("/proc/self/clear_refs")
    if mark.exists():
        try:
            mark.write_text("5")  # resets VmHWM
        except PermissionError:  # some containers forbid it: the peak then covers the whole process
            return


def peak_memory(device: torch.device) -> int:
    """Bytes; see `Measurement.peak_memory_bytes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":  # counts no peak; what the driver holds does not shrink before `reset_peak_memory`
        return torch.mps.driver_allocated_memory()
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes
