"""cache_implementation=think: keys have fewer channels."""

import math

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.families import FAMILIES

MODEL = FAMILIES["qwen2"].build()
THINK = {"cache_implementation": "think"}


def held_by(method: str, ratio: float | None, inputs: dict, model=MODEL, **options) -> tuple:
    """The cache after the prompt, and the queries of each layer."""
    cache, queries = kvcompress.CompressedCache(model.config, method, ratio, **options), []
    handles = []
    for layer in cache.compressed_layers:

        def note(states, store):
            queries.append(states.queries)
            store()

        handles.append(layer.listen(note))
    with kvcompress.attach(model), torch.no_grad():
        model(**inputs, past_key_values=cache)
    for handle in handles:
        handle.remove()
    return cache, queries


@pytest.mark.parametrize(("method", "ratio"), [("snapkv", 0.5), ("adakv", 0.3), ("full", None), ("knorm", 0.8)])
@pytest.mark.parametrize("recent", [0, 7, 1000])
def test_the_channels_are_those_in_which_window_queries_times_kept_keys_are_largest(method, ratio, recent):
    """The paper's score in a loop; of a row with fewer tokens than the window, all its queries."""
    inputs, part = FAMILIES["qwen2"].inputs(MODEL, [90, 23]), 0.7
    plain, queries = held_by(method, ratio, inputs)
    cache, _ = held_by(method, ratio, inputs, key_channels=part, key_recent=recent, **THINK)
    for place in range(3):
        before, after = plain.layers[place].storage, cache.layers[place].storage
        for row, tokens in enumerate((90, 23)):
            for head in range(2):
                used = [storage.columns(90)[row, head] >= 0 for storage in (before, after)]
                keys, ours = (s.read()[0][row, head][mask] for s, mask in zip((before, after), used, strict=True))
                values = [s.read()[1][row, head][mask] for s, mask in zip((before, after), used, strict=True)]
                window = queries[place][row, 2 * head : 2 * head + 2, -min(tokens, 32) :]
                worth = window.square().sum((0, 1)) * keys.square().sum(0)
                lost = worth.argsort()[: math.floor(16 * (1 - part))]
                expected = keys.clone()
                expected[: max(len(keys) - recent, 0), lost] = 0
                assert torch.equal(ours, expected)
                assert torch.equal(*values)


def test_bytes_are_those_of_fewer_channels():
    inputs = FAMILIES["qwen2"].inputs(MODEL, [600])
    with kvcompress.compress(MODEL, "snapkv", 0.5, max_new_tokens=0, key_channels=0.25, **THINK) as session:
        MODEL(**inputs)
    heads, entries = 3 * 2, 300
    thin, whole = entries - 32, 32
    numbers = thin * (4 + 16) + whole * (16 + 16)
    held = session.cache.nbytes - session.cache.room_nbytes
    assert held == heads * (numbers * 4 + entries * 4 + 4 * 2)  # and columns in 32 bits, channels in 16


def test_channels_stay_the_same_over_prompts_and_where_a_token_is_fed_again():
    cache = kvcompress.CompressedCache(
        MODEL.config, "snapkv", 0.5, first_token="compressed", key_recent=4, window_size=4, **THINK
    )
    channels = None
    with kvcompress.attach(MODEL), torch.no_grad():
        for prompt in (torch.arange(10, 80)[None], torch.arange(20, 60)[None]):
            generate(MODEL, {"input_ids": prompt}, 5, past_key_values=cache)
            storage = cache.layers[1].storage
            assert channels is None or torch.equal(storage.channels, channels)
            channels = storage.channels.clone()
            keys, (thin, whole) = storage.read()[0][0], storage.divided()
            of_none = torch.ones(2, 16).scatter(1, channels[0].long(), 0.0).bool()
            assert (keys[:, : thin.length].transpose(1, 2)[of_none] == 0).all()
            assert all(len(head.unique()) == len(head) for head in cache.kept_indices(1)[0])
    assert thin.length > 35
    assert whole.length == 4 + 1 + 4  # the token that is fed again, and four that are decoded


def test_a_row_does_not_depend_on_its_batch_nor_beams_on_their_place():
    inputs = FAMILIES["qwen2"].inputs(MODEL, [80, 25])
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)  # as generate counts them
    alone = {name: part[1:, -25:] for name, part in inputs.items()}
    both, _ = held_by("adakv", 0.6, inputs, key_recent=3, **THINK)
    one, _ = held_by("adakv", 0.6, alone, key_recent=3, **THINK)
    both.batch_select_indices(torch.tensor([1, 0, 1]))
    for layer in range(3):
        storage = one.layers[layer].storage
        for row in (0, 2):
            joined = both.layers[layer].storage
            assert torch.equal(joined.channels[row], storage.channels[0])
            for ours, theirs in zip(joined.read(), storage.read(), strict=True):
                used = [s.columns(n)[r] >= 0 for s, n, r in ((joined, 80, row), (storage, 25, 0))]
                torch.testing.assert_close(ours[row][used[0]], theirs[0][used[1]], atol=1e-5, rtol=1e-4)


def test_beams_and_an_answer_longer_than_its_room():
    inputs = FAMILIES["qwen2"].inputs(MODEL, [60, 35])
    arguments = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False}
    with kvcompress.compress(MODEL, "snapkv", 0.8, key_channels=1.0, **THINK):
        ours = MODEL.generate(**inputs, **arguments)
    with kvcompress.compress(MODEL, "snapkv", 0.8):
        assert torch.equal(ours, MODEL.generate(**inputs, **arguments))
    with kvcompress.compress(MODEL, "snapkv", 0.8, max_new_tokens=2, key_channels=1.0, **THINK):
        tokens, ours = generate(MODEL, inputs, 40)
    with kvcompress.compress(MODEL, "snapkv", 0.8):
        torch.testing.assert_close(ours, generate(MODEL, inputs, 40, forced=tokens)[1], atol=1e-4, rtol=1e-4)


def test_requests_in_flight_do_not_have_it():
    with (
        kvcompress.compress(MODEL, "snapkv", 0.5, **THINK) as session,
        pytest.raises(kvcompress.KVCompressError, match="requests in flight do not go with cache_implementation='thi"),
    ):
        session.generate_many([])
