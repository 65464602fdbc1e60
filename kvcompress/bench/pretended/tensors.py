"""Tensors that claim to be on a CUDA device but hold their numbers in CPU memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .counts import KERNELS, Counts, place, touched, traffic

CUDA = torch.device("cuda", 0)
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
FREE = {"detach", "alias", "lift_fresh", "lift", "_unsafe_view", "is_pinned", "prim_device"}
COPIES = {"copy_", "_to_copy"}
INDEXES = {"index", "index_put_", "index_put", "_index_put_impl_"}
MAY_MIX = {*COPIES, *INDEXES, "lift_fresh", "set_", "resize_as_"}
NEVER_MIX = {"cat", "mm", "bmm", "addmm", "gather", "index_select", "scatter_", "index_copy_"}  # not even with a scalar
NO_INTEGERS = {"mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot"}
# The host needs the shape or the value of their result.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "equal", "_linalg_svd", "_linalg_eigh", "linalg_qr", "geqrf", "cholesky", "_linalg_check_errors",
}  # fmt: skip
NO_TENSOR = {"_local_scalar_dense", "equal", "is_same_size"}


class Device(Protocol):
    """A tensor's view of its device."""

    counts: Counts

    def wait(self, why: str) -> None: ...

    def held(self, inner: torch.Tensor, device: torch.device = CUDA) -> CudaTensor: ...


current: list[Device] = []  # the innermost is last; one stays for tensors that outlive it


