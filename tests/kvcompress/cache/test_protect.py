"""`protect=`: what it names is kept in every pass, inside the budget, in any batch."""

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.clusters.base import KVCluster
from kvcompress.errors import KVCompressError
from kvcompress.methods import method_info
from tests import fuzz
from tests.support.calibrations import calibration_of
from tests.support.examples import paired, some
from tests.support.families import FAMILIES
from tests.support.kept import expected_entries, kept_of
from tests.support.strategies import METHODS, SOME_METHODS

QWEN2, QWEN2_VL = FAMILIES["qwen2"], FAMILIES["qwen2-vl"]
SETTINGS = {
    "prompt": {"ratio": 0.5, "decode_ratio": 0.55, "decode_interval": 2},
    "first:3+tokens:10-14+last:2": {"ratio": 0.5, "decode_ratio": 0.4, "decode_interval": 3},
    "text": {"ratio": 0.9},
}


def config(method: str, **options: object) -> dict:
    """A configuration of the fuzz: two rows with a picture each, alone, together and in flight."""
    return {**fuzz.of_rows("qwen2-vl", [47, 39], method, [1, 1], seed=5, **options), "slots": 2, "prefill_tokens": 25}


@pytest.mark.parametrize(("method", "setting"), some(paired(METHODS, list(SETTINGS)), SOME_METHODS))
def test_what_is_protected_stays_in_every_pass_and_every_batch(method, setting):
    fuzz.check(config(method, protect=setting, **SETTINGS[setting]))


def latin_square() -> list[tuple[str, str, str]]:
    """Each setting with each head budget and with each layer budget."""
    heads, layers = ("uniform", "shared", "adaptive"), ("uniform", "pyramid", "attention-entropy")
    settings = list(SETTINGS)
    return [(settings[(i + j) % 3], head, layer) for i, head in enumerate(heads) for j, layer in enumerate(layers)]


@pytest.mark.parametrize(("setting", "head_budget", "layer_budget"), latin_square())
def test_parts_stay_whatever_shares_the_budget(setting, head_budget, layer_budget):
    shared = {"head_budget": head_budget, "layer_budget": layer_budget}
    fuzz.check(config("snapkv", protect=setting, **SETTINGS[setting], **shared))


def kept(cache: kvcompress.CompressedCache) -> torch.Tensor:
    """LongTensor (layers, kv_heads, entries) of the one row."""
    return torch.stack([torch.stack(layer[0]) for layer in kept_of(cache)])


def chooses_by_scores(method: str) -> bool:
    cls = method_info(method).cls
    return all(getattr(cls, name) is getattr(KVCluster, name) for name in ("update_kv", "keep", "select"))


@pytest.mark.parametrize("method", some([*filter(chooses_by_scores, METHODS)], ["snapkv", "h2o"]))
def test_protected_tokens_are_counted_in_the_budget(method):
    model = QWEN2.build()
    inputs, options = QWEN2.inputs(model, [50]), calibration_of(method, model)
    with kvcompress.compress(model, method, 0.4, protect="first:4+last:8", **options) as session:
        generate(model, inputs, 2)
    heads = [head for layer in kept_of(session.cache) for head in layer[0]]
    each = expected_entries(0.4, 50, session.cache.policy.budget.on_top) + 1
    assert sum(map(len, heads)) == each * len(heads)


@pytest.mark.parametrize("decode", [30, 25])
def test_with_the_prompt_protected_only_the_answer_is_evicted(decode):
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [20])
    options = {"decode_budget": decode, "decode_interval": 1, "protect": "prompt"}
    with kvcompress.compress(model, "streamingllm", 1.0, sinks=0, **options) as session:
        generate(model, inputs, 20)
    assert (kept(session.cache) == torch.tensor([*range(20), *range(39 - (decode - 20), 39)])).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ratio": 0.2, "protect": "first:11"}, "needs 11 entries in row 0, but the budget keeps 10"),
        ({"ratio": 0.5, "protect": "prompt", "decode_budget": 25}, "needs 26 entries in row 0, but 25 stay"),
        ({"ratio": 0.5, "protect": "last:9", "decode_budget": 9}, "needs 10 entries in row 0, but 9 stay"),
    ],
)
def test_a_budget_without_room_is_refused(options, said):
    model = QWEN2.build()
    with pytest.raises(KVCompressError, match=said), kvcompress.compress(model, "snapkv", **options):
        model.generate(**QWEN2.inputs(model, [50]), max_new_tokens=2)


