"""What a cache kept, what it should have kept, and the largest tensor made on the way."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompress


def kept_of(cache: kvcompress.CompressedCache) -> list:
    return [cache.kept_indices(layer) for layer in range(len(cache.layers))]


def real_lengths(inputs: dict) -> list[int]:
    return inputs["attention_mask"].sum(1).tolist()


def expected_entries(ratio: float, length: int, on_top: int = 0) -> int:
    on_top = min(on_top, length)
    return max(1, on_top + math.floor(ratio * (length - on_top) + 0.5))


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result
