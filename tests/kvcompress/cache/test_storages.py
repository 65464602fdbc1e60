"""What the storages of entries promise alike."""

import pytest
import torch

import kvcompress
from kvcompress.cache.storage.offloaded import OffloadedStorage
from kvcompress.cache.storage.static import StaticStorage
from kvcompress.cache.storage.think import ThinKStorage
from kvcompress.check.reference import generate
from tests.support.examples import paired, some
from tests.support.families import FAMILIES
from tests.support.kept import kept_lists
from tests.support.storages import EXACT, STORAGES, beside_dynamic
from tests.support.strategies import METHODS, SOME_METHODS

MODEL = FAMILIES["qwen2"].build()
KINDS = {
    "static": StaticStorage,
    "offloaded": OffloadedStorage,
    "offloaded static": OffloadedStorage,
    "think": ThinKStorage,
}
OFFLOADED = ["offloaded", "offloaded static"]
BY_ENTRY = ["fp8", "turboquant"]  # each entry is packed by itself


def of_all(*names: list[str]) -> list[tuple[str, str, str]]:
    """Every method with a family in turn, and with each list of storages in turn."""
    return [case for each in names for case in paired([*METHODS, "full"], list(FAMILIES), each)]


@pytest.fixture(autouse=True)
def installed(request):
    if request.node.callspec.params.get("name") == "hqq":
        pytest.importorskip("hqq", reason="pip install -e .[quantized]")


# -- the answers are those of entries as they are


@pytest.mark.parametrize(("method", "family", "name"), some(of_all(["static"], OFFLOADED, ["think"]), SOME_METHODS))
def test_answers_are_those_of_entries_as_they_are(method, family, name):
    """Also if rows and heads keep different numbers, and where two storages in sequence hold the same as one."""
    logits, expected, cache = beside_dynamic(family, method, 0.3, **EXACT[name])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert all(isinstance(layer.storage, KINDS[name]) for layer in cache.layers)


@pytest.mark.parametrize(("method", "family", "name"), some(of_all(["fp8"], ["hqq"]), SOME_METHODS))
def test_eight_bits_are_close_to_full_precision(method, family, name):
    logits, expected, _ = beside_dynamic(family, method, 0.4, **STORAGES[name])
    assert 0 < (logits - expected).abs().mean() < {"fp8": 0.1, "hqq": 0.02}[name]


@pytest.mark.parametrize("kind", ["dynamic", "offloaded"])
def test_the_host_knows_how_many_entries_uneven_heads_hold(kind):
    """An eviction then does not ask the device."""
    inputs = FAMILIES["qwen2"].inputs(MODEL, [70, 41])
    with kvcompress.compress(MODEL, "adakv", 0.6, cache_implementation=kind) as session:
        generate(MODEL, inputs, 4)
    for layer in session.cache.compressed_layers:
        assert layer.storage.held() == (layer.storage.columns(73) >= 0).sum(2).tolist()


PROTOCOLS = {
    "plain": {},
    "fed again": {"first_token": "compressed"},
    "evicting": {"decode_budget": 12, "decode_interval": 2},
}
TURNS = [(name, protocol) for protocol in ("plain", "fed again") for name in EXACT]


@pytest.mark.parametrize(("name", "protocol"), [*TURNS, ("offloaded", "evicting")])
def test_a_second_prompt_after_decoding_is_stored_at_its_own_columns(name, protocol):
    prompt, more = torch.arange(10, 40)[None], torch.arange(50, 60)[None]
    forced, outcomes = [None, None], []
    for storage in ({}, EXACT[name]):
        options = {"window_size": 4, **PROTOCOLS[protocol], **storage}
        cache = kvcompress.CompressedCache(MODEL.config, "snapkv", 0.5, **options)
        with kvcompress.attach(MODEL):
            first, _ = generate(MODEL, {"input_ids": prompt}, 6, forced[0], past_key_values=cache)
            both = {"input_ids": torch.cat([prompt, first, more], 1)}
            second, logits = generate(MODEL, both, 3, forced[1], past_key_values=cache)
        forced = [first, second]
        outcomes.append((logits, kept_lists(cache)))
    torch.testing.assert_close(outcomes[1][0], outcomes[0][0], atol=1e-4, rtol=0)
    assert outcomes[1][1] == outcomes[0][1]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_a_second_prompt_may_have_pads(method, name):
    """After a first prompt without pads: a row's slots in use stay contiguous."""
    first, more = torch.arange(10, 70).view(2, 30), torch.arange(50, 70).view(2, 10)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:34] = 0
    outcomes = []
    for options in ({}, EXACT[name]):
        cache = kvcompress.CompressedCache(MODEL.config, method, None if method == "full" else 0.3, **options)
        with kvcompress.attach(MODEL):
            MODEL(first, past_key_values=cache)
            MODEL(more, past_key_values=cache, attention_mask=mask)
            logits = MODEL(torch.tensor([[5], [6]]), past_key_values=cache).logits
        outcomes.append((logits, kept_lists(cache)))
    torch.testing.assert_close(outcomes[1][0], outcomes[0][0], atol=1e-4, rtol=0)
    assert outcomes[1][1] == outcomes[0][1]


# -- packed entries


@pytest.mark.parametrize("name", BY_ENTRY)
def test_bytes_stay_when_more_comes(name):
    """Also a second prompt, and a prompt's last token that is fed again."""
    cache = kvcompress.CompressedCache(MODEL.config, "snapkv", 0.5, first_token="compressed", **STORAGES[name])
    before = ()
    with kvcompress.attach(MODEL), torch.no_grad():
        for prompt in (torch.arange(10, 80)[None], torch.arange(20, 60)[None]):
            generate(MODEL, {"input_ids": prompt}, 5, past_key_values=cache)
            storage = cache.layers[0].storage
            packed = storage.inner.kept(cache.get_seq_length())
            held = (packed.indices, packed.keys, packed.values, *storage.read())
            for earlier, later in zip(before, held, strict=bool(before)):
                assert torch.equal(later[:, :, : earlier.shape[2]], earlier)
            before = held


@pytest.mark.parametrize("name", [*BY_ENTRY, "hqq"])
def test_a_token_that_is_fed_again_is_stored_once(name):
    with kvcompress.compress(MODEL, "snapkv", 0.5, first_token="compressed", **STORAGES[name]) as session:
        MODEL(torch.arange(10, 80)[None])
    assert [head.tolist().count(69) for head in session.cache.kept_indices(0)[0]] == [1, 1]
    assert session.cache.get_seq_length() == 70


@pytest.mark.parametrize("name", [*BY_ENTRY, "hqq"])
@pytest.mark.parametrize("method", ["snapkv", "adakv"])
def test_rows_that_change_places_and_forks_take_their_entries_along(method, name):
    """As beams do."""
    cache = kvcompress.CompressedCache(MODEL.config, method, 0.5, **STORAGES[name])
    with kvcompress.attach(MODEL), torch.no_grad():
        MODEL(**FAMILIES["qwen2"].inputs(MODEL, [40, 25]), past_key_values=cache)
    (before, *_), storage = kept_lists(cache), cache.layers[0].storage
    keys, values = storage.read()
    storage.fork().append(keys[:, :, :1], values[:, :, :1])
    assert torch.equal(storage.read()[0], keys)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert kept_lists(cache)[0] == before[::-1]
    assert before[0] != before[1]
    used = storage.visible()
    assert torch.equal(storage.read()[0][used], keys.flip(0)[used])
