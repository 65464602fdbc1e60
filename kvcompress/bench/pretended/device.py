"""The context in which PyTorch, transformers and Triton see a CUDA device."""

import contextlib
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .counts import Counts, place, touched
from .tensors import CUDA, CudaTensor, Made, attention, current, inner_of, mapped, on_cuda

H200 = SimpleNamespace(
    name="Pretended H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=62914560,
    gcnArchName="sm_90",
    max_threads_per_block=1024,
    memory_clock_rate=3_201_000,  # kHz
    memory_bus_width=6144,  # bits
    total_memory=150_000_000_000,
)


class PretendedCuda:
    """Context manager in which tensors may be on a pretended `cuda:0`, or on one of several `devices`.

    Computation runs on the CPU, operations between two devices raise as on CUDA, and kernels, bytes and waits are
    counted. Triton's kernels run in its interpreter, for which `TRITON_INTERPRET=1` must be set before Triton is
    imported. Streams are stand-ins; there are no CUDA graphs.

        with PretendedCuda() as gpu:
            model.to("cuda")
            with gpu.counting() as counts:
                model(...)
            counts.kernels, counts.waits_at
    """

    def __init__(self, devices: int = 1):
        """What is counted is counted over all `devices`."""
        self.devices = devices
        self.counts = Counts()
        self.on_wait = "default"  # the mode of `torch.cuda.set_sync_debug_mode`
        self.live = self.peak = 0  # bytes
        self._owners: Counter = Counter()
        self._sizes: dict[int, int] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counts]:
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def wait(self, why: str) -> None:
        self.counts.wait(why)
        if self.on_wait == "warn":
            warnings.warn(f"called a synchronizing CUDA operation: {why} at {place()}", stacklevel=2)
        elif self.on_wait == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {why} at {place()}")

    def held(self, inner: torch.Tensor, device: torch.device = CUDA) -> CudaTensor:
        """Wrap a tensor as one on a device; its memory counts while it is referenced."""
        tensor, storage = CudaTensor(inner, device), inner.untyped_storage()
        if address := storage.data_ptr():
            if not self._owners[address]:
                self._sizes[address] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
            self._owners[address] += 1
            weakref.finalize(tensor, self._dropped, address)
        return tensor

    def _dropped(self, address: int) -> None:
        self._owners[address] -= 1
        if not self._owners[address]:
            self.live -= self._sizes.pop(address)
            del self._owners[address]

    def __enter__(self) -> "PretendedCuda":
        import torch._dynamo  # it must list torch's functions before any is replaced

        torch._dynamo.trace_rules.get_torch_obj_rule_map()
        self._exits = contextlib.ExitStack()
        for name, stand_in in _torch_cuda(self).items():
            self._exits.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        self._exits.enter_context(mock.patch.object(torch.profiler, "profile", _of_the_cpu(torch.profiler.profile)))
        torch._C._ensureCUDADeviceGuardSet()
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._exits.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        if os.environ.get("TRITON_INTERPRET") == "1":
            for patch in _triton(self):
                self._exits.enter_context(patch)
        current.append(self)
        self._exits.enter_context(self._seen())
        run = threading.Thread.run

        def run_there(thread: threading.Thread) -> None:  # a mode is of the thread that enters it
            with self._seen():
                run(thread)

        self._exits.enter_context(mock.patch.object(threading.Thread, "run", run_there))
        return self

    @contextlib.contextmanager
    def _seen(self) -> Iterator[None]:
        with Functions(self), Made(self):
            yield

    def __exit__(self, *exception: object) -> None:
        self._exits.close()
        if len(current) > 1:
            current.pop()


class Functions(TorchFunctionMode):
    """Replaces torch functions that would call the driver, or that are decomposed before they can be counted."""

    def __init__(self, gpu: PretendedCuda):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        is_there = isinstance(first, CudaTensor)
        if func in (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
            if any(isinstance(each, CudaTensor) for each in [*args, *kwargs.values()]):
                return attention(self.gpu, *args, **kwargs)
        elif func in (torch.tensor, torch.as_tensor, torch.asarray):
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                return on_cuda(func, *args, **kwargs)
        elif func is torch.Tensor.new_tensor and is_there:
            return on_cuda(torch.tensor, args[1], dtype=kwargs.get("dtype") or first.dtype, device=first.device)
        elif func is torch.Tensor.pin_memory:
            return first.clone()
        elif func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and is_there:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, list) for each in index):  # becomes a tensor on the device, by a copy that waits
                index = tuple(torch.tensor(each).to(first.device) if isinstance(each, list) else each for each in index)
                return func(first, index, *args[2:])
        elif is_there and (own := OWN.get(func)):
            return own(*args, **kwargs)
        return func(*args, **kwargs)


