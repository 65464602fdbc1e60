"""`positions=cache`: keys at their place in the cache, without a gap where tokens were evicted."""

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.families import FAMILIES
from tests.support.in_flight import check_in_flight


def held(session: kvcompress.Session) -> list[list[list[torch.Tensor]]]:
    """[layer][row][kv_head] -> keys (kept, head_dim)."""
    layers = []
    for layer in session.cache.compressed_layers:
        keys, _ = layer.storage.read()
        used = layer.kept_columns() >= 0
        layers.append(
            [[head[kept] for head, kept in zip(row, of, strict=True)] for row, of in zip(keys, used, strict=True)]
        )
    return layers


def positions(family: str, model, inputs: dict) -> torch.Tensor:
    """(axes, batch, columns), as the model counts a prompt's tokens."""
    seen = []
    handle = model.get_decoder().rotary_emb.register_forward_hook(
        lambda module, args, kwargs, output: seen.append({**kwargs, "args": args}), with_kwargs=True
    )
    generate(model, inputs, 1)
    handle.remove()
    found = seen[0].get("position_ids", seen[0]["args"][-1] if seen[0]["args"] else None)
    return found if found.ndim == 3 else found[None]


@pytest.mark.parametrize(("family", "images"), [("llama", None), ("qwen2-vl", [1, 1])])
def test_sinks_move_up_to_the_recent_tokens_by_what_was_evicted_between_them(family, images):
    """On every axis alike; the keys of a row are those of tokens that stand so much later. Pads are no tokens."""
    chosen = FAMILIES[family]
    model = chosen.build()
    inputs = chosen.inputs(model, [60, 45], images)
    where = positions(family, model, inputs).expand(-1, 2, -1)
    kept = {}
    for place in ("true", "cache"):
        with kvcompress.compress(model, "streamingllm", 0.4, positions=place) as session:
            generate(model, inputs, 1)
        kept[place] = held(session)
        columns = [row[0] for row in session.cache.kept_indices(0)]
    inv_freq = model.get_decoder().rotary_emb.inv_freq
    for layer_true, layer_cache in zip(kept["true"], kept["cache"], strict=True):
        for row, at in enumerate(columns):
            gap = int((at[1:] - at[:-1]).argmax()) + 1
            by = where[:, row, at[gap]].min() - where[:, row, at[gap - 1]].max() - 1
            assert gap == 4
            assert by > 0
            angle = (by * inv_freq).repeat(2)
            for true, cache in zip(layer_true[row], layer_cache[row], strict=True):
                half = true.shape[1] // 2
                turned = torch.cat([-true[:gap, half:], true[:gap, :half]], 1)
                moved = true[:gap] * angle.cos() + turned * angle.sin()
                torch.testing.assert_close(cache[:gap], moved, atol=1e-5, rtol=1e-4)
                assert torch.equal(cache[gap:], true[gap:]), "what is behind the gap is not touched"


@pytest.mark.parametrize("options", [{}, {"head_budget": "adaptive"}], ids=["even", "adaptive"])
def test_whatever_is_evicted_while_decoding_the_others_close_ranks(options):
    """Entries are evicted from the middle: in the first layer each key is its token's, moved by the number of missing
    entries.

    Entries are kept by the norm of keys, which does not depend on the position."""
    model = FAMILIES["llama"].build()
    inputs = FAMILIES["llama"].inputs(model, [40, 33])
    evicting = {"decode_budget": 9, "decode_interval": 2, **options}
    with kvcompress.compress(model, "knorm", budget=16, positions="cache", **evicting) as session:
        tokens, _ = generate(model, inputs, 12)
    with kvcompress.compress(model, "full") as full:
        generate(model, inputs, 12, forced=tokens)
    everything, _ = full.cache.layers[0].storage.read()
    inv_freq, moved = model.model.rotary_emb.inv_freq, 0
    for row, heads in enumerate(session.cache.kept_indices(0)[:2]):
        for head, columns in enumerate(heads):
            by = 50 - columns - torch.arange(len(columns)).flip(0)  # 51 tokens were fed
            angle = (by[:, None] * inv_freq).repeat(1, 2)
            true = everything[row, head, columns]
            turned = torch.cat([-true[:, true.shape[1] // 2 :], true[:, : true.shape[1] // 2]], 1)
            cache = held(session)[0][row][head]
            torch.testing.assert_close(cache, true * angle.cos() + turned * angle.sin(), atol=1e-5, rtol=1e-4)
            moved += len(set(by.tolist())) > 2
    assert moved == 4, "each head has several gaps"


@pytest.mark.parametrize("first_token", ["full", "compressed"])
def test_the_last_entry_of_a_prompt_directly_precedes_the_token_that_is_fed_next(first_token):
    """Which is the prompt's own last one again where the first token comes from the compressed cache."""
    model = FAMILIES["llama"].build()
    inputs = FAMILIES["llama"].inputs(model, [40])
    inputs["input_ids"][0, 30:] = 9  # which the method drops
    with kvcompress.compress(model, "knorm", budget=8, positions="cache", first_token=first_token) as session:
        tokens, _ = generate(model, inputs, 2)
    with kvcompress.compress(model, "full") as full:
        generate(model, inputs, 2, forced=tokens)
    everything, _ = full.cache.layers[0].storage.read()
    following, moved = 39 if first_token == "compressed" else 40, 0
    for head, columns in enumerate(session.cache.kept_indices(0)[0]):
        columns = columns[columns < following]
        by = following - columns - torch.arange(len(columns), 0, -1)
        angle = (by[:, None] * model.model.rotary_emb.inv_freq).repeat(1, 2)
        true = everything[0, head, columns]
        turned = torch.cat([-true[:, true.shape[1] // 2 :], true[:, : true.shape[1] // 2]], 1)
        cache = held(session)[0][0][head][: len(columns)]
        torch.testing.assert_close(cache, true * angle.cos() + turned * angle.sin(), atol=1e-5, rtol=1e-4)
        moved += int(columns[-1]) < 39 and int(by[-1]) > 0
    assert moved, "a head's last entry moves"


def test_in_flight_keys_close_ranks_as_alone():
    model = FAMILIES["llama"].build()
    requests = [FAMILIES["llama"].inputs(model, [length]) for length in (30, 17, 41)]
    options = {"positions": "cache", "decode_budget": 7, "decode_interval": 2, "head_budget": "adaptive"}
    check_in_flight(model, requests, [9, 7, 11], "knorm", 2, ratio=0.4, **options)


def test_a_second_prompt_is_refused():
    model = FAMILIES["llama"].build()
    inputs = FAMILIES["llama"].inputs(model, [30])
    with kvcompress.compress(model, "streamingllm", 0.5, positions="cache"):
        cache = model(**inputs).past_key_values
        with pytest.raises(kvcompress.KVCompressError, match="the cache takes no second one"):
            model(input_ids=inputs["input_ids"], past_key_values=cache)
