"""`Contents`: what all layers of a cache hold between two forward passes."""

import copy
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin

from .cache import CompressedCache
from .layer import nbytes_of
from .memory import Memory


@dataclass(frozen=True)
class Contents:
    """What the layers of a cache hold between two passes.

    Attributes:
        memories: those of the compressed layers; their entries are not copied.
        empty: an empty tensor of each compressed layer's dtype, on its device.
        others: the layers with transformers' own storage, by their index.
    """

    memories: list[Memory]
    empty: list[torch.Tensor]
    others: dict[int, CacheLayerMixin]

    @classmethod
    def of(cls, cache: CompressedCache) -> "Contents":
        """Return the present contents; the cache continues without changing them."""
        contents = cls(
            [layer.fork() for layer in cache.compressed_layers],
            [layer.keys for layer in cache.compressed_layers],
            copy.deepcopy(cache.other_layers),
        )
        cache.finish()
        return contents

    def restore(self, cache: CompressedCache) -> None:
        """Let another cache of the same policy continue from these contents, without changing them."""
        for layer, memory, empty in zip(cache.compressed_layers, self.memories, self.empty, strict=True):
            layer.lazy_initialization(empty, empty)
            layer.restore(memory.fork())
        for layer_idx, layer in self.others.items():
            cache.layers[layer_idx] = copy.deepcopy(layer)
        cache.finish()

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories) + nbytes_of(self.others.values())