OWN: dict[Callable, Callable] = {
    getattr(torch.Tensor, name): getattr(CudaTensor, name)
    for name in ("tolist", "data_ptr", "untyped_storage", "numpy", "record_stream", "as_subclass", "is_pinned")
}


def _torch_cuda(gpu: PretendedCuda) -> dict[str, Any]:
    """Return the stand-ins for functions of `torch.cuda`."""

    def nothing(*args: object, **kwargs: object) -> None: ...

    class Event:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

        record = wait = nothing

        def synchronize(self) -> None:
            gpu.wait("event.synchronize")

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: "Event") -> float:
            return 1.0

    class Stream:
        device, cuda_stream = CUDA, 0

        def __init__(self, *args: object, **kwargs: object) -> None: ...

        wait_stream = wait_event = nothing

        def record_event(self, event: Event | None = None) -> Event:
            return event or Event()

        def synchronize(self) -> None:
            gpu.wait("stream.synchronize")

        def query(self) -> bool:
            return True

    class device(contextlib.nullcontext):
        def __init__(self, *args: object) -> None:
            super().__init__()

    stream = Stream()
    constant = {
        "is_available": True,
        "device_count": gpu.devices,
        "current_device": 0,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "_is_in_bad_fork": False,
        "is_bf16_supported": True,
        "get_device_properties": H200,
        "get_device_capability": (H200.major, H200.minor),
        "get_device_name": H200.name,
        "get_sync_debug_mode": 0,
        "memory_stats": {},
        "current_stream": stream,
        "default_stream": stream,
    }
    silent = ("_lazy_init", "init", "set_rng_state", "empty_cache", "set_device", "manual_seed_all", "manual_seed")
    modes = {0: "default", 1: "warn", 2: "error"}
    return {
        **{name: lambda *args, value=value, **kwargs: value for name, value in constant.items()},
        **dict.fromkeys(silent, nothing),
        "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
        "synchronize": lambda *args: gpu.wait("synchronize"),
        "set_sync_debug_mode": lambda mode: setattr(gpu, "on_wait", modes.get(mode, mode)),
        "memory_allocated": lambda *args: gpu.live,
        "memory_reserved": lambda *args: gpu.live,
        "max_memory_allocated": lambda *args: gpu.peak,
        "max_memory_reserved": lambda *args: gpu.peak,
        "reset_peak_memory_stats": lambda *args: setattr(gpu, "peak", gpu.live),
        "mem_get_info": lambda *args: (H200.total_memory - gpu.live, H200.total_memory),
        "stream": lambda *args: contextlib.nullcontext(),
        "device_of": lambda *args: contextlib.nullcontext(),
        "device": device,
        "Stream": Stream,
        "Event": Event,
    }


def _of_the_cpu(profile: Callable) -> Callable:
    """Return a profiler that records nothing of a device: the driver would fail at each operation."""

    def profiled(*, activities: list[Any], **kwargs: Any) -> Any:
        return profile(activities=[each for each in activities if each.name == "CPU"], **kwargs)

    return profiled


def _triton(gpu: PretendedCuda) -> list[Any]:
    """Return patches that count Triton's kernels and run them in the interpreter on the wrapped tensors."""
    try:
        import numpy as np
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return []
    launcher, remap = interpreter.InterpretedFunction.__getitem__, interpreter._patch_lang

    def counted(kernel: Any, grid: Any) -> Callable:
        interpreted = launcher(kernel, grid)

        def launch(*args: Any, **kwargs: Any) -> Any:
            given = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor)]
            if not all(isinstance(each, CudaTensor) for each in given):
                raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?) at {place()}")
            sizes = {each.data_ptr(): touched(each.inner) for each in given}
            gpu.counts.launch(f"triton {kernel.fn.__name__}", 1, sum(sizes.values()))
            if len({each.device for each in given}) > 1:
                raise ValueError(f"Pointer arguments are on several devices at {place()}")
            args, kwargs = mapped(inner_of, (args, kwargs))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return interpreted(*args, **kwargs)

        return launch

    def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, most: Any) -> Any:
        """Multiply numbers: the interpreter of Triton 3.9 multiplies the bits of bfloat16 instead."""

        def as_numbers(handle: Any) -> Any:
            is_bf16 = handle.dtype.scalar == tl.bfloat16
            return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bf16 else handle.data

        product = np.matmul(as_numbers(a), as_numbers(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def remapped_once(function: Any) -> Any:
        """Have the language's functions interpreted; Triton does so again for each function that a kernel calls."""
        languages = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        is_done = not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if is_done else remap(function)

    return [
        mock.patch.object(interpreter, "_patch_lang", remapped_once),
        mock.patch.object(interpreter.InterpretedFunction, "__getitem__", counted),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot),
    ]
