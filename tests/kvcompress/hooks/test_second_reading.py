"""KVzip and KVCompose: what a second reading of the context attends to, against the model's own attention weights."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompress
from kvcompress.cache import phases
from kvcompress.check.reference import generate
from kvcompress.hooks import attention, second_reading
from kvcompress.hooks.second_reading import DecoderInputs
from kvcompress.scoring.rereading import received
from tests.support.families import FAMILIES, sliding_model
from tests.support.kept import kept_lists, kept_of, kept_of_row
from tests.support.token_methods import full_attention

LENGTH = 40
SINKS = 4  # stay, and are not read again


def weights_of_reading_twice(
    model, inputs: dict, instruction: tuple[int, ...] = (), sinks: int = SINKS
) -> list[torch.Tensor]:
    """One pass over the prompt, the instruction and the prompt after its sinks again: for each layer the largest
    weight from any of the later tokens to each prompt token, (kv_heads, groups, prompt)."""
    ids = inputs["input_ids"]
    twice = {"input_ids": torch.cat([ids, torch.tensor([instruction], dtype=torch.long), ids[:, sinks:]], 1)}
    for name in ("pixel_values", "image_sizes"):
        if name in inputs:
            twice[name] = torch.cat([inputs[name]] * 2)
    with torch.no_grad():
        attentions = full_attention(model, twice)
    later = [weights[0, :, ids.shape[1] :, : ids.shape[1]] for weights in attentions]
    return [weights.unflatten(0, (2, -1)).amax(2) for weights in later]


@pytest.mark.parametrize("family", ["qwen2", "llama", "llava-onevision"])
@pytest.mark.parametrize("instruction", [(), (9, 11, 13)])
def test_kvzip_keeps_what_repeating_the_context_attends_to_over_all_layers_and_heads(family, instruction):
    chosen = FAMILIES[family]
    model = chosen.build()
    inputs = chosen.inputs(model, [LENGTH], [1] if chosen.is_vlm else None)
    scores = torch.stack(weights_of_reading_twice(model, inputs, instruction)).amax(2)  # (layers, kv_heads, prompt)
    scores[..., :SINKS] = torch.inf
    layers, heads, _ = scores.shape
    best = scores >= scores.flatten().topk(layers * heads * 12).values[-1]
    with kvcompress.compress(model, "kvzip", 0.3, instruction=instruction) as session:
        _, logits = generate(model, inputs, 1)
    _, full = generate(model, inputs, 1)
    assert torch.equal(logits, full), "the answer's first token comes from the first pass"
    assert len(set(best.sum((1, 2)).tolist())) > 1
    for layer in range(layers):
        for head, kept in enumerate(session.cache.kept_indices(layer)[0]):
            assert kept.tolist() == best[layer, head].nonzero().flatten().tolist()


def test_kvzips_code_keeps_the_sinks_on_top_of_the_ratio_of_what_is_behind_them():
    lengths = [50, 27, 3]
    model = FAMILIES["llava-onevision"].build()
    inputs = FAMILIES["llava-onevision"].inputs(model, lengths, [1, 0, 0])

    def per_head(**options: object) -> tuple[list[float], kvcompress.CompressedCache]:
        """Entries of each row, in the mean over layers and heads, and the cache."""
        with kvcompress.compress(model, "kvzip", variant="code", **options) as session:
            generate(model, inputs, 1)
        sizes = torch.tensor([[list(map(len, heads)) for heads in layer] for layer in kept_of(session.cache)])
        return sizes.float().mean((0, 2)).tolist(), session.cache

    kept, cache = per_head(ratio=0.3)
    assert kept == [4 + 14, 4 + 7, 3]  # 0.3 of 46 and of 23
    realised = torch.tensor(cache.realised_ratios()).mean(0)  # over layers
    torch.testing.assert_close(realised, torch.tensor(kept) / torch.tensor(lengths))
    for layer in kept_of(cache):
        for row, length in zip(layer, lengths, strict=True):
            assert all((head[:4] - (50 - length)).tolist() == [0, 1, 2, 3][:length] for head in row)
    assert per_head(budget=10)[0] == [10, 10, 3], "a number of entries counts the sinks"


@pytest.mark.parametrize("family", ["qwen2", "llava-onevision"])
def test_kvcompose_lets_layers_compete_with_what_their_heads_keep_at_each_rank(family):
    chosen = FAMILIES[family]
    model = chosen.build()
    inputs = chosen.inputs(model, [LENGTH], [1] if chosen.is_vlm else None)
    scores = torch.stack(weights_of_reading_twice(model, inputs, sinks=0)).mean(2)  # (layers, kv_heads, prompt)
    scores += scores.mean(1, keepdim=True)
    composite = scores.sort(descending=True).values.mean(1)
    composite[0] = composite.amax(0)
    best = composite.flatten().topk(12 * len(scores)).indices // LENGTH
    budgets = best.bincount(minlength=len(scores)).tolist()
    with kvcompress.compress(model, "kvcompose", 0.3) as session:
        generate(model, inputs, 1)
    assert len(set(budgets)) > 1
    for layer, budget in enumerate(budgets):
        for head, kept in enumerate(session.cache.kept_indices(layer)[0]):
            assert abs(len(kept) - budget) <= 1, "layers that tie share out what is left"
            assert set(kept.tolist()) == set(scores[layer, head].topk(len(kept)).indices.tolist())


@pytest.mark.parametrize("block", [3, None])
def test_a_chunk_is_scored_by_its_own_tokens_and_the_sinks_alone(block):
    """The softmax runs over the sinks', the chunk's and the fed tokens' keys, not over the whole context."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 4, 7, 8, generator=generator)
    keys, fed = torch.randn(1, 2, 7, 8, generator=generator), torch.randn(1, 2, 7, 8, generator=generator)
    # Two sinks and a chunk of five, whose last token is missing; two tokens of instruction stand before it.
    missing = torch.tensor([[False] * 6 + [True]])
    ours = received(queries, keys, fed, missing, missing, 0.3, block=block)
    for head in range(2):
        rows = []
        for query_head in (2 * head, 2 * head + 1):
            for row in range(6):
                seen = torch.cat([keys[0, head, :6], fed[0, head, : row + 1]]).double()
                rows.append((seen @ queries[0, query_head, row].double() * 0.3).softmax(0)[:6])
        torch.testing.assert_close(ours[0, head, :6], torch.stack(rows).amax(0).float(), atol=1e-6, rtol=0)