class CudaTensor(torch.Tensor):
    """A tensor on a pretended device; `inner` holds the numbers."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device = CUDA) -> CudaTensor:
        this = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            requires_grad=inner.requires_grad,
        )
        this.inner = inner.detach() if inner.requires_grad else inner
        return this

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(current[-1], func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def as_subclass(self, kind: type) -> torch.Tensor:
        return self.inner.as_subclass(kind)  # only carries attributes

    def record_stream(self, stream: object) -> None: ...

    def is_pinned(self, *args: object) -> bool:
        return False

    def tolist(self) -> Any:
        current[-1].wait("tolist")
        return self.inner.tolist()

    def numpy(self, *args: object, **kwargs: object):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __repr__(self, **kwargs: object) -> str:
        return f"CudaTensor({self.inner!r})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        twin = CudaTensor(self.inner.clone(), self.device)
        if getattr(self, "_is_param", False):
            twin = torch.nn.Parameter(twin, self.requires_grad)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: int) -> tuple:
        return CudaTensor, (self.inner, self.device)


class Made(TorchDispatchMode):
    """Handles operations that create a tensor on the device without taking one."""

    def __init__(self, gpu: Device):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(self.gpu, func, args, kwargs or {})


def inner_of(leaf: object) -> object:
    return leaf.inner if isinstance(leaf, CudaTensor) else leaf


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Change the leaves of nested tuples, lists and dicts; torch's own function takes five times as long."""
    if isinstance(tree, tuple | list):
        return type(tree)([mapped(change, part) for part in tree])
    if isinstance(tree, dict):
        return {name: mapped(change, part) for name, part in tree.items()}
    return change(tree)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operation is made of others, on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def run(gpu: Device, func: Any, args: tuple, kwargs: dict) -> Any:
    """Count an operation and run it on the wrapped tensors. Raises RuntimeError where CUDA does."""
    given = [*tensors_in(args), *tensors_in(kwargs)]
    there = [tensor for tensor in given if isinstance(tensor, CudaTensor)]
    wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    to_cuda = wanted is not None and wanted.type == "cuda"
    where = there[0].device if there else CUDA
    if to_cuda:
        where = CUDA if wanted.index is None else wanted
    if not there and not to_cuda:
        return func(*args, **kwargs)
    name = func._schema.name.split("::")[1]
    if func.namespace == "kvcompress":  # an operator of our own, which launches what the device counts
        with Made(gpu):
            return func.redispatch(ON_CUDA, *args, **kwargs)
    if is_composite(func):
        with Made(gpu):  # in inference mode it is not decomposed
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    _check(name, func, args, given, there)
    _wait(gpu, name, func, args, kwargs)
    result = _computed(name, func, args, kwargs, to_cuda)
    _count(gpu, name, func, args, kwargs, result, there)
    is_there = to_cuda or (bool(there) and kwargs.get("device") is None)
    if name in NO_TENSOR or not (is_there or name == "copy_"):
        return result
    known = {id(tensor.inner if isinstance(tensor, CudaTensor) else tensor): tensor for tensor in given}

    def wrapped(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if (before := known.get(id(leaf))) is None:
            return gpu.held(leaf, where)
        if before.shape != leaf.shape or before.stride() != leaf.stride():
            with torch.utils._mode_utils.no_dispatch():
                func(before, *args[1:], **kwargs)  # squeeze_ and similar operations
        return before

    return mapped(wrapped, result)


def _check(name: str, func: Any, args: tuple, given: list[torch.Tensor], there: list[CudaTensor]) -> None:
    here = [tensor for tensor in given if not isinstance(tensor, CudaTensor)]
    are_apart = len({tensor.device for tensor in there}) > 1 and name not in COPIES
    is_mixed = there and here and name not in MAY_MIX and (any(tensor.ndim for tensor in here) or name in NEVER_MIX)
    if are_apart or is_mixed:
        shapes = [(tuple(tensor.shape), str(tensor.device)) for tensor in given]
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {shapes} in {func} at {place()}")
    if there and here and name in INDEXES:
        if not isinstance(args[0], CudaTensor):
            raise RuntimeError(f"indices should be on the device of the indexed tensor (cpu), at {place()}")
        if name != "index" and any(tensor is args[2] and tensor.ndim for tensor in here):
            raise RuntimeError(f"expected values on cuda:0 for {name}, got cpu, at {place()}")
    if name in NO_INTEGERS and there and not there[0].is_floating_point():
        raise RuntimeError(f'"{name}_cuda" not implemented for {there[0].dtype}, at {place()}')


def _wait(gpu: Device, name: str, func: Any, args: tuple, kwargs: dict) -> None:
    if name in WAITING or kwargs.get("check_errors"):
        gpu.wait(name)
    elif name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
        gpu.wait("repeat_interleave without output_size")
    elif name in INDEXES:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                gpu.wait(f"{name} by a mask")
                gpu.counts.launch("nonzero", 3, touched(index))
            elif index is not None and index.ndim and not isinstance(index, CudaTensor):
                gpu.wait(f"{name} by indices of the host")
    elif name in COPIES:
        source = args[0] if name == "_to_copy" else args[1]
        target = kwargs.get("device", source.device) if name == "_to_copy" else args[0].device
        non_blocking = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        crosses = (torch.device(target or source.device).type == "cuda") != isinstance(source, CudaTensor)
        if crosses and source.numel() and not non_blocking:
            gpu.wait("copy to the host" if isinstance(source, CudaTensor) else "copy from the host")


def _computed(name: str, func: Any, args: tuple, kwargs: dict, to_cuda: bool) -> Any:
    kwargs = {**kwargs, "device": torch.device("cpu")} if to_cuda else dict(kwargs)
    kwargs.pop("pin_memory", None)
    args, kwargs = mapped(inner_of, (args, kwargs))
    if name == "_softmax" and args[2]:  # the CPU cannot convert on the way
        return func(args[0].float(), args[1], False)
    if name == "bmm" and func._overloadname == "dtype":  # not on the CPU
        return args[0].to(args[2]).bmm(args[1].to(args[2]))
    if name == "histc" and not args[0].is_floating_point():
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    result = func(*args, **kwargs)
    return result.clone() if name == "_to_copy" and to_cuda and result is args[0] else result


def _count(gpu: Device, name: str, func: Any, args: tuple, kwargs: dict, result: Any, there: list[CudaTensor]) -> None:
    if name in FREE or func.is_view:
        return
    made = list(tensors_in(result))
    inner = [tensor.inner for tensor in there]
    memories = {tensor.untyped_storage().data_ptr() for tensor in inner}
    is_view = made and inner and all(tensor.untyped_storage().data_ptr() in memories for tensor in made)
    if is_view and not func._schema.is_mutable and name != "_to_copy":
        return
    kernels = KERNELS.get(name, 1)
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if name in COPIES and (not inner or to_host):
        kernels = 0  # done by the copy engine
    if made and not any(tensor.numel() for tensor in made) and name != "nonzero":
        kernels = 0
    gpu.counts.launch(name, kernels, traffic(name, inner, made))


def attention(gpu: Device, query, key, value, attn_mask=None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run `scaled_dot_product_attention`, counted as the kernel that PyTorch would choose."""
    parts = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    if len({part.device for part in parts}) > 1:
        raise RuntimeError(f"Expected query, key, value and mask on the same device, at {place()}")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        raise RuntimeError(f"Expected attn_mask dtype to be bool or to match query dtype, at {place()}")
    size = sum(map(touched, parts)) + touched(query)
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= 256:
        is_split = query.shape[2] <= 16 and key.shape[2] > 512
        gpu.counts.launch("attention, flash", 2 if is_split else 1, size)
    elif query.shape[1] == key.shape[1]:
        as_numbers = 2 if attn_mask is not None and attn_mask.dtype == torch.bool else 0
        padded = 1 if attn_mask is not None and attn_mask.shape[-1] % 8 else 0
        gpu.counts.launch("attention, efficient", 1 + as_numbers + padded, size)
    else:  # grouped heads with a mask: no fused kernel
        groups = query.shape[1] // key.shape[1]
        gpu.counts.launch("attention, plain", 10, size + 2 * (groups + 1) * touched(key))
    with _disable_current_modes():
        inner = [None if part is None else part.inner for part in (query, key, value, attn_mask)]
        out = torch.nn.functional.scaled_dot_product_attention(*inner, *args, **kwargs)
    return gpu.held(out.transpose(1, 2).contiguous().transpose(1, 2), query.device)  # the fused kernels' memory layout


def numbers(leaf: object) -> object:
    return leaf.tolist() if isinstance(leaf, CudaTensor) else leaf


def on_cuda(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Do what `torch.tensor(..., device="cuda")` and similar calls do: create on the host, then copy."""
    if isinstance(args[0], CudaTensor):
        return args[0] if kwargs.get("dtype") is None else args[0].to(kwargs["dtype"])
    made = make(*mapped(numbers, args), **{**kwargs, "device": None})
    return made if isinstance(made, CudaTensor) else made.to(kwargs.get("device") or CUDA)
