"""What cannot be asked for together, or of a method, is one line that names it, before anything runs."""

import pytest

import kvcompress
from tests.support.families import FAMILIES

MODEL = FAMILIES["qwen2-vl"].build()
NAN = float("nan")
STATIC = {"cache_implementation": "static", "max_new_tokens": 4}
QUANTIZED, THINK = {"cache_implementation": "quantized"}, {"cache_implementation": "think"}
FP8, TURBOQUANT = QUANTIZED | {"kv_backend": "fp8"}, QUANTIZED | {"kv_backend": "turboquant"}
CHUNKS, FAIR = {"prefill_chunk": 8}, {"fair": "first:3"}
FIRST = {"scope": "context-first", "context_tokens": -6}
MOVED = {"positions": "cache", "budget": 9, "ratio": None, "decode_budget": 9}
FASTV, MATCHING = {"method": "fastv"}, {"method": "attention-matching"}
# What is asked of snapkv at ratio 0.5, or changes these, and a part of the message.
REFUSED = [
    # names and numbers
    ({"method": "snapk"}, "there is no method 'snapk' .did you mean 'snapkv'?.*streamingllm"),
    ({"windo": 3}, "'snapkv' has no option 'windo' .did you mean 'window_size'"),
    ({"window_size": 0}, "'snapkv': option 'window_size' is 0"),
    ({"pooling": "sum"}, "'snapkv': option 'pooling' is 'sum'.*'avg' or 'max'"),
    ({"kernel_size": 4}, "kernel_size=4 is even"),
    *(({"ratio": ratio}, f"ratio={ratio!r} is not in") for ratio in (0.0, 1.5, NAN, "0.5")),
    ({"ratio": None, "budget": 0}, "budget=0 is not an integer of at least 1"),
    ({"ratio": None, "budget": 2.5}, "budget=2.5 is not an integer"),
    ({"budget": 10}, "either ratio= or budget="),
    ({"ratio": None}, "needs ratio="),
    ({"head_budget": "even"}, "option 'head_budget' is 'even'.*'shared', 'adaptive' or 'adaptive-kvpress'"),
    ({"safeguard": 1.5}, "option 'safeguard' is 1.5"),
    ({"scope": "all"}, "option 'scope' is 'all'.*'context'"),
    ({"context_tokens": 5}, "context_tokens=5 needs scope='context'"),
    ({"decode_budget": 0}, "option 'decode_budget' is 0"),
    ({"decode_ratio": 1.5}, "option 'decode_ratio' is 1.5"),
    ({"decode_ratio": 0.5, "decode_budget": 5}, "either decode_budget="),
    ({"method": "full", "ratio": None, "decode_budget": 5}, "'full' has no option 'decode_budget'"),
    ({"method": "full"}, "'full' compresses nothing"),
    ({"method": None}, "'full' compresses nothing"),
    ({"prefill_chunk": 0}, "prefill_chunk"),
    # parts of a method
    ({"layer_budget": "pyramyd"}, "no layer_budget 'pyramyd' .did you mean 'pyramid'"),
    ({"merge": "sum"}, "no merge 'sum'; valid: average"),
    ({"merge_modality": "same"}, "merge_modality='same' needs merge="),
    ({"scorer": "snapvk"}, "no method 'snapvk' .did you mean 'snapkv'"),
    ({"scorer": "full"}, "'full' cannot be a scorer"),
    ({"scorer": "fastv"}, "'fastv' cannot be a scorer"),
    ({"method": "criticalkv", "scorer": "knorm"}, "'criticalkv' does not go with scorer="),
    # token methods
    (FASTV | {"ratio": None}, "'fastv' needs ratio="),
    (FASTV | {"ratio": 1.5}, "ratio=1.5 is not in"),
    (FASTV | {"layer": 0}, "'fastv': option 'layer' is 0"),
    (FASTV | {"ratio_of": "prompt"}, "'fastv' drops vision tokens only"),
    (FASTV | {"scorer": "snapkv"}, "'fastv' has no option 'scorer'"),
    (FASTV | {"decode_ratio": 0.5}, "'fastv' has no option 'decode_ratio'"),
    (FASTV | CHUNKS, "'fastv' has no option 'prefill_chunk'"),
    # storages
    ({"cache_implementation": "static"}, "needs max_new_tokens"),
    *((kind | {"decode_budget": 9}, "does not go with decode_budget=") for kind in (STATIC, FP8, THINK)),
    (STATIC | {"key_recent": 3}, "key_recent= needs cache_implementation='think'"),
    (FP8 | {"kv_bits": 4}, "kv_bits=4 is not offered by kv_backend='fp8': 8"),
    (TURBOQUANT | {"kv_bits": 8}, "kv_bits=8 is not offered by kv_backend='turboquant': 2, 3, 4"),
    (QUANTIZED | {"kv_bits": 3}, "kv_bits=3 is not offered by kv_backend='quanto': 2, 4"),
    (FP8 | {"kv_group_size": 32}, "kv_group_size= is not for kv_backend='fp8'"),
    (FP8 | {"kv_residual": 32}, "kv_residual= is not for kv_backend='fp8'"),
    (TURBOQUANT | {"kv_group_size": 32}, "kv_group_size= is not for kv_backend='turboquant'"),
    (TURBOQUANT | {"kv_residual": 32}, "kv_residual= is not for kv_backend='turboquant'"),
    ({"kv_backend": "fp8"}, "kv_backend= needs cache_implementation='quantized'"),
    ({"kv_bits": 2}, "kv_bits= needs cache_implementation='quantized'"),
    (THINK | {"kv_bits": 2}, "kv_bits= needs cache_implementation='quantized'"),
    (THINK | {"key_channels": 0}, "key_channels"),
    (THINK | {"key_channels": 1.5}, "key_channels"),
    (THINK | {"key_recent": -1}, "key_recent"),
    ({"key_channels": 0.5}, "key_channels= needs cache_implementation='think'"),
    # chunks
    (CHUNKS | STATIC, "cache_implementation='static' does not go with prefill_chunk="),
    (CHUNKS | QUANTIZED, "cache_implementation='quantized' does not go with prefill_chunk="),
    (CHUNKS | THINK, "cache_implementation='think' does not go with prefill_chunk="),
    (CHUNKS | {"scope": "context"}, "scope='context' does not go with prefill_chunk="),
    (CHUNKS | FIRST, "a chunk does not know where the question begins"),
    (CHUNKS | {"ratio_of": "vision"}, "ratio_of='vision' does not go with prefill_chunk="),
    (CHUNKS | {"layer_budget": "sparsity"}, "layer_budget='sparsity' does not go with prefill_chunk="),
    (CHUNKS | {"protect": "prompt"}, "protect='prompt' does not go with prefill_chunk="),
    (CHUNKS | FAIR, "prefill_chunk=8 does not go with fair="),
    (CHUNKS | {"method": "kvzip"}, "method 'kvzip' does not go with prefill_chunk="),
    (CHUNKS | {"method": "sagekv"}, "method 'sagekv' does not go with prefill_chunk="),
    (CHUNKS | {"method": "vl-cache", "layer_budget": "uniform"}, "method 'vl-cache' does not go with prefill_chunk="),
    # spans
    ({"fair": "tokens:0-9+tokens:8-12"}, r"fair='tokens:0-9\+tokens:8-12' names tokens twice"),
    ({"fair": "first:3+tokens:2-5"}, "names tokens twice"),
    ({"fair": "last:3+last:2"}, "names tokens twice"),
    ({"fair": "system"}, r"fair='system' names no tokens: allowed are first:N, last:N or tokens:A-B, joined by \+"),
    ({"fair": ""}, "fair='' names no tokens"),
    (FAIR | {"head_budget": "adaptive"}, "head_budget='adaptive' does not go with fair="),
    (FAIR | {"method": "criticalkv"}, "method 'criticalkv' does not go with fair="),
    (FAIR | {"method": "kvcrush"}, "method 'kvcrush' does not go with fair="),
    (FAIR | {"method": "full", "ratio": None}, "method 'full' has no option 'fair'"),
    ({"protect": "first:2", "ratio_of": "vision"}, "ratio_of='vision' evicts no text"),
    *(
        ({"protect": span}, "allowed are prompt, system, question, text, first:N, last:N or tokens:A-B")
        for span in ("", "begin", "first", "first:", "last:-2", "tokens:5-5", "tokens:7-3", "text+", "a+b")
    ),
    # a context that is compressed before its question, and keys that move
    (FIRST | {"method": "hindsight"}, "scope='context-first': it answers the whole prompt"),
    (FIRST | {"positions": "cache"}, "scope='context-first': it moves the keys"),
    (FIRST | {"protect": "prompt"}, "scope='context-first': the context does not know"),
    (MOVED | CHUNKS, "positions='cache'"),
    (MOVED | {"merge": "average"}, "does not go with positions='cache'"),
    (MOVED | {"method": "tgv-kv"}, "does not go with positions='cache'"),
    (MOVED | {"method": "expected-attention"}, "does not go with positions='cache'"),
    # what cannot carry a bias
    (MATCHING | {"positions": "cache"}, "does not go with"),
    (MATCHING | {"merge": "average"}, "does not go with"),
    (MATCHING | QUANTIZED, "does not go with"),
    (MATCHING | THINK, "does not go with"),
    (MATCHING | {"decode_budget": 20}, "does not go with"),
    (MATCHING | CHUNKS, "does not go with"),
    (MATCHING | {"layer_budget": "global"}, "does not go with"),
    (MATCHING | {"scorer": "snapkv"}, "does not go with"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED)
def test_it_is_refused_in_one_line(asked, said):
    for make, of in ((kvcompress.compress, MODEL), (kvcompress.CompressedCache, MODEL.config)):
        with pytest.raises(kvcompress.KVCompressError, match=said) as error:
            make(of, **{"method": "snapkv", "ratio": 0.5, **asked})
        assert "\n" not in str(error.value)