def test_chunks_begin_behind_a_rows_sinks_and_are_scored_beside_them():
    """A row of a batch is cut as it is alone, and what its chunks are scored with are its own sinks."""
    model = FAMILIES["qwen2"].build()
    kept = []
    for inputs in (FAMILIES["qwen2"].inputs(model, [33]), FAMILIES["qwen2"].inputs(model, [33, 40])):
        with kvcompress.compress(model, "kvzip", 0.3, chunk_size=9) as session:
            generate(model, inputs, 1)
        first = inputs["input_ids"].shape[1] - 33
        kept.append(kept_of_row(session.cache, 0, first))
        assert all(head[:SINKS] == [0, 1, 2, 3] for layer in kept[-1] for head in layer)
    assert kept[0] == kept[1]


def test_what_is_read_again_goes_on_behind_the_largest_position_of_any_axis():
    """As text after an image does; pads are not counted."""
    positions = torch.tensor([[0, 1, 1, 1, 2], [0, 1, 1, 4, 5], [0, 1, 3, 7, 2]])[:, None]  # time, height, width
    pads = torch.tensor([[True, False, False]])
    following = DecoderInputs(torch.zeros(1, 5, 4), positions).following(5, pads)
    assert following.tolist() == [[[7, 8, 9]]] * 3
    numbered = torch.cat([torch.arange(10, 15)[None, None], positions])  # as transformers has it: columns first
    following = DecoderInputs(torch.zeros(1, 5, 4), numbered).following(5, pads)
    assert following.tolist() == [[[14, 15, 16]], *[[[7, 8, 9]]] * 3]
    assert DecoderInputs(torch.zeros(1, 5, 4), positions[0]).following(5, pads).tolist() == [[2, 3, 4]]
    assert DecoderInputs(torch.zeros(1, 5, 4), None).following(5, pads).tolist() == [[4, 5, 6]]


def test_a_chunk_is_read_as_if_it_were_the_only_one_also_where_layers_slide(monkeypatch):
    """Then the order of the chunks changes nothing."""
    model, noted = sliding_model("sliding", "full", "sliding"), []
    ids = torch.randint(8, 64, (1, 30), generator=torch.Generator().manual_seed(0))

    def note(*args):
        noted.append(received(*args))
        return noted[-1]

    monkeypatch.setattr(phases, "received", note)
    results = []
    for order in (range, lambda *ends: reversed(range(*ends))):
        monkeypatch.setattr(second_reading, "range", order, raising=False)
        with kvcompress.compress(model, "kvzip", 0.3, chunk_size=7), torch.no_grad():
            model(ids)
        results.append(list(noted))
        noted.clear()
    assert len(results[0]) == 4
    for forth, back in zip(results[0], results[1][::-1], strict=True):
        torch.testing.assert_close(forth, back, atol=1e-6, rtol=0)


def test_the_second_pass_leaves_sliding_windows_as_they_were():
    """Layers with sliding windows keep transformers' own storage; reading again must not slide them."""
    model = sliding_model("sliding", "full", "sliding")
    ids = torch.randint(8, 64, (1, 30), generator=torch.Generator().manual_seed(0))
    windows = []
    for method, options in (("streamingllm", {}), ("kvzip", {"chunk_size": 7})):
        with kvcompress.compress(model, method, 0.5, **options) as session, torch.no_grad():
            model(ids)
        assert session.cache.kept_indices(1)[0][0].numel() < 30
        layers = session.cache.other_layers.values()
        windows.append([(layer.keys, layer.values, layer.get_seq_length()) for layer in layers])
    assert len(windows[0]) == 2
    for (keys, values, seen), (their_keys, their_values, theirs) in zip(*windows, strict=True):
        assert torch.equal(keys, their_keys)
        assert torch.equal(values, their_values)
        assert seen == theirs == 30


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return made


def test_a_long_second_reading_is_masked_a_block_of_queries_at_a_time(monkeypatch):
    family = FAMILIES["qwen2"]
    model = family.build()
    inputs = family.inputs(model, lengths=[500, 400])
    kept, largest = [], []
    for queries in (10_000, 50):
        monkeypatch.setattr(attention, "QUERIES", queries)
        with Largest() as seen, kvcompress.compress(model, "kvcompose", 0.3) as session, torch.no_grad():
            model(**inputs, logits_to_keep=1)
        kept.append(kept_lists(session.cache))
        largest.append(seen.elements)
    assert kept[0] == kept[1]
    masks = 2 * 500 * 2 * 500  # of two rows: a query sees the prompt and what is read again
    assert largest[0] >= masks * 0.9
    assert largest[1] < masks * 0.6  # the model's own mask of the first reading
