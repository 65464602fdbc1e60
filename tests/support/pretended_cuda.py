"""A CUDA device that is none: tensors that say they are on it and lie in the CPU's memory.

Inside `pretended_cuda()`, a tensor on "cuda" computes as on a CPU, but an operation between the two devices raises as
it would there, and whatever makes a host wait for the device is noted. So code that mixes devices, or waits in a decode
step, shows without a GPU. Of CUDA's own, streams are stand-ins, and Triton and CUDA graphs are not there.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
MOVES = {aten._to_copy.default, aten.copy_.default}
TAKES_CPU_INDICES = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
}  # fmt: skip
# Their result's shape or value has to be known on the host.
WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.is_nonzero.default,
}  # fmt: skip


class OnCuda(torch.Tensor):
    """`inner`: where the numbers are, in the CPU's memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnCuda":
        this = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",  # to torch itself, which would look for a driver
            requires_grad=inner.requires_grad,
        )
        this.inner = inner
        return this

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, [])

    device = property(lambda self: CUDA)
    is_cuda, is_meta = property(lambda self: True), property(lambda self: False)

    def as_subclass(self, kind: type) -> torch.Tensor:
        return self.inner.as_subclass(kind)  # only carries notes

    def tolist(self) -> object:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def __repr__(self, **kwargs: object) -> str:
        return f"OnCuda({self.inner!r})"


def run(func, args: tuple, kwargs: dict, waits: list[str]):
    """`func` on what lies inside; the result is on the device of what was given, or asked for."""
    given, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    devices = {each.device.type for each in tensors}
    asked = kwargs.get("device")
    if asked is not None:
        device = where(asked)
        if func in MOVES and devices != {device}:
            waits.append(str(func))
    elif func == aten.copy_.default:
        device = args[0].device.type
        if len(devices) > 1:
            waits.append(str(func))
    else:
        check_devices(func, args, kwargs, tensors)
        device = next((each.device.type for each in tensors if each.ndim), next(iter(devices), "cpu"))
        if device == "cuda" and waits_for_device(func, args):
            waits.append(str(func))
    args, kwargs = tree_unflatten([inside(leaf) for leaf in given], spec)
    result = func(*args, **kwargs)
    if device != "cuda":
        return result
    known = {id(each.inner): each for each in tensors if isinstance(each, OnCuda)}
    return tree_map(lambda leaf: wrapped(leaf, known), result)


def where(device: object) -> str:
    kind = torch.device(device).type
    return "cuda" if kind == "meta" else kind


def waits_for_device(func, args: tuple) -> bool:
    if func in WAITING:
        return True
    if func not in TAKES_CPU_INDICES:
        return False
    return any(index is not None and (index.dtype == torch.bool or index.device.type == "cpu") for index in args[1])


def check_devices(func, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> None:
    """Raises RuntimeError as CUDA does; a number may come from the CPU, and indices too."""
    if func in TAKES_CPU_INDICES:
        tensors = [args[0], *args[2:3]] + ([index for index in args[1] if index is not None and args[0].device == CPU])
        tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
    devices = {each.device.type for each in tensors if each.ndim}
    if len(devices) > 1 or ("cuda" not in devices and any(each.device == CUDA for each in tensors) and devices):
        found = [(tuple(each.shape), each.device.type) for each in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}: {found}")


def inside(leaf: object) -> object:
    if isinstance(leaf, OnCuda):
        return leaf.inner
    return CPU if isinstance(leaf, torch.device) else leaf


def wrapped(leaf: object, known: dict[int, OnCuda]) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return known.get(id(leaf)) if id(leaf) in known else OnCuda(leaf)


class Stream:
    """A copying stream that is always done."""

    def __init__(self, *args: object) -> None: ...

    def wait_stream(self, other: "Stream") -> None: ...


class Pretending(TorchDispatchMode):
    """waits: the operations for which the host had to wait, or copied between the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, self.waits)


def made_on_cpu(make, data: object, *args: object, device: object = None, **kwargs: object) -> torch.Tensor:
    data = tree_map(lambda leaf: leaf.inner if isinstance(leaf, OnCuda) else leaf, data)  # numbers in a list
    made = make(data, *args, **kwargs)
    return made if device is None else made.to(CUDA if where(device) == "cuda" else device)


@contextmanager
def pretended_cuda() -> Iterator[Pretending]:
    stream = Stream()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("kernels.ragged_decode", "kernels.column_sums", "cache.storage.turboquant"):
            patch.setattr(f"kvcompress.{module}.has_triton", lambda: False)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        patch.setattr(OnCuda, "record_stream", lambda self, stream: None, raising=False)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        for name in ("tensor", "as_tensor"):  # these look for a driver by themselves
            patch.setattr(torch, name, partial(made_on_cpu, getattr(torch, name)))
        with Pretending() as mode:
            yield mode
