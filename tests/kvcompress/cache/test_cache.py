import copy
import gc
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, MambaConfig, MambaForCausalLM

import kvcompress
from kvcompress.cache.storage.ragged import RaggedStorage
from kvcompress.check.reference import generate
from kvcompress.scoring.layer_view import Kept
from tests.support.examples import examples
from tests.support.families import FAMILIES, sliding_model

MODEL = FAMILIES["qwen2"].build()


def prompt(lengths: list[int], **compress) -> tuple[kvcompress.CompressedCache, dict]:
    inputs = FAMILIES["qwen2"].inputs(MODEL, lengths)
    with kvcompress.compress(MODEL, **compress) as session:
        MODEL(**inputs)
    return session.cache, inputs


@pytest.mark.parametrize(("options", "room"), [({}, 0), ({"decode_budget": 20}, 16)], ids=["", "evicting"])
def test_nothing_keeps_the_whole_prompt_alive(options, room):
    cache, _ = prompt([197], method="snapkv", ratio=0.1, max_new_tokens=0, **options)
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    assert not [t for t in tensors if t.shape == (1, 2, 197, 16)]
    # Nor does a view of the prompt's 4 query heads: its memory would be theirs.
    assert not [t for t in tensors if t.shape[-1:] == (16,) and t.untyped_storage().nbytes() == 4 * 197 * 16 * 4]
    for layer in cache.layers:
        assert layer._phase.staged is None
        assert layer.storage.keys.untyped_storage().nbytes() == (20 + room) * 2 * 16 * 4


def test_a_prompt_outside_no_grad_keeps_no_graph_alive():
    model = copy.deepcopy(MODEL).requires_grad_(True)
    inputs = FAMILIES["qwen2"].inputs(model, [40])
    with torch.enable_grad(), kvcompress.compress(model, "snapkv", 0.3) as session:
        model(**inputs)
        model(input_ids=inputs["input_ids"][:, :1], past_key_values=session.cache)
    for layer in session.cache.layers:
        assert not any(tensor.requires_grad for tensor in layer.storage.tensors())


@pytest.mark.parametrize("lengths", [[50, 50], [50, 40]], ids=["dense", "ragged"])
def test_without_a_known_length_room_grows_and_keeps_what_was_stored(lengths):
    cache, _ = prompt(lengths, method="snapkv", ratio=0.2)
    layer = cache.layers[0]
    stored, buffers = layer.storage.read()[0].clone(), set()
    used = layer.storage.columns(layer.seen) >= 0
    for _ in range(400):
        layer.update(torch.ones(2, 2, 1, 16), torch.ones(2, 2, 1, 16))
        buffers.add(layer.storage.keys.data_ptr())
    keys, _ = layer.storage.read()
    assert torch.equal(keys[:, :, :10][used], stored[used])
    assert (keys[:, :, 10:] == 1).all()
    assert len(buffers) < 14
    assert layer.storage.keys.numel() / (4 * 16) < 410 * 9 / 8 + 1


def test_seen_tokens_counts_tokens_not_entries():
    cache, _ = prompt([30, 12], method="knorm", ratio=0.3)
    assert cache.seen_tokens == 30
    assert cache.is_initialized  # transformers asks
    assert cache.layers[0].storage.length == 9
    assert cache.get_mask_sizes(1, 0) == (10, 21)


def test_rows_take_the_positions_after_their_image_along():
    """A row's next position in a model with M-RoPE depends on its image."""
    family, tokens = FAMILIES["qwen2-vl"], torch.tensor([[9], [11]])
    model, rows = family.build(), torch.tensor([1, 0, 1])
    with torch.no_grad(), kvcompress.compress(model, "snapkv", 0.5) as session:
        model(**family.inputs(model, [50, 40], [1, 0]))
        with session.reuse() as cache:
            expected = model(tokens, past_key_values=cache).logits[rows]
        session.cache.reorder_cache(torch.tensor([1, 0]))
        session.cache.batch_repeat_interleave(2)
        session.cache.batch_select_indices(torch.tensor([0, 2, 1]))
        found = model(tokens[rows], past_key_values=session.cache).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static", "offloaded"])
def test_pads_that_are_stored_follow_their_row(kind):
    """A cache that keeps everything stores pads: beams of one row never show whose they are, rows that move do."""
    cache, _ = prompt([30, 20], max_new_tokens=4, cache_implementation=kind)
    columns = [[head.tolist() for head in row] for row in cache.kept_indices(0)]
    assert columns == [[list(range(30))] * 2, [list(range(10, 30))] * 2]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert [[head.tolist() for head in row] for row in cache.kept_indices(0)] == columns[::-1]


