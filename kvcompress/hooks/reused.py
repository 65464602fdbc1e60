"""Checks whether a cache that is given, such as a loaded one, belongs to a session."""

from typing import Any

import torch
from transformers import PreTrainedModel

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


def _check_filled_by(cache: CompressedCache, model: PreTrainedModel) -> None:
    """Raise KVCompressError for a filled cache of another model. Of a cache from a pickle only its config is known."""
    known = cache.filled_by()
    if known is model:
        return
    check_cache(model, cache.config)
    if known is not None:
        raise KVCompressError("the CompressedCache was filled by another model than this session's")
