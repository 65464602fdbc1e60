"""The attention function of compressed continuous batching: the base implementation, then the compression of the
layer."""

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ..cache_name import MODULES_STORE
from ..device import on_device
from ..hooks.attention import has_plain_weights, one_query_per_head, run_base

if TYPE_CHECKING:
    from .pages import CompressedPagedCache


@dataclass(frozen=True)
class OwnEntries:
    """For a batch of decoded tokens, which of the entries that are read belong to each request.

    Attributes:
        places: LongTensor (requests, most), places among those entries.
        visible: bool (requests, 1, 1, most), False where a request has fewer.
    """

    places: torch.Tensor
    visible: torch.Tensor

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "OwnEntries":
        """Create it for requests with these numbers of entries, stored consecutively."""
        first = on_device([0, *accumulate(lengths)][:-1], device)[:, None]
        place, length = torch.arange(max(lengths), device=device), on_device(lengths, device)[:, None]
        return cls(first + place.minimum(length - 1), (place < length)[:, None, None])


def paged_attention(
    base: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: "CompressedPagedCache | None" = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention contract; `query` is (1, heads, tokens, head_dim), with the tokens of all requests of the
    batch."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    compressor = getattr(cache, "compressor", None)
    own = None
    if compressor is not None and base == "sdpa" and has_plain_weights(kwargs):
        own = compressor.own_entries(module)
    if own is not None:
        result = attend_to_own(module, query, key, value, scaling, cache, own, kwargs), None
    else:
        if MODULES_STORE and cache is not None:
            key, value = cache.store(key, value, module.layer_idx, kwargs)
        elif not MODULES_STORE:
            kwargs["cache"] = cache
        result = run_base(base, module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if compressor is not None:
        compressor.after_attention(module, query, scaling)
    return result


def attend_to_own(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    cache: "CompressedPagedCache",
    own: OwnEntries,
    kwargs: dict,
) -> torch.Tensor:
    """Run a decode step in which each token attends only to its own request's entries: (1, tokens, heads, head_dim).

    Under transformers' mask, each token is multiplied with the entries of all requests, so the work grows with their
    square."""
    requests, index = len(own.places), cache.pages.index
    read = list(kwargs["read_index"])
    read[index] = read[index][own.places].flatten()
    states = cache.store(key, value, module.layer_idx, kwargs | {"read_index": read})
    keys, values = (each[0].unflatten(1, (requests, -1)).transpose(0, 1) for each in states)
    return one_query_per_head(query[0].transpose(0, 1).unsqueeze(2), keys, values, own.visible, scaling).transpose(0, 1)