def test_a_cache_that_keeps_everything_takes_a_second_prompt_with_the_first_pads():
    ids = torch.randint(8, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 12:15] = 0  # the second prompt of row 1 is shorter
    inputs, runs = {"input_ids": ids, "attention_mask": mask}, []
    for cache in (DynamicCache(config=MODEL.config), kvcompress.CompressedCache(MODEL.config)):
        with nullcontext() if type(cache) is DynamicCache else kvcompress.attach(MODEL), torch.no_grad():
            MODEL(ids[:, :12], past_key_values=cache)
            runs.append(generate(MODEL, inputs, 4, past_key_values=cache))
    assert torch.equal(runs[0][0], runs[1][0])
    torch.testing.assert_close(runs[0][1], runs[1][1], atol=1e-5, rtol=0)


def test_a_fresh_cache_for_each_generation():
    inputs = FAMILIES["qwen2"].inputs(MODEL, [30])
    with kvcompress.compress(MODEL, "snapkv", 0.3) as session:
        first, _ = generate(MODEL, inputs, 4)
        cache = session.cache
        second, _ = generate(MODEL, inputs, 4)
    assert torch.equal(first, second)
    assert session.cache is not cache


def test_what_was_kept_before_the_prompt_is_an_error():
    cache = kvcompress.CompressedCache(MODEL.config, "snapkv", 0.3)
    for ask in (lambda: cache.kept_indices(0), cache.realised_ratios):
        with pytest.raises(kvcompress.KVCompressError, match="has not seen a prompt"):
            ask()


def test_embeddings_in_place_of_ids_give_the_same_answer():
    inputs = FAMILIES["qwen2"].inputs(MODEL, [30, 21])
    embeds = MODEL.get_input_embeddings()(inputs["input_ids"])
    with kvcompress.compress(MODEL, "snapkv", 0.3):
        expected, _ = generate(MODEL, inputs, 4)
        ours = MODEL.generate(
            inputs_embeds=embeds, attention_mask=inputs["attention_mask"], max_new_tokens=4, do_sample=False
        )
    assert torch.equal(ours, expected)


def test_sliding_window_layers_are_left_alone_and_the_log_says_so_once(caplog):
    model = sliding_model("full", "sliding", "full")
    inputs = FAMILIES["qwen2"].inputs(model, [40, 25])
    tokens, expected = generate(model, inputs, 6)
    with kvcompress.compress(model, "snapkv", 1.0):
        ours, logits = generate(model, inputs, 6)
    assert torch.equal(ours, tokens)
    assert torch.equal(logits, expected)
    with kvcompress.compress(model, "snapkv", 0.2) as session:
        generate(model, inputs, 6)
        generate(model, inputs, 6)
    assert len(session.cache.kept_indices(2)[0][0]) == 8 + 5
    assert len(session.cache.realised_ratios()) == 2
    with pytest.raises(
        kvcompress.KVCompressError, match="layer 1 is not compressed: it is a DynamicSlidingWindowLayer"
    ):
        session.cache.kept_indices(1)
    assert session.cache.nbytes > sum(layer.nbytes for layer in session.cache.compressed_layers)
    said = [record.message for record in caplog.records if record.name == "kvcompress"]
    assert said == [
        "qwen2: 1 of 3 layers have no full attention (sliding windows and the like); they keep transformers' own "
        "cache, uncompressed"
    ]


def test_a_model_without_any_full_attention_is_an_error():
    model = sliding_model("sliding", "sliding")
    with pytest.raises(kvcompress.KVCompressError, match="no layer with full attention"):
        kvcompress.CompressedCache(model.config, "snapkv", 0.2)


