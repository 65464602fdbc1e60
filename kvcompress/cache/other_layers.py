"""Layers without full attention, which keep transformers' own cache: what does not work beside them."""

from collections.abc import Iterable

from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ..errors import KVCompressError
from ..policy.policy import Policy

NAMES = {DynamicLayer: "cross-attention", DynamicSlidingWindowLayer: "sliding windows"}


def layer_names(kinds: Iterable[type[CacheLayerMixin]]) -> str:
    """Name the kinds of layers for a message."""
    return ", ".join(sorted(NAMES.get(kind, kind.__name__) for kind in kinds))


def check_other_layers(kinds: set[type[CacheLayerMixin]], policy: Policy, model_type: str) -> None:
    """Raise KVCompressError for uncompressed layers of these kinds if they, or an option, do not work then."""
    # Layers that choose the keys they attend to hide the others only under an attention of transformers' own.
    if choosing := [kind for kind in kinds if kind not in NAMES and not issubclass(kind, LinearAttentionLayer)]:
        raise KVCompressError(
            f"a {model_type} model is not supported: some of its layers choose the keys that they attend to "
            f"({layer_names(choosing)}), which only works with an attention implementation of transformers' own"
        )
    engine, what = policy.engine, None
    if engine.first_token == "compressed":
        what, wanted = "first_token='compressed', which feeds a token twice,", "full attention"
    elif kinds != {DynamicSlidingWindowLayer}:
        wanted = "full attention or sliding windows"
        if policy.cluster.second_pass == "context":
            what = f"method {policy.method!r}, which reads the prompt twice,"
        elif engine.prefill_chunk is not None:
            what = f"prefill_chunk={engine.prefill_chunk}, which feeds the prompt piece by piece,"
        elif engine.scope == "context-first":
            what = "scope='context-first', which feeds the prompt in two parts,"
    if what is not None:
        raise KVCompressError(
            f"{what} needs a model whose layers all have {wanted}: {model_type} has others ({layer_names(kinds)})"
        )
