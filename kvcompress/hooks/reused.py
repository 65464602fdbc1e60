"""Whether a filled cache, such as a loaded one, may be reused in a session."""

from typing import Any

from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.saved import differences, in_force
from ..errors import KVCompressError
from ..policy.policy import make_policy
from .model import check_cache


def check_reused(cache: object, model: PreTrainedModel, new_cache: dict[str, Any] | None) -> None:
    """Raises KVCompressError unless this is a cache that the model has filled, under the policy of the caches that the
    session makes with the arguments `new_cache`; None where it makes none."""
    if not isinstance(cache, CompressedCache):
        raise KVCompressError(f"a {type(cache).__name__} is not a CompressedCache: there is nothing to reuse in it")
    if cache.is_empty:
        raise KVCompressError("there is nothing to reuse in this CompressedCache: it has not seen a prompt yet")
    check_cache(model, cache.config)
    if cache.filled_by() not in (None, model):
        raise KVCompressError("the CompressedCache is of another model than this session's")
    if new_cache is None:
        return
    given = {name: value for name, value in new_cache.items() if name != "max_new_tokens"}
    if differing := differences(in_force(cache.policy), in_force(make_policy(**given))):
        raise KVCompressError(
            f"the CompressedCache was compressed in another way than this session's: {differing}; "
            "kvcompress.attach(model) takes any"
        )