def test_a_model_without_any_attention_is_an_error_in_generate():
    model = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)).eval()
    with kvcompress.compress(model, "snapkv", 0.4), pytest.raises(kvcompress.KVCompressError, match="nothing to comp"):
        model.generate(torch.arange(8, 20)[None], max_new_tokens=2)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("knorm", {}),
        ("adakv", {}),
        ("knorm", {"cache_implementation": "static"}),
        ("adakv", {"cache_implementation": "offloaded"}),
        ("full", {}),
    ],
)
def test_room_is_what_decoding_uses_up(method, options):
    """In every storage: as long as it lasts, nothing more is allocated and no decoded token copies the layer."""
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40, 25])
    ratio = None if method == "full" else 0.5
    cache = kvcompress.CompressedCache(model.config, method, ratio, max_new_tokens=9, **options)
    with kvcompress.attach(model), torch.no_grad():
        model(**inputs, past_key_values=cache)
        per_token = cache.room_nbytes // 9
        assert per_token == sum(2 * 2 * layer.storage.read()[0].shape[1] * 16 * 4 for layer in cache.compressed_layers)
        held, places = cache.nbytes, [tensor.data_ptr() for tensor in cache.layers[0].storage.tensors()]
        for step in range(1, 4):
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, step), value=1)
            token = torch.full((2, 1), 9)
            model(input_ids=token, attention_mask=mask, past_key_values=cache)
            assert cache.room_nbytes == (9 - step) * per_token
        assert cache.nbytes == held
        assert [tensor.data_ptr() for tensor in cache.layers[0].storage.tensors()] == places


def test_the_last_head_may_keep_nothing_and_have_no_room():
    """Its segment then begins where the buffer ends."""
    keys = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([[[0, 1, 2], [-1, -1, -1]]])
    storage = RaggedStorage(Kept(keys, keys + 1, indices), torch.tensor([[3, 0]]), [3, 0], room=0)
    read = storage.read()
    assert torch.equal(read[0][0, 0], keys[0, 0])
    assert torch.equal(read[1][0, 0], keys[0, 0] + 1)
    assert storage.visible().tolist() == [[[True] * 3, [False] * 3]]


@examples(30)
@given(data=st.data())
def test_ragged_entries_are_the_same_where_the_host_does_not_know_their_numbers(data):
    """As on CUDA: slots for as many entries as one head could keep, and no list of lengths."""
    batch, kv_heads, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    size = batch * kv_heads
    counts = torch.tensor(data.draw(st.lists(st.integers(0, slots), min_size=size, max_size=size))).view(
        batch, kv_heads
    )
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(batch, kv_heads, slots, 4, generator=generator)
    place = torch.arange(slots) - (slots - counts[..., None])
    indices = torch.where(place >= 0, 2 * place, -1)
    kept = Kept(keys, -keys, indices)
    longest = max(int(counts.max()), 1)
    shorter = Kept(*(part[:, :, slots - longest :] for part in (keys, -keys, indices)))
    known = RaggedStorage(shorter, counts, counts.flatten().tolist(), room=1)
    unknown = RaggedStorage(replace(kept, totals=counts.sum(1).tolist()), counts, None, room=1)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch)))
    steps = data.draw(st.integers(0, 3))
    for step in range(steps):
        new = torch.full((batch, kv_heads, 1, 4), float(step))
        for storage in (known, unknown):
            storage.append(new, -new)
    for change in (lambda storage: None, lambda storage: storage.select(rows)):
        for storage in (known, unknown):
            change(storage)
        extra = unknown.length - known.length
        visible = unknown.visible()
        assert not visible[..., :extra].any()
        assert torch.equal(visible[..., extra:], known.visible())
        seen = 2 * slots + steps
        assert torch.equal(unknown.columns(seen)[..., extra:], known.columns(seen))
        for ours, theirs in zip(unknown.read(), known.read(), strict=True):
            used = known.visible()
            assert torch.equal(ours[:, :, extra:][used], theirs[used])
        assert unknown.flat == known.flat


@dataclass(frozen=True)
class LeavesOneOut(kvcompress.KVCluster):
    """A choice of its own, which keeps an entry fewer than the budget in one head."""

    def score(self, queries, keys, values, view):
        return values.float().norm(dim=-1)

    def update_kv(self, queries, keys, values, view):
        kept = super().update_kv(queries, keys, values, view)
        indices = kept.indices.clone()
        indices[:, 0, 0] = -1
        return replace(kept, indices=indices, values=kept.values.clone().index_fill_(2, torch.tensor([0]), 1e3))


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "quantized", "kv_backend": "fp8"}])
@pytest.mark.parametrize("lengths", [[40], [40, 31]])
def test_a_slot_that_a_methods_own_choice_leaves_empty_is_not_attended_to(lengths, options, registry):
    kvcompress.register_method("leaves-one-out")(LeavesOneOut)
    cache, _ = prompt(lengths, method="leaves-one-out", ratio=0.3, **options)
    for layer in cache.layers:
        visible = layer.storage.visible()
        assert not visible[:, 0, 0].any()
        assert visible[:, 1, -1].all()
        values = layer.storage.read()[1].masked_fill(~visible[..., None], 0)
        assert values[:, 0].abs().max() < 100
