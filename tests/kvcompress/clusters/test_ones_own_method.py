"""A method that its author writes in a few lines, and that says nothing of pads, decoding or chunks, is right there."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import kvcompress
from kvcompress import KVCompressError
from kvcompress.check.promises import Checked, a_row_is_as_alone
from kvcompress.check.reference import generate
from kvcompress.clusters.snapkv import SnapKVCluster
from kvcompress.scoring.layer_view import LayerView, Settings, StoredEntries
from kvcompress.scoring.returned import check_final
from kvcompress.scoring.rows import scores_of
from tests import fuzz
from tests.support.examples import paired
from tests.support.families import FAMILIES, SOME_FAMILIES
from tests.support.kept import kept_of


@dataclass(frozen=True)
class AttendedKVCluster(kvcompress.KVCluster):
    """What the last eight queries attend to, by the size of the values; the latest tokens stay."""

    recent: int = 4

    def score(self, queries, keys, values, view):
        votes = view.window_attention(queries, keys, 8).mean((2, 3))
        return view.protect_recent(votes * values.float().norm(dim=-1), self.recent)


@dataclass(frozen=True)
class SummedKVCluster(kvcompress.KVCluster):
    """Sinks, and what all queries at hand attend to."""

    def score(self, queries, keys, values, view):
        return view.protect_sinks(view.column_sums(queries, keys), 2)


@dataclass(frozen=True)
class DistinctKVCluster(kvcompress.KVCluster):
    """The keys and values that differ most from the mean of all, and from what the queries ask for in the mean."""

    def score(self, queries, keys, values, view):
        asked = queries.float().unflatten(1, (keys.shape[1], -1)).mean((2, 3))[:, :, None]
        apart = [each.float() - each.float().mean(2, keepdim=True) for each in (keys, values)]
        scores = sum(each.norm(dim=-1) for each in apart) - (keys.float() - asked).norm(dim=-1)
        return (scores - scores.amin(-1, keepdim=True)) / scores.std(-1, keepdim=True)


@dataclass(frozen=True)
class UnturnedKVCluster(kvcompress.KVCluster):
    """The keys with the largest sums of channels before RoPE."""

    unrotated_keys: ClassVar[bool] = True
    whole_prompt: ClassVar[bool] = True

    def score(self, queries, keys, values, view):
        return view.before_rotation(keys).sum(-1)


OWN = {"attended": AttendedKVCluster, "summed": SummedKVCluster, "distinct": DistinctKVCluster}


@pytest.fixture(autouse=True)
def registered(registry):
    for name, cls in OWN.items():
        kvcompress.register_method(name)(cls)


CASES = [
    {"first_token": "compressed"},
    {"decode_budget": 12, "decode_interval": 3},
    {"scope": "context", "context_tokens": -5},
    {"head_budget": "adaptive", "layer_budget": "sparsity", "decode_ratio": 0.3, "decode_interval": 1},
    {"ratio": None, "budget": 12, "prefill_chunk": 16, "decode_budget": 12, "decode_interval": 2},
]


@pytest.mark.parametrize("method", OWN)
@pytest.mark.parametrize(("options", "family"), paired(CASES, SOME_FAMILIES))
def test_it_equals_the_masked_full_cache_and_its_rows_alone(method, options, family):
    images = [2, 0] if FAMILIES[family].is_vlm else None
    fuzz.check(fuzz.of_rows(family, [50, 31], method, images, seed=1, **{"ratio": 0.4, **options}))


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_each_row_is_turned_back_by_its_own_positions(family):
    kvcompress.register_method("unturned")(UnturnedKVCluster)
    images = [2, 0] if FAMILIES[family].is_vlm else None
    fuzz.check(fuzz.of_rows(family, [50, 31], "unturned", images, seed=1, ratio=0.4))


def test_queries_that_a_method_did_not_ask_for_are_missed_in_one_line():
    @kvcompress.register_method("forgetful")
    @dataclass(frozen=True)
    class ForgetfulKVCluster(AttendedKVCluster):
        query_window = 0

    model = FAMILIES["qwen2"].build()
    with (
        kvcompress.compress(model, "forgetful", 0.5, decode_budget=9, decode_interval=1),
        pytest.raises(kvcompress.KVCompressError, match=r"ForgetfulKVCluster\.query_window is 0"),
    ):
        generate(model, FAMILIES["qwen2"].inputs(model, [20]), 3)


class Own(SnapKVCluster):
    """A score of one's own over a class whose score knows pads."""

    def score(self, queries, keys, values, view):
        return values.float().mean(-1) - values.float().mean((2, 3))[:, :, None]


