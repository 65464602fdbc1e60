"""Eviction while decoding: right at every step, bounded in memory, the same in any batch."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import StoppingCriteriaList

import kvcompress
from kvcompress.cache.choice import Choice
from kvcompress.cache.eviction import LASTING
from kvcompress.cache.memory import Memory
from kvcompress.check.promises import History
from kvcompress.check.reference import generate, only_attending_to
from kvcompress.policy.make import make_policy
from kvcompress.scoring.budget import allocated
from kvcompress.scoring.layer_view import StoredEntries
from tests import fuzz
from tests.support.calibrations import calibration_of
from tests.support.examples import examples, paired, some
from tests.support.families import FAMILIES, FIRST_TEXT, SOME_FAMILIES, VOCAB_SIZE
from tests.support.learned_checkpoints import checkpoint_for
from tests.support.strategies import LEARNED, METHODS, SOME_METHODS, Case, cases

NEW = 9
TOLERANCE = 1e-4
property_test = examples(3)


def run(case: Case, inputs: dict, forced=None, new: int = NEW, **options) -> tuple[torch.Tensor, torch.Tensor, dict]:
    with case.compress(**options) as session:
        history = History(session)
        tokens, logits = generate(case.model, inputs, new, forced, stopping_criteria=StoppingCriteriaList([history]))
    return tokens, logits, history.kept


def assert_kept_as_alone(batch: list, row: int, alone: list, pads: int) -> None:
    """Assert that a row, which has `pads` in a batch, keeps what it keeps alone; both are [layer][row][head]."""
    ours = [[(head - pads).tolist() for head in layer[row]] for layer in batch]
    assert ours == [[head.tolist() for head in layer[0]] for layer in alone]


def new_tokens(inputs: dict) -> torch.Tensor:
    """For each row, tokens that its prompt does not have: equal ones have keys of equal norm, a tie for rounding."""
    rows = [[token for token in range(FIRST_TEXT, VOCAB_SIZE) if token not in row] for row in inputs["input_ids"]]
    return torch.tensor([row[:NEW] for row in rows])


scopes = st.sampled_from([{}, {"scope": "context", "context_tokens": 9}])
decode_options = st.tuples(st.sampled_from([1, 3, 8]), scopes).map(
    lambda drawn: {"decode_interval": drawn[0], **drawn[1]}
)
decode_options = decode_options.flatmap(
    lambda fixed: st.one_of(
        st.sampled_from([4, 10, 30]).map(lambda entries: fixed | {"decode_budget": entries}),
        st.sampled_from([0.2, 0.6]).map(lambda ratio: fixed | {"decode_ratio": ratio}),
    )
)


# One each of those that remember queries, sums, a threshold, or nothing.
REMEMBERING = ["d2o", "expected-attention", "h2o", "knorm", "r-kv", "snapkv"]


@pytest.mark.parametrize("family", some(FAMILIES, SOME_FAMILIES))
@property_test
@given(data=st.data())
def test_every_step_equals_the_full_cache_under_a_mask_of_what_is_held(family, data):
    case, options = data.draw(cases(family)), data.draw(decode_options)
    tokens, logits, history = run(case, case.inputs, **options, **case.unmerged)
    with only_attending_to(case.model, history):
        _, expected = generate(case.model, case.inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("method", "family"), paired(METHODS, list(FAMILIES)))
def test_every_method_by_name_evicts_as_the_full_cache_under_that_mask_and_a_row_as_alone(method, family):
    """The property tests draw methods: here none is left out."""
    images = (1, 0) if FAMILIES[family].is_vlm else None
    has_window = "window_size" in kvcompress.list_methods()[method].options
    options = (("window_size", 4),) if has_window else ()
    case = Case(FAMILIES[family], (4, 2), (33, 21), images, method, options, 0.5, seed=0)
    evicting = {"decode_budget": 8, "decode_interval": 2, **case.unmerged}
    forced = new_tokens(case.inputs)
    _, logits, history = run(case, case.inputs, forced, 4, **evicting)
    assert len(history[36][0][0][0]) < len(history[33][0][0][0]), "an eviction took place"
    with only_attending_to(case.model, history):
        _, expected = generate(case.model, case.inputs, 4, forced=forced)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    _, alone, solo_history = run(case, case.family.solo(case.inputs, 1), forced[1:], 4, **evicting)
    torch.testing.assert_close(logits[1], alone[0], atol=TOLERANCE, rtol=0)
    assert_kept_as_alone(history[36], 1, solo_history[36 - 12], pads=12)


@pytest.mark.parametrize("family", some(FAMILIES, SOME_FAMILIES))
@property_test
@given(data=st.data())
def test_a_row_evicts_the_same_alone_as_in_a_batch(family, data):
    case, options = data.draw(cases(family, max_batch=2)), data.draw(decode_options)
    # Ties: keydiff's of a head with two entries, and compactor's leverages, all one where keys are fewer than channels.
    # Every method by name, above, and beams in test_generation_modes have both.
    assume(case.method not in ("keydiff", "compactor"))
    inputs = case.inputs
    columns = inputs["input_ids"].shape[1]
    tokens = new_tokens(inputs)
    _, logits, history = run(case, inputs, tokens, **options)
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        solo = case.family.solo(inputs, row)
        _, alone, solo_history = run(case, solo, forced=tokens[row : row + 1], **options)
        torch.testing.assert_close(logits[row], alone[0], atol=TOLERANCE, rtol=0)
        pads = columns - length
        for seen, layers in history.items():
            assert_kept_as_alone(layers, row, solo_history[seen - pads], pads)


def test_what_is_remembered_of_a_row_stays_with_its_entries_where_rows_keep_different_parts():
    """Contexts and budgets of three lengths, heads that differ: no slot is used by all."""
    options = {"ratio": 0.35, "recent": 0.0, "head_budget": "adaptive", "scope": "context", "context_tokens": 27}
    fuzz.check(fuzz.of_rows("qwen2", [33, 69, 56], "h2o", **options, decode_budget=33, decode_interval=5))


@pytest.mark.parametrize("method", ["h2o", "snapkv", "d2o", "random", "cake", "kvzip"])
def test_what_is_remembered_of_a_row_follows_it_where_rows_change_places(method):
    """As beams do: sums, latest queries, thresholds, seeds and measured shares."""
    model, tokens = FAMILIES["qwen2"].build(), torch.arange(20, 28).view(2, 4)
    inputs = FAMILIES["qwen2"].inputs(model, [40, 33])
    options = {"decode_budget": 9, "decode_interval": 2}

    def held(rows: torch.Tensor) -> list:
        cache = kvcompress.CompressedCache(model.config, method, 0.4, **options, **calibration_of(method, model))
        with kvcompress.attach(model), torch.no_grad():
            model(**inputs, past_key_values=cache)
            for step, token in enumerate(tokens.T):
                if step == 1:  # a decoded token waits for the eviction
                    cache.reorder_cache(rows)
                order = rows if step else torch.arange(2)
                mask = torch.cat([inputs["attention_mask"][order], torch.ones(2, step + 1, dtype=torch.long)], 1)
                position = (mask.sum(1, keepdim=True) - 1).clone()
                model(token[order][:, None], attention_mask=mask, position_ids=position, past_key_values=cache)
        return [cache.kept_indices(layer) for layer in range(3)]

    for layer, changed in zip(held(torch.tensor([0, 1])), held(torch.tensor([1, 0])), strict=True):
        for row, other in ((0, 1), (1, 0)):
            assert [head.tolist() for head in layer[row]] == [head.tolist() for head in changed[other]]


def test_the_latest_queries_are_remembered_however_long_the_answer_is():
    memory = Memory(make_policy("snapkv", 0.5, window_size=3, decode_budget=8), room=None)
    for step in range(30):
        memory.remember(torch.full((1, 1, 1, 1), float(step)))
        latest = torch.cat(memory.latest_queries, 2).flatten().tolist()
        assert latest[-3:] == list(range(step + 1))[-3:]
        assert len(memory.latest_queries) <= 6


@pytest.mark.parametrize(("method", "options", "count"), [("snapkv", {"window_size": 3}, 3), ("tova", {}, 1)])
def test_as_many_of_the_latest_queries_vote_as_the_method_says(method, options, count):
    queries = torch.arange(10.0).view(1, 1, 10, 1)
    voters = Choice(make_policy(method, 0.5, decode_budget=8, **options), 0, 0, 1).voters(queries)
    assert voters.flatten().tolist() == list(range(10))[-count:]


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_what_is_remembered_of_a_context_and_its_question_comes_from_all_queries(ratio):
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40, 25])
    sums = {}
    for scope in ({}, {"scope": "context", "context_tokens": 20}):
        keeps = ratio if scope else 1.0
        with kvcompress.compress(model, "h2o", keeps, decode_budget=10, decode_interval=50, **scope) as session:
            generate(model, inputs, 1)
        layers = zip(session.cache.layers, (session.cache.kept_indices(n) for n in range(3)), strict=True)
        sums[bool(scope)] = [(layer.memory.sums, kept) for layer, kept in layers]
    for (whole, _), (ours, kept) in zip(sums[False], sums[True], strict=True):
        for row in range(2):
            for head in range(2):
                columns = kept[row][head]
                torch.testing.assert_close(ours[row, head, -len(columns) :], whole[row, head, columns])


@pytest.mark.parametrize(("length", "ratio", "budget"), [(30, 0.8, 14), (10, 1.0, 28)], ids=["some", "all"])
@pytest.mark.parametrize("method", some(sorted({*METHODS} - fuzz.TIED_IN_BATCHES), [*SOME_METHODS, *REMEMBERING]))
def test_the_pads_of_a_second_prompt_have_no_vote(method, length, ratio, budget):
    """A row whose second prompt is shorter evicts the same alone, where there are no pads; also where nothing was
    evicted before."""
    evicting = {"decode_budget": budget, "decode_interval": 2}
    config = {**fuzz.of_rows("qwen2", [length] * 2, method, ratio=ratio, **evicting), "more": [14, 2]}
    assert "second prompts" in fuzz.check(config)


@pytest.mark.parametrize("options", [{"decode_budget": 99, "decode_interval": 50}, {"prefill_chunk": 16}])
@pytest.mark.parametrize("method", ["h2o", "look-m", "meda", *LEARNED])
def test_a_second_prompt_finds_the_sums_to_which_the_answer_before_it_has_added(method, options, monkeypatch):
    """As where the sums are added to after each step."""
    monkeypatch.setattr("kvcompress.policy.policy.SETTLING_INTERVAL", 4)
    model = FAMILIES["qwen2"].build()
    prompt, more, forced, sums = torch.arange(10, 40)[None], torch.arange(50, 60)[None], None, []
    learned = {"checkpoint": checkpoint_for(method, model)} if method in LEARNED else {}
    for settled in (options | {"decode_budget": 99, "decode_interval": 1}, options):
        cache = kvcompress.CompressedCache(
            model.config, method, 0.5, layer_budget="uniform", **settled, **learned, **calibration_of(method, model)
        )
        with kvcompress.attach(model):
            forced, _ = generate(model, {"input_ids": prompt}, 7, forced, past_key_values=cache)
            generate(model, {"input_ids": torch.cat([prompt, forced, more], 1)}, 1, past_key_values=cache)
        sums.append([layer.memory.sums for layer in cache.compressed_layers])
    torch.testing.assert_close(sums[1], sums[0])


def test_prefixkvs_window_ends_at_all_that_prompts_have_left():
    """After a second prompt `distance` entries are counted from the end of everything stored."""
    model = FAMILIES["qwen2"].build()
    prompt, more = torch.arange(10, 60)[None] % 80 + 5, torch.arange(50, 70)[None]
    cache = kvcompress.CompressedCache(model.config, "prefixkv", 0.8, decode_budget=90, distance=9)
    with kvcompress.attach(model):
        first, _ = generate(model, {"input_ids": prompt}, 6, past_key_values=cache)
        generate(model, {"input_ids": torch.cat([prompt, first, more], 1)}, 1, past_key_values=cache)
    for layer in cache.compressed_layers:
        held = (layer.kept_columns() >= 0).sum(2)
        assert (layer.memory.noted == held - 9).all()


@pytest.mark.parametrize(
    ("method", "options"),
    [("prefixkv", {}), ("tgv-kv", {}), ("d2o", {}), ("prefixkv", {"layer_budget": "uniform", "prefill_chunk": 16})],
)
def test_a_row_without_a_second_prompt_keeps_what_earlier_choices_left(method, options):
    """Beside a row that has one."""
    model = FAMILIES["qwen2"].build()
    prompt, more = torch.arange(10, 70).view(2, 30), torch.arange(50, 62).view(2, 6)
    mask = torch.ones(2, 39, dtype=torch.long)
    mask[1, 33:] = 0
    cache = kvcompress.CompressedCache(model.config, method, 0.5, decode_budget=40, **options)

    def left() -> list[torch.Tensor]:
        found = [getattr(layer.memory, name) for layer in cache.compressed_layers for name in LASTING]
        return [each[1].clone() for each in found if each is not None]

    with kvcompress.attach(model), torch.no_grad():
        model(prompt, past_key_values=cache)
        for token in range(20, 23):
            model(torch.tensor([[token], [token + 5]]), past_key_values=cache)
        before = left()
        model(more, attention_mask=mask, past_key_values=cache)
    assert before
    assert all(map(torch.equal, before, left()))


@pytest.mark.parametrize(("method", "interval"), some(paired(METHODS, [1, 5]), REMEMBERING))
def test_memory_stays_bounded_however_long_the_answer_is(method, interval):
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [60, 40])
    small = {"window_size": 4} if "window_size" in kvcompress.list_methods()[method].options else {}
    nbytes = {}

    def note(input_ids, scores, **kwargs):
        nbytes[input_ids.shape[1] - 60] = session.cache.nbytes
        return torch.zeros(2, dtype=torch.bool)

    with kvcompress.compress(
        model, method, 0.5, decode_budget=12, decode_interval=interval, **small, **calibration_of(method, model)
    ) as session:
        # Remembered queries are cut back now and then, at the latest when they are several windows.
        new = max(60, 6 * make_policy(method, 0.5, **small, **calibration_of(method, model)).query_window)
        generate(model, inputs, new, stopping_criteria=StoppingCriteriaList([note]))
    kept = [session.cache.kept_indices(layer) for layer in range(3)]
    sizes = [len(head) for layer in kept for row in layer for head in row]
    assert sum(sizes) / len(sizes) < 12 + interval  # layers and heads may share a budget
    halves = (range(20, new // 2), range(new // 2, new))
    most, later = (max(nbytes[step] for step in half) for half in halves)
    assert later == pytest.approx(most, rel=0.3)  # spare room varies a little


def test_while_decoding_a_layer_keeps_its_measured_share():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [60])
    sizes = []
    for new in (1, 2):  # the first token is the prompt's, the second evicts
        options = {"layer_budget": "sparsity", "decode_budget": 10, "decode_interval": 1}
        with kvcompress.compress(model, "snapkv", budget=20, window_size=4, **options) as session:
            generate(model, inputs, new)
        sizes.append([len(session.cache.kept_indices(layer)[0][0]) for layer in range(3)])
    prompt, answer = sizes
    assert len(set(prompt)) == 3
    assert sum(prompt) == 3 * 20
    assert sum(answer) == 3 * 10
    assert answer == pytest.approx([size / 2 for size in prompt], abs=1)


def test_a_second_reading_is_no_measure_of_the_layers():
    """A row that is kept whole is not read again where it is alone: its layers' shares are the rule's all the same."""
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [5, 16])
    sizes = []
    for prompts in (inputs, FAMILIES["qwen2"].solo(inputs, 0)):
        options = {"layer_budget": "pyramid", "window_size": 1, "decode_budget": 3, "decode_interval": 8}
        with kvcompress.compress(model, "kvzip", budget=5, sinks=0, **options) as session:
            generate(model, prompts, 9)
        sizes.append([sum(len(head) for head in session.cache.kept_indices(layer)[0]) for layer in range(3)])
    assert sizes[0] == sizes[1]
    assert len(set(sizes[1])) > 1


def test_streamingllm_rolls_a_window_behind_its_sinks():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [50])
    with kvcompress.compress(model, "streamingllm", 0.5, decode_budget=10, decode_interval=1) as session:
        generate(model, inputs, 20)
    assert session.cache.kept_indices(0)[0][0].tolist() == [0, 1, 2, 3, *range(63, 69)]


def test_a_decode_ratio_lets_the_cache_grow_with_the_answer():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40])
    with kvcompress.compress(model, "knorm", 0.5, decode_ratio=0.5, decode_interval=1) as session:
        generate(model, inputs, 21)
    assert len(session.cache.kept_indices(0)[0][0]) == 30  # of 60 tokens seen


def test_snapkv_scores_again_with_the_last_queries():
    """A needle that only the decoded queries look for survives, one that only the prompt looked for goes."""
    cluster = kvcompress.make_cluster("snapkv", window_size=2, kernel_size=1)
    columns = torch.arange(30).expand(1, 1, -1)
    keys = torch.zeros(1, 1, 30, 2)
    keys[0, 0, 5], keys[0, 0, 9] = torch.tensor([20.0, 0.0]), torch.tensor([0.0, 20.0])
    queries = torch.tensor([0.0, 1.0]).expand(1, 1, 2, 2)
    prompt = kvcompress.Prompt(0, 1, [30], [3], 1.0, stored=StoredEntries(columns, 30, (30,)))
    assert cluster.update_kv(queries, keys, keys, prompt).indices.tolist() == [[[9, 28, 29]]]


def test_bytes_count_the_sums_that_are_remembered_for_evictions():
    model = FAMILIES["qwen2"].build()
    with kvcompress.compress(model, "h2o", 0.5, decode_budget=12) as session:
        generate(model, FAMILIES["qwen2"].inputs(model, [40]), 3)
    layer = session.cache.layers[0]
    parts = [*layer.storage.tensors(), *layer.memory.latest_queries, layer.memory.sums]
    assert layer.memory.sums.numel()
    assert layer.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in parts)


@pytest.mark.parametrize(
    ("method", "lengths", "options"),
    [
        ("sagekv", [63, 8], {"budget": 31, "sinks": 0, "recent": 0.25, "decode_ratio": 0.35}),
        ("prefixkv", [61, 20], {"budget": 31, "distance": 3, "decode_ratio": 0.4}),
    ],
)
def test_a_row_that_is_kept_whole_goes_on_as_alone_beside_one_that_is_cut(method, lengths, options):
    """What later choices are told is the same whether there was anything to choose in the prompt."""
    fuzz.check(fuzz.of_rows("llama", lengths, method, seed=3, decode_interval=1, **options))


@pytest.mark.parametrize("cut", [{"ratio": 0.571}, {"budget": 14}], ids=["that is cut", "that is kept whole"])
def test_a_row_without_a_question_goes_on_as_alone_beside_one_that_has_one(cut):
    """A row no longer than `context_tokens` is nothing but context: alone it is a prompt like any other."""
    options = {"sinks": 0, "recent": 0.25, "scope": "context", "context_tokens": 14, "decode_ratio": 0.166}
    fuzz.check(fuzz.of_rows("llama", [49, 11, 29], "sagekv", seed=7585, decode_interval=1, **options, **cut))


def test_a_steps_shares_of_the_layers_are_computed_once_for_all_layers():
    model = FAMILIES["qwen2"].build(num_hidden_layers=4)
    inputs = FAMILIES["qwen2"].inputs(model, lengths=[24, 30])
    allocated.cache_clear()
    with kvcompress.compress(model, "d2o", 0.5, decode_budget=8):
        generate(model, inputs, 3)
    steps, rows = 2, 2  # the prompt gives the first token
    assert allocated.cache_info().misses == steps * rows


def test_where_decoding_left_one_layer_whole_and_others_not_all_wait_for_a_second_reading():
    model = FAMILIES["qwen2"].build()
    options = {"budget": 512, "layer_budget": "pyramid", "decode_ratio": 0.62, "decode_interval": 16}
    with kvcompress.compress(model, "kvzip", **options) as session, torch.no_grad():
        cache = model(**FAMILIES["qwen2"].inputs(model, [184]), use_cache=True).past_key_values
        for _ in range(16):
            model(torch.tensor([[7]]), past_key_values=cache)
        assert [layer.is_whole for layer in cache.layers] == [True, False, False]
        model(FAMILIES["qwen2"].inputs(model, [100])["input_ids"], past_key_values=cache)
        model(torch.tensor([[7]]), past_key_values=cache)
    assert session.cache.seen_tokens == 301
