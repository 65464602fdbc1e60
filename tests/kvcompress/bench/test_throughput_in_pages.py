"""Methods inside transformers' continuous batching, at equal memory for keys and values."""

import pytest

from kvcompress.bench.contenders import MethodSpec
from kvcompress.bench.throughput import Asked, Continuous, entry_bytes
from kvcompress.errors import KVCompressError
from tests.support.families import FAMILIES

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

REQUESTS = [Asked(list(range(8 + i, 28 + i)), new) for i, new in enumerate((30, 3, 30, 11, 30))]


def test_a_method_serves_the_same_requests_in_fewer_steps():
    model, steps = FAMILIES["qwen2"].build(2), []
    kv_bytes = 7 * Continuous.PAGE * entry_bytes(model)
    handle = model.register_forward_hook(lambda *_: steps.append(1))
    taken = {}
    try:
        for contender in (Continuous(model), Continuous(model, MethodSpec.parse("keydiff:decode_interval=4", 1.0), 12)):
            steps.clear()
            served = contender.serve(REQUESTS, kv_bytes, "wall", 60.0)
            assert (served.answers, served.tokens) == (5, 104)
            assert served.kv_bytes == kv_bytes
            taken[contender.name] = len(steps)
    finally:
        handle.remove()
    assert taken["keydiff:decode_interval=4, in transformers continuous batching"] < taken[Continuous.name]


def test_a_request_that_cannot_be_answered_is_said():
    model = FAMILIES["qwen2"].build(2)
    contender = Continuous(model, MethodSpec.parse("keydiff", 1.0), 100)
    with pytest.raises(KVCompressError, match="continuous batching: No requests can be scheduled"):
        contender.serve([Asked([8] * 40, 100)], 2 * Continuous.PAGE * entry_bytes(model), "wall", 60.0)
