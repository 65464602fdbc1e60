"""Checks whether a cache that is given, such as a loaded one, belongs to a session."""

from typing import Any
from weakref import WeakSet

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.saved import differences, in_force
from ..errors import KVCompressError
from ..policy.make import make_policy
from .model import check_cache, check_heads


def check_reused(cache: object, model: PreTrainedModel, new_cache: dict[str, Any] | None) -> None:
    """Raise KVCompressError unless the model has filled this cache under the session's policy.

    `new_cache` holds the arguments with which the session creates caches; None if it creates none, which allows any
    policy."""
    if not isinstance(cache, CompressedCache):
        raise KVCompressError(f"a {type(cache).__name__} is not a CompressedCache, so it cannot be reused")
    if cache.is_empty:
        raise KVCompressError("there is nothing to reuse in this CompressedCache: it has not seen a prompt yet")
    _check_filled_by(cache, model)
    if new_cache is None:
        return
    given = {name: value for name, value in new_cache.items() if name not in ("max_new_tokens", "tokenizer")}
    if differing := differences(in_force(cache.policy), in_force(make_policy(**given))):
        raise KVCompressError(
            f"the CompressedCache was compressed in another way than this session's: {differing}; "
            "kvcompress.attach(model) takes any"
        )


def check_given(cache: CompressedCache, model: PreTrainedModel) -> None:
    """Raise KVCompressError unless the model can fill this cache, or has filled it."""
    if cache.is_empty:
        check_heads(model, cache.policy)
        check_cache(model, cache.config)
    elif not torch.compiler.is_compiling():
        _check_filled_by(cache, model)


def check_replaced(cache: Cache, before: WeakSet[Cache]) -> None:
    """Raise KVCompressError unless a session's own cache can take the place of one that is given, which stays empty.

    `before` holds those of earlier passes. The next pass of such a loop must be given the output's cache."""
    if type(cache) is not DynamicCache or cache.get_seq_length() or getattr(cache, "offloading", False):
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else f"a {type(cache).__name__}"
        raise KVCompressError(
            f"past_key_values is {kind} with {cache.get_seq_length()} tokens: inside compress(...), which takes "
            "cache_implementation=, it must be a CompressedCache or absent"
        )
    if torch.compiler.is_compiling():
        return
    if cache in before:
        raise KVCompressError(
            "past_key_values is a DynamicCache that was given before and has stayed empty: inside compress(...) a "
            "CompressedCache takes its place, so go on with the output's past_key_values"
        )
    before.add(cache)


def _check_filled_by(cache: CompressedCache, model: PreTrainedModel) -> None:
    """Raise KVCompressError for a filled cache of another model. Of a cache from a pickle only its config is known."""
    known = cache.filled_by()
    if known is model:
        return
    check_cache(model, cache.config)
    if known is not None:
        raise KVCompressError("the CompressedCache was filled by another model than this session's")
