"""Prompts in chunks: right at every chunk, exact in what is kept, bounded in memory, the same in any batch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import DynamicCache

import kvcompress
from kvcompress.cache import choice
from kvcompress.cache.choice import Choice
from kvcompress.cache.joint_eviction import Evictions
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.new_tokens import NewTokens
from kvcompress.check.reference import attended, attending_by, generate
from kvcompress.errors import KVCompressError
from kvcompress.measure import LargestTensor
from kvcompress.policy.make import make_policy
from tests import fuzz
from tests.support.answers import answer
from tests.support.calibrations import calibration_of
from tests.support.docs import DOCS, python_blocks
from tests.support.examples import examples, paired, some
from tests.support.families import FAMILIES, IMAGE, SOME_FAMILIES, VIDEO, VISION_END, VISION_START, sliding_model
from tests.support.kept import kept_lists, kept_of, kept_of_row, real_lengths
from tests.support.strategies import METHODS, SOME_METHODS, Case, cases

NEW = 4
TOLERANCE = 1e-4  # fp32, logits of order 1
property_test = examples(2)


def takes_chunks(method: str, **options: object) -> bool:
    policy = make_policy(method, 0.5, **options, **calibration_of(method, FAMILIES["qwen2"].build()))
    needs_all = policy.cluster.whole_prompt or policy.cluster.second_pass or policy.layer_budget.is_measured
    return not needs_all


@st.composite
def chunked_cases(draw: st.DrawFn, family: str, **kwargs) -> Case:
    case = draw(cases(family, **kwargs))
    assume(takes_chunks(case.method, **dict(case.options)))
    return case


sizes = st.sampled_from([1, 7, 20])
budgets = st.sampled_from([{}, {"ratio": None, "budget": 5}, {"ratio": None, "budget": 17}])


@contextmanager
def notes_after_each_pass(session: kvcompress.Session) -> Iterator[dict[int, list]]:
    """Columns seen -> what the cache held, [layer][row][kv_head], after each pass of the text decoder."""
    history = {}

    def note(decoder, args, output):
        cache = session.cache
        history[cache.seen_tokens] = kept_of(cache)

    handle = kvcompress.hooks.model.text_decoder(session.model).register_forward_hook(note)
    try:
        yield history
    finally:
        handle.remove()


@contextmanager
def attending_pass_by_pass(model: torch.nn.Module, history: dict[int, list]) -> Iterator[None]:
    """Inside, one ordinary pass over all tokens is what the passes in `history`, chunks and decode steps, should be: a
    query sees what was kept when its own pass began and, causally, its own pass. Plain fp32 attention at the positions
    that the model gives to the whole sequence."""
    ends = sorted(history)

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        columns = key.shape[2]
        visible = torch.zeros(*key.shape[:2], columns, columns, dtype=torch.bool)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            visible[:, :, start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
            for row, heads in enumerate(history[start][module.layer_idx] if start else []):
                for head, held in enumerate(heads):
                    visible[row, head, start:end, held] = True
        if attention_mask is not None:
            visible = visible & attention_mask
        visible = visible | torch.eye(columns, dtype=torch.bool)  # pads: no NaN
        visible = visible.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return attended(query, key, value, visible, scaling)[0], None

    with attending_by(model, attention):
        yield


def with_tokens(inputs: dict, tokens: torch.Tensor) -> dict:
    """Append text to the prompt."""
    longer = {**inputs, "input_ids": torch.cat([inputs["input_ids"], tokens], 1)}
    longer["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(tokens)], 1)
    if "mm_token_type_ids" in inputs:
        kinds = inputs["mm_token_type_ids"]
        longer["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(tokens).to(kinds.dtype)], 1)
    return longer


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_each_chunk_and_the_answer_see_what_was_kept_before_them_at_the_true_positions(family, data):
    case, size, changes = data.draw(chunked_cases(family)), data.draw(sizes), data.draw(budgets)
    inputs = case.inputs
    with (
        case.compress(prefill_chunk=size, **case.unmerged, **changes) as session,
        notes_after_each_pass(session) as history,
    ):
        tokens, logits = generate(case.model, inputs, NEW)
    columns = inputs["input_ids"].shape[1]
    chunk_ends = list(range(columns, 0, -size))[::-1]
    assert sorted(history) == [*chunk_ends, *range(columns + 1, columns + NEW)]
    with attending_pass_by_pass(case.model, history), torch.no_grad():
        expected = case.model(**with_tokens(inputs, tokens[:, :-1]), use_cache=False).logits
    torch.testing.assert_close(logits, expected[:, columns - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", SOME_FAMILIES)
@property_test
@given(data=st.data())
def test_every_layer_and_head_stores_exactly_its_budget_after_each_chunk(family, data):
    case, size, changes = data.draw(chunked_cases(family)), data.draw(sizes), data.draw(budgets)
    inputs = case.inputs
    budget = kvcompress.Budget(changes.get("ratio", case.ratio), changes.get("budget"))
    with case.compress(prefill_chunk=size, **changes) as session, notes_after_each_pass(session) as history:
        generate(case.model, inputs, 1)
    columns = inputs["input_ids"].shape[1]
    for seen, layers in history.items():
        tokens = [max(length - columns + seen, 0) for length in real_lengths(inputs)]
        wanted = [budget(n) if n else 0 for n in tokens]
        counts = [[[len(head) for head in row] for row in layer] for layer in layers]
        if not case.is_uniform:  # a layer whose share grows cannot take back what it has evicted
            for row, n in enumerate(wanted):
                assert sum(sum(layer[row]) for layer in counts) <= 3 * case.heads[1] * n
        elif case.is_adaptive:
            assert [[sum(row) for row in layer] for layer in counts] == [[case.heads[1] * n for n in wanted]] * 3
        else:
            assert counts == [[[n] * case.heads[1] for n in wanted]] * 3
    if case.is_uniform:
        ratios = [n / length for n, length in zip(wanted, real_lengths(inputs), strict=True)]
        assert all(layer == pytest.approx(ratios) for layer in session.cache.realised_ratios())


@pytest.mark.parametrize("family", SOME_FAMILIES)
@property_test
@given(data=st.data())
def test_a_row_does_not_depend_on_its_batch_or_padding(family, data):
    case, size, changes = data.draw(chunked_cases(family)), data.draw(sizes), data.draw(budgets)
    # Of two entries rounding chooses: keys equally like their mean, and scores set to mean and spread.
    assume(case.method not in ("keydiff", "triattention"))
    inputs = case.inputs
    columns = inputs["input_ids"].shape[1]
    with case.compress(prefill_chunk=size, **changes) as session:
        tokens, logits = generate(case.model, inputs, NEW)
    together = session.cache
    for row, length in enumerate(real_lengths(inputs)):
        with case.compress(prefill_chunk=size, **changes) as session:
            _, alone = generate(case.model, case.family.solo(inputs, row), NEW, forced=tokens[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], atol=TOLERANCE, rtol=0)
        assert kept_of_row(together, row, columns - length) == kept_of_row(session.cache)


@pytest.mark.parametrize("method", ["h2o", "snapkv"])  # with sums that are carried on, and without
def test_decoding_knows_of_the_last_chunk_of_a_row_that_is_kept_whole(method, monkeypatch):
    """Alone no chunk of it evicts; next to a longer row its layer chooses again."""
    cluster = make_policy(method, budget=31).cluster
    monkeypatch.setattr(type(cluster), "note", lambda self, kept, keys, view: (kept.indices >= 0).sum(2))
    family = FAMILIES["qwen2"]
    model = family.build()
    inputs = family.inputs(model, [61, 20])
    for prompts, entries in ((inputs, [31, 20]), (family.solo(inputs, 1), [20])):
        with kvcompress.compress(
            model, method, budget=31, prefill_chunk=13, decode_budget=12, **calibration_of(method, model)
        ) as session:
            generate(model, prompts, 1)
        for layer in session.cache.layers:
            assert layer.memory.noted.tolist() == [[n, n] for n in entries]


def test_a_row_that_is_kept_whole_through_its_chunks_is_evicted_while_decoding_as_alone():
    options = {"budget": 31, "layer_budget": "uniform", "decode_ratio": 0.3, "prefill_chunk": 13}
    fuzz.check(fuzz.of_rows("qwen2-vl", [61, 20], "prefixkv", [1, 0], **options))


@pytest.mark.parametrize("method", some([name for name in METHODS if takes_chunks(name)], SOME_METHODS))
def test_a_prompt_that_is_one_chunk_is_the_ordinary_prompt(method):
    family = FAMILIES["qwen2-vl"]
    model = family.build()
    inputs = family.inputs(model, [40, 26], [1, 0])
    ours, expected = (answer(model, inputs, method, 0.3, **options) for options in ({"prefill_chunk": 40}, {}))
    assert torch.equal(ours.tokens, expected.tokens)
    assert torch.equal(ours.logits, expected.logits)
    assert kept_lists(ours.cache) == kept_lists(expected.cache)


@pytest.mark.parametrize(("family", "method"), paired(list(FAMILIES), ["full", "h2o", "snapkv"]))
def test_at_ratio_one_chunks_give_the_logits_of_the_unhooked_model(family, method):
    chosen = FAMILIES[family]
    model = chosen.build()
    inputs = chosen.inputs(model, [45, 9, 30], [2, 0, 1] if chosen.is_vlm else None)
    tokens, expected = generate(model, inputs, NEW)
    for size in (7, 11):  # an image of 9 to 14 tokens is cut
        with kvcompress.compress(model, method, 1.0, prefill_chunk=size, **calibration_of(method, model)):
            ours, logits = generate(model, inputs, NEW, forced=tokens)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert torch.equal(ours, tokens)


def test_an_input_that_nobody_can_cut_is_named():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [20])
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with kvcompress.compress(model, "snapkv", 0.5, prefill_chunk=8), pytest.raises(KVCompressError, match="2-D"):
        model(inputs["input_ids"], attention_mask=mask)
    with kvcompress.compress(model, "snapkv", 0.5, prefill_chunk=8), pytest.raises(KVCompressError, match="markers="):
        model(**inputs, markers=torch.zeros(1, 20))


def test_nothing_stays_in_the_model():
    model = FAMILIES["qwen3-vl"].build()
    inputs = FAMILIES["qwen3-vl"].inputs(model, [40], [1])
    decoder = kvcompress.hooks.model.text_decoder(model)
    with kvcompress.compress(model, "snapkv", 0.5, prefill_chunk=8):
        model(**inputs)
        assert not decoder._forward_pre_hooks
        with pytest.raises(RuntimeError):
            model(**{**inputs, "pixel_values": inputs["pixel_values"][:, :7]})
    assert not decoder._forward_pre_hooks
    assert not decoder._forward_hooks


@pytest.mark.parametrize("first_token", ["full", "compressed"])
def test_budgets_hold_over_a_conversation_and_while_decoding(first_token):
    """Two turns and their answers: the second prompt's budget is one of all the tokens so far."""
    family = FAMILIES["llava-onevision"]
    model = family.build()
    first = family.inputs(model, [60], [2])
    options = {"budget": 12, "prefill_chunk": 8, "decode_budget": 12, "decode_interval": 2, "window_size": 4}
    cache = kvcompress.CompressedCache(model.config, "snapkv", first_token=first_token, **options)
    with kvcompress.attach(model) as session, notes_after_each_pass(session) as history:
        tokens, _ = generate(model, first, 6, past_key_values=cache)
        second = with_tokens(first, torch.cat([tokens, torch.arange(30, 50)[None]], 1))
        second = {name: second[name] for name in ("input_ids", "attention_mask")}
        generate(model, second, 6, past_key_values=cache)
    assert cache.seen_tokens == 60 + 6 + 20 + 5
    most = max(len(head) for layers in history.values() for rows in layers for row in rows for head in row)
    assert most <= 12 + 2  # and what is decoded between two evictions