def view_of_two(padding, **more):
    return LayerView(0, 1, [9, 9], [3, 3], 0.25, padding=padding, **more)


def test_a_score_that_overrides_one_that_knows_pads_is_given_rows_without_them():
    keys = torch.randn(2, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[0], [4]])
    scores = scores_of(Own().score, keys, keys, keys, view_of_two(padding))
    torch.testing.assert_close(scores[1:, :, 4:], Own().score(keys, keys[1:, :, 4:], keys[1:, :, 4:], None))
    assert SnapKVCluster().score.handles_padding


def test_heads_that_hold_different_numbers_of_entries_are_scored_by_their_own():
    keys = torch.randn(2, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[0, 3], [4, 9]])
    stored = StoredEntries(torch.arange(9).expand(2, 2, 9), 9, (9, 9))
    scores = scores_of(Own().score, None, keys, keys, view_of_two(padding, stored=stored))
    for row, head in ((0, 0), (0, 1), (1, 0)):
        own = keys[row : row + 1, head : head + 1, int(padding[row, head]) :]
        torch.testing.assert_close(
            scores[row, head, int(padding[row, head]) :], Own().score(None, own, own, None)[0, 0]
        )
    assert not scores[1, 1].any()  # it holds nothing


def test_a_score_that_mixes_such_heads_is_refused_unless_it_knows_pads():
    class Mixing(Own):
        mixes_heads = True

    keys = torch.randn(2, 2, 9, 4)
    view = view_of_two(torch.tensor([[0, 3], [4, 4]]), settings=Settings(cluster=Mixing()))
    with pytest.raises(KVCompressError, match=r"Mixing mixes KV heads.*kvcompress\.handles_padding"):
        scores_of(Mixing().score, None, keys, keys, view)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda scores: scores.mean(1), r"\(2, 9\)"),
        (lambda scores: None, "NoneType"),
        (lambda scores: scores.numpy(), "ndarray"),
    ],
)
def test_scores_of_another_shape_or_kind_are_one_line(given, said):
    class Wrong(Own):
        def score(self, queries, keys, values, view):
            return given(keys.norm(dim=-1))

    keys = torch.randn(2, 2, 9, 4)
    view = view_of_two(None, settings=Settings(cluster=Wrong()))
    with pytest.raises(KVCompressError, match=rf"^Wrong.score returned {said}: it must be a tensor .* \(2, 2, 9\)$"):
        scores_of(Wrong().score, None, keys, keys, view)


@pytest.mark.parametrize("padding", [None, torch.tensor([[0], [3]])])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_score_that_changes_what_it_is_given_is_one_line(changed, padding):
    """The cache would store what was changed, and so would other methods that share the prefill."""

    class Centring(Own):
        def score(self, *given):
            given[changed][..., 1:].sub_(1)
            return super().score(*given)

    states = [torch.randn(2, 2, 9, 4) for _ in range(3)]
    view = view_of_two(padding, settings=Settings(cluster=Centring()))
    with pytest.raises(KVCompressError, match=r"^Centring.score changes what it is given in place: use copies$"):
        scores_of(Centring().score, *states, view)


@torch.inference_mode()
def test_in_inference_mode_a_score_is_asked_as_ever():
    keys = torch.randn(2, 2, 9, 4)
    assert (
        scores_of(Own().score, None, keys, keys, view_of_two(None, settings=Settings(cluster=Own()))).isfinite().all()
    )