def test_chunks_keep_what_is_protected():
    model = QWEN2_VL.build()
    inputs = QWEN2_VL.inputs(model, [60], [1])
    options = {"protect": "first:12+tokens:30-41", "prefill_chunk": 16}
    with kvcompress.compress(model, "snapkv", 0.5, **options) as session:
        generate(model, inputs, 1)
    for head in kept(session.cache).flatten(0, 1).tolist():
        assert len(head) == 30
        assert {*range(12), *range(30, 41)} <= set(head)


@pytest.mark.parametrize("layer_budget", ["uniform", "entropy"])
def test_prompts_that_together_protect_more_than_stays_while_decoding_are_refused_before_the_second(layer_budget):
    model = QWEN2.build()
    options = {"protect": "prompt", "decode_budget": 64, "layer_budget": layer_budget}
    with kvcompress.compress(model, "snapkv", 1.0, **options) as session, torch.no_grad():
        cache = model(**QWEN2.inputs(model, [40]), use_cache=True).past_key_values
        with pytest.raises(KVCompressError, match="protect='prompt' needs 71 entries in row 0, but 64 stay"):
            model(QWEN2.inputs(model, [30])["input_ids"], past_key_values=cache)
        assert cache.seen_tokens == 40
        model(QWEN2.inputs(model, [20])["input_ids"], past_key_values=cache)
        for _ in range(20):
            model(torch.tensor([[7]]), past_key_values=cache)
    assert session.cache.seen_tokens == 80


@pytest.mark.parametrize(
    "options", [{"ratio": 0.5, "decode_ratio": 0.3, "decode_interval": 1}, {"ratio": 0.3, "prefill_chunk": 50}], ids=str
)
def test_a_short_later_prompt_has_the_room_of_all_tokens_so_far(options):
    model = QWEN2.build()
    first, second = (QWEN2.inputs(model, [n])["input_ids"] for n in (100, 20))
    with kvcompress.compress(model, "snapkv", window_size=4, protect="last:8", **options) as session:
        with pytest.raises(KVCompressError, match=r"needs [89] entries in row 0, but (6 stay|the budget keeps 6)"):
            model(second)
        cache = model(first, use_cache=True).past_key_values
        model(second, past_key_values=cache)
    assert session.cache.seen_tokens == 120


def test_prompts_in_chunks_that_together_protect_more_than_the_budget_are_refused_before_the_second():
    model = QWEN2.build()
    ids = QWEN2.inputs(model, [30])["input_ids"]
    options = {"window_size": 4, "protect": "last:9", "prefill_chunk": 16}
    with kvcompress.compress(model, "snapkv", budget=16, **options) as session:
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(KVCompressError, match="needs 18 entries in row 0, but the budget keeps 16"):
            model(ids, past_key_values=cache)
    assert session.cache.seen_tokens == 30


def test_a_later_prompt_protects_its_own_end():
    model = QWEN2.build()
    first, second = (QWEN2.inputs(model, [30], seed=seed)["input_ids"] for seed in (1, 2))
    with kvcompress.compress(model, "random", 0.3, protect="first:3+last:2") as session:
        cache = model(first, use_cache=True).past_key_values
        model(second, past_key_values=cache)
    for head in kept(session.cache).flatten(0, 1).tolist():
        assert len(head) == 18
        assert {0, 1, 2, 28, 29, 58, 59} <= set(head)