def test_a_ratio_counts_what_was_answered_between_two_prompts():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40])
    cache = kvcompress.CompressedCache(model.config, "snapkv", 0.5, prefill_chunk=8, window_size=4)
    with kvcompress.attach(model), torch.no_grad():
        tokens, _ = generate(model, inputs, 11, past_key_values=cache)
        more = torch.cat([tokens[:, -1:], torch.arange(30, 49)[None]], 1)
        model(more, past_key_values=cache)
    assert [len(head) for head in cache.kept_indices(0)[0]] == [(40 + 10 + 20) // 2] * 2


@torch.no_grad()
def test_each_chunk_of_a_second_prompt_has_the_mask_of_its_own_columns_where_layers_slide():
    """Full attention makes its mask itself; sliding windows take the model's, which is cut with the prompt."""
    model = sliding_model("sliding", "full", "sliding")
    ids = torch.randint(8, 128, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :6] = mask[1, 18:22] = 0  # pads of the second row, in front of both prompts
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    outputs = []
    for ours in (False, True):
        session, cache = nullcontext(), DynamicCache(config=model.config)
        if ours:
            session = kvcompress.attach(model)
            cache = kvcompress.CompressedCache(model.config, "snapkv", 1.0, prefill_chunk=5)
        with session:
            for start, stop in ((0, 18), (18, 30)):
                part = slice(start, stop)
                prompt = {"attention_mask": mask[:, :stop], "position_ids": positions[:, part]}
                logits = model(ids[:, part], past_key_values=cache, **prompt).logits
        outputs.append(logits[:, -1])  # of the last chunk alone, as all that a model with chunks returns
    torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("method", ["snapkv", "h2o", "r-kv", "expected-attention"])
def test_the_pads_of_a_second_prompt_have_no_vote_in_any_chunk(method):
    """A row whose second prompt is shorter answers as alone, where there are no pads. After the first answer it holds
    more than its budget, but a chunk without any token of its own evicts nothing."""
    window = {} if method == "h2o" else {"window_size": 4}
    fuzz.check({**fuzz.of_rows("qwen2", [30, 30], method, ratio=0.4, prefill_chunk=6, **window), "more": [11, 4]})


def test_norms_over_the_heads_leave_out_places_that_hold_nothing():
    """Heads of a ragged layer hold different numbers of entries; what fills up the shorter ones differs in a batch."""
    options = {"window_size": 1, "kernel_size": 1, "pooling": "avg", "budget": 25, "prefill_chunk": 3}
    rows = fuzz.of_rows("qwen2-vl", [43, 51, 29], "defensivekv", seed=9928, **options)
    assert fuzz.check({**rows, "more": [20, 1, 20]}, has_ties=False) == {"rows", "second prompts"}


def test_the_mean_over_a_window_leaves_out_the_pads_of_a_second_prompt():
    options = {"window_size": 8, "pooling": "max", "ratio": 0.665, "ratio_of": "vision", "merge": "d2o-paper"}
    decoding = {"decode_interval": 1, "decode_ratio": 0.27}
    rows = fuzz.of_rows("qwen2-vl", [24, 37, 56], "defensivekv", seed=116, **options, **decoding)
    assert fuzz.check({**rows, "more": [4, 1, 1]}, has_ties=False) == {"rows", "second prompts"}


@pytest.mark.parametrize(
    ("method", "options"),
    [("criticalkv", {"ratio": 0.793}), ("cake", {"ratio": 0.734, "gamma": 200.0, "layer_budget": "uniform"})],
)
def test_an_observation_windows_votes_leave_out_the_pads_of_a_second_prompt(method, options):
    rows = fuzz.of_rows("qwen2", [35, 46], method, seed=4, window_size=8, prefill_chunk=8, **options)
    assert fuzz.check({**rows, "more": [20, 1]}) == {"rows", "second prompts"}


def test_keys_that_hold_all_of_the_attention_are_told_up_to_rounding():
    options = {"window_size": 8, "kernel_size": 1, "pooling": "max", "mass": 1.0, "ratio": 0.563, "merge": "cam"}
    rows = fuzz.of_rows("qwen2", [49, 19], "defensivekv", seed=7312, prefill_chunk=1, **options)
    rows |= {"heads": (6, 2), "options": {**rows["options"], "first_token": "compressed"}}
    assert fuzz.check(rows, has_ties=False) == {"rows"}


def test_sums_over_a_long_chunk_are_those_of_all_its_queries_at_once(monkeypatch):
    """They are added up a block of queries at a time."""
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [400])
    sums = []
    for block in (4096, 128, 60):
        monkeypatch.setattr(choice, "BLOCK", block)
        with kvcompress.compress(model, "h2o", 0.2, prefill_chunk=200) as session:
            generate(model, inputs, 1)
        sums.append([layer.memory.sums for layer in session.cache.layers])
    for once, *others in zip(*sums, strict=True):
        for other in others:
            torch.testing.assert_close(other, once, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("method", ["streamingllm", "snapkv", "h2o", "infinipot-v"])
def test_no_operation_on_thousands_of_frames_returns_as_many_elements_as_queries_times_keys(method, monkeypatch):
    """Flattened, per head or as a mask. In one piece, and a padded batch in chunks, which attend over a chunk and a
    budget."""
    attended_over, after = [], CompressedLayer.after_attention

    def noted(layer: CompressedLayer, queries: torch.Tensor, *args: object) -> None:
        attended_over.append(layer.memory.stored + queries.shape[2])
        after(layer, queries, *args)

    monkeypatch.setattr(CompressedLayer, "after_attention", noted)
    family = FAMILIES["llava-onevision"]
    model = family.build()
    frames, words = 1000, torch.arange(20, 30)
    video = {"pixel_values_videos": torch.randn(1, frames, 3, 8, 8)}
    ids = torch.cat([words, torch.full([frames + 1], VIDEO), words])[None]
    batch = torch.cat([ids, torch.nn.functional.pad(words, (ids.shape[1] - 10, 0))[None]])
    for prompts, options in ((ids, {}), (batch, {"prefill_chunk": 256})):
        compressed = kvcompress.compress(model, method, budget=64, **options, **calibration_of(method, model))
        with compressed as session, torch.no_grad(), LargestTensor(model) as largest:
            model(prompts, attention_mask=(prompts > 0).long(), **video, logits_to_keep=1)
        assert {len(head) for layer in kept_of(session.cache) for head in layer[0]} == {64}
        assert largest.numel < ids.shape[1] ** 2
        assert max(attended_over) == (64 + 256 if options else ids.shape[1])
        attended_over.clear()


def test_infinipot_v_finds_what_changed_also_among_what_is_left_of_older_chunks():
    """Twelve frames of five tokens, all alike but for the third token of the second frame, in chunks of two frames."""
    frame = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    keys = frame.repeat(12, 1)[None, None]
    keys[0, 0, 7] *= -1
    policy = make_policy("infinipot-v", budget=8, tar=1.0, prefill_chunk=10)
    layer = CompressedLayer(Choice(policy, 0, 0, 1), None, Evictions())
    held = []
    for start in range(0, 60, 10):
        part = keys[:, :, start : start + 10]
        vision = torch.ones(1, start + 10, dtype=torch.bool)
        layer.begin(NewTokens(10, [10], None, vision[:, start:], [10], [10], (0,), (5,), seen_vision=vision))
        layer.update(part, part)
        layer.after_attention(part, 0.25, torch.nn.Identity())
        held.append(layer.storage.columns(layer.seen)[0, 0].tolist())
    assert all(7 in columns for columns in held)
    assert all(columns[-5:] == list(range(10 * n + 5, 10 * n + 10)) for n, columns in enumerate(held))


def test_text_goes_before_vision_in_every_chunk():
    family = FAMILIES["llava-onevision"]
    model = family.build()
    inputs = family.inputs(model, [50], [2])
    text = (inputs["input_ids"][0] != IMAGE).nonzero()[:, 0].tolist()
    with kvcompress.compress(model, "infinipot-v", budget=len(text) + 2, prefill_chunk=8) as session:
        model(**inputs)
    for layer in kept_of(session.cache):
        for head in layer[0]:
            assert set(text) <= set(head.tolist())


def test_the_streaming_example_answers_questions_in_between_and_holds_no_more_than_its_budget():
    family = FAMILIES["llava-onevision"]
    model = family.build()
    token_count = family.image_tokens(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[VISION_START, *[IMAGE] * token_count, VISION_END]])
    frames = []
    for _ in range(30):
        pixels = torch.randn(1, 3, 3, 8, 8, generator=generator)
        one = {"pixel_values": pixels, "image_sizes": torch.tensor([[8, 16]]), "batch_num_images": torch.tensor([1])}
        frames.append({"input_ids": ids, **one})
    example = python_blocks(DOCS / "long-prompts.md")[1].replace("budget=4096", "budget=64")
    results = []
    for every in (10, 1000):  # with questions, and never one
        names = {"frames": frames, "question": torch.arange(20, 26)[None], "frame_tokens": token_count}
        names |= {"kvcompress": kvcompress, "torch": torch, "model": model}
        exec(example.replace("% 10", f"% {every}"), names)
        results.append(names)
    asked, undisturbed = results
    assert [answer.shape for answer in asked["answers"]] == [(1, 20)] * 3
    assert not undisturbed["answers"]
    assert asked["cache"].seen_tokens == 30 * ids.shape[1]
    assert {len(head) for layers in asked["held"][5:] for heads in layers for head in heads} == {64}
    for ours, theirs in zip(asked["held"], undisturbed["held"], strict=True):
        assert all(torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