def columns(*kept):
    return torch.tensor(kept).expand(1, 2, len(kept))


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("select", None, r"Wrong.select returned NoneType: it must be a LongTensor .*\(1, 2, kept\)"),
        (
            "select",
            torch.zeros(1, 2, 3),
            r"Wrong.select returned \(1, 2, 3\) of torch.float32: it must be a LongTensor",
        ),
        ("select", torch.zeros(1, 2, dtype=torch.long), r"Wrong.select returned \(1, 2\) of torch.int64: it must be a"),
        (
            "select",
            columns(3, 99),
            r"Wrong.select returned column 99 at place 1 of row 0, KV head 0: .* from 0 to \d+,",
        ),
        ("select", columns(-2, 3), r"Wrong.select returned column -2 at place 0"),
        ("select", columns(4, 3), r"Wrong.select returned column 3 at place 1"),
        ("select", columns(4, 4), r"Wrong.select returned column 4 at place 1"),
        ("select", columns(4, -1), r"Wrong.select returned column -1 at place 1"),
        ("final_scores", None, r"Wrong.final_scores returned NoneType: it must be a tensor \(batch, kv_heads, keys\)"),
        ("final_scores", torch.zeros(1, 20), r"Wrong.final_scores returned \(1, 20\): it must be"),
        ("note", 3, r"Wrong.note returned int: it must be a tensor \(batch, ...\), here \(1, ...\)"),
        ("note", torch.zeros(2, 4), r"Wrong.note returned \(2, 4\)"),
        ("update_kv", None, r"Wrong.update_kv returned NoneType: it must be kvcompress.Kept"),
        ("update_kv", (1, 2), r"Wrong.update_kv returned tuple: it must be kvcompress.Kept"),
        (
            "update_kv",
            kvcompress.Kept(torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16), torch.arange(9).expand(1, 2, 9)),
            r"Wrong.update_kv returned keys .* \(1, 2, 8\), values for \(1, 2, 8\), indices for \(1, 2, 9\)",
        ),
        (
            "update_kv",
            kvcompress.Kept(torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16), columns(3, 99)),
            r"Wrong.update_kv \(in indices\) returned column 99",
        ),
    ],
)
@pytest.mark.parametrize("decode_budget", [None, 9])
def test_a_choice_of_another_kind_is_one_line(name, given, said, decode_budget):
    """Of a prompt, and while decoding, where the prompt is shorter than the budget."""
    wrong = type("Wrong", (SummedKVCluster,), {name: lambda self, *_: given})
    kvcompress.register_method("wrong-kind")(wrong)
    model, size = FAMILIES["qwen2"].build(), {"ratio": 0.5} if decode_budget is None else {"ratio": 1.0}
    inputs = FAMILIES["qwen2"].inputs(model, [20])
    options = {} if decode_budget is None else {"decode_budget": decode_budget, "decode_interval": 1}
    with kvcompress.compress(model, "wrong-kind", **size, **options), pytest.raises(KVCompressError, match=said):
        generate(model, inputs, 3)


@dataclass(frozen=True)
class NotingKVCluster(kvcompress.KVCluster):
    """What is unlike the mean of the keys that the latest eviction kept."""

    query_window = 0

    def score(self, queries, keys, values, view):
        mean = keys.mean(2) if view.noted is None else view.noted
        return view.protect_recent((keys - mean[:, :, None]).norm(dim=-1), 2)

    def note(self, kept, keys, view):
        held = (kept.indices >= 0).float()[..., None]
        return (kept.keys * held).sum(2) / held.sum(2)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("score", lambda self, queries, keys, values, view: keys[..., 0].to("meta")),
        ("final_scores", lambda self, scores, view: scores.to("meta")),
        ("select", lambda self, scores, view: columns(3, 4).to("meta")),
    ],
)
def test_a_tensor_on_another_device_is_one_line(name, given):
    kvcompress.register_method("elsewhere")(type("Wrong", (SummedKVCluster,), {name: given}))
    model = FAMILIES["qwen2"].build()
    with (
        kvcompress.compress(model, "elsewhere", 0.5),
        pytest.raises(
            KVCompressError, match=rf"^Wrong.{name} returned a tensor on meta: it must be on cpu, as keys are$"
        ),
    ):
        generate(model, FAMILIES["qwen2"].inputs(model, [20]), 1)


class NaNs(SummedKVCluster):
    def score(self, queries, keys, values, view):
        return super().score(queries, keys, values, view) * torch.nan


@pytest.mark.parametrize("layer_budget", ["uniform", "global"])
def test_nan_scores_are_one_line_on_a_cpu(layer_budget):
    kvcompress.register_method("nans")(NaNs)
    model = FAMILIES["qwen2"].build()
    with (
        kvcompress.compress(model, "nans", 0.5, layer_budget=layer_budget),
        pytest.raises(KVCompressError, match=r"^NaNs.score returned NaN, 40 of 40 numbers: NaN has no rank$"),
    ):
        generate(model, FAMILIES["qwen2"].inputs(model, [20]), 1)


def test_nan_that_final_scores_makes_is_one_line_on_a_cpu():
    """But for rows whose scores had some before, and at pads."""
    kvcompress.register_method("nan-final")(
        type("Nans", (SummedKVCluster,), {"final_scores": lambda self, scores, view: scores * torch.nan})
    )
    model = FAMILIES["qwen2"].build()
    said = r"^Nans.final_scores returned NaN, 66 of 80 numbers: NaN has no rank$"
    with kvcompress.compress(model, "nan-final", 0.5), pytest.raises(KVCompressError, match=said):
        generate(model, FAMILIES["qwen2"].inputs(model, [20, 13]), 1)
    scores, view = torch.ones(2, 2, 9), view_of_two(torch.tensor([[0], [3]]))
    check_final(scores.masked_fill(~view.real_columns(scores), torch.nan), "here", scores, view)
    scores[1, 0, 5] = torch.nan
    check_final(scores, "here", scores, view)


def test_nan_scores_of_a_row_whose_states_are_not_finite_are_no_error():
    """Its answer is NaN as without the method, and the other row's is as alone."""
    keys = torch.randn(2, 2, 9, 4)
    keys[1, 0, 3] = torch.inf
    view = view_of_two(None, settings=Settings(cluster=NaNs()))
    with pytest.raises(KVCompressError, match=r"^NaNs.score returned NaN, 18 of 36 numbers"):
        scores_of(NaNs().score, keys, keys, keys, view)
    keys[0, 0, 3] = torch.nan
    assert scores_of(NaNs().score, keys, keys, keys, view).isnan().all()


def test_text_stays_under_ratio_of_vision_also_where_final_scores_does_not_call_super():
    kvcompress.register_method("own-final")(
        type("Own", (SummedKVCluster,), {"final_scores": lambda self, *given: given[0]})
    )
    family = FAMILIES["llava-onevision"]
    model = family.build()
    inputs = family.inputs(model, [60, 41], [1, 2])
    with kvcompress.compress(model, "own-final", 0.5, ratio_of="vision") as session:
        generate(model, inputs, 1)
    text = inputs["attention_mask"].bool() & (inputs["input_ids"] != model.config.image_token_id)
    for row, heads in enumerate(kept_of(session.cache)[0]):
        for columns in heads:
            assert set(text[row].nonzero()[:, 0].tolist()) <= set(columns.tolist())


def test_nan_scores_of_pads_do_not_matter():
    class OfPads(Own):
        @kvcompress.handles_padding
        def score(self, queries, keys, values, view):
            return keys.norm(dim=-1).masked_fill(~view.real_columns(keys), torch.nan)

    keys = torch.randn(2, 2, 9, 4)
    view = view_of_two(torch.tensor([[0], [3]]), settings=Settings(cluster=OfPads()))
    assert scores_of(OfPads().score, None, keys, keys, view).isnan().sum() == 6


def test_what_a_row_noted_lasts_while_only_another_row_evicts():
    """Of 15 and 9 entries of the prompts, 12 stay while decoding."""
    kvcompress.register_method("noting")(NotingKVCluster)
    a_row_is_as_alone(Checked("noting"), decode_budget=12, decode_interval=2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("padding", [None, torch.tensor([[0], [3]])])
def test_scores_of_any_dtype_are_read_as_fp32(dtype, padding):
    class Other(Own):
        def score(self, queries, keys, values, view):
            return (2 * keys.norm(dim=-1)).to(dtype)

    keys = torch.randn(2, 2, 9, 4)
    scores = scores_of(Other().score, None, keys, keys, view_of_two(padding, settings=Settings(cluster=Other())))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores[0], (2 * keys.norm(dim=-1))[0].to(dtype).float())


@dataclass(frozen=True)
class ObservingKVCluster(kvcompress.KVCluster):
    """What all queries so far attended to, in the dtype of the keys, as an author may return it."""

    query_window: ClassVar[int] = 0
    decode_interval: ClassVar[int] = 1

    def observe(self, queries, keys, view):
        return view.column_sums(queries, keys).to(keys.dtype)

    @kvcompress.handles_padding
    def score(self, queries, keys, values, view):
        return self.summed(queries, keys, view)


def test_sums_that_a_method_observes_in_16_bits_are_carried_in_fp32_alone_and_in_flight():
    """In bfloat16 a sum of 8 takes no more of the 0.01 that each step adds; in flight its step was refused."""
    kvcompress.register_method("observing")(ObservingKVCluster)
    family = FAMILIES["qwen2"]
    model = copy.deepcopy(family.build(2)).bfloat16()
    inputs = family.inputs(model, [40])
    with kvcompress.compress(model, "observing", ratio=0.5, decode_ratio=0.5) as session:
        generate(model, inputs, 1)
        assert all(layer.memory.sums.dtype == torch.float32 for layer in session.cache.compressed_layers)
        tokens, _ = generate(model, inputs, 6)
        answer = next(session.generate_many([inputs], slots=1, max_new_tokens=6))
    assert answer.error is None
    assert answer.tokens.tolist() == tokens[0].tolist()
