"""Evictions from several layers at once, as on a GPU, leave what evictions from one layer after another leave."""

import pickle
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.cache import joint_eviction
from kvcompress.check.promises import History
from kvcompress.check.reference import generate
from kvcompress.layer_budgets import list_layer_budgets
from kvcompress.policy.make import make_policy
from kvcompress.scoring.merging import MERGES
from kvcompress.scoring.selection import ADAPTIVE
from tests.support.examples import examples, paired, some
from tests.support.families import FAMILIES, FIRST_TEXT, SOME_FAMILIES
from tests.support.strategies import METHODS, Case, cases

NEW = 7
EVICTING = {"decode_budget": 12, "decode_interval": 3}
NEED_LAYER = {"duoattention", "q-filters", "sparsemm", "triattention"}  # their files hold tensors of each layer


@contextmanager
def layers_at_once(most: int = 1 << 30):
    """Context manager: evict from layers of up to `most` bytes at once. Yields their bytes each time, of the
    first, the first two, ..."""
    layers, left_at_once = [], joint_eviction.left_at_once

    def counted(due: list) -> list:
        left = left_at_once(due)
        layers.append([joint_eviction._nbytes(due[: count + 1]) for count in range(len(due))])
        return left

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(joint_eviction.MOST_NBYTES, "cpu", most)
        patch.setattr(joint_eviction, "left_at_once", counted)
        yield layers


def run(case: Case, **options) -> tuple[torch.Tensor, dict]:
    """Return the logits of an answer of given tokens, and what is held after each step."""
    rows = len(case.lengths)
    forced = torch.arange(FIRST_TEXT, FIRST_TEXT + rows * NEW).view(rows, NEW)
    with case.compress(**options) as session:
        history = History(session)
        _, logits = generate(case.model, case.inputs, NEW, forced, stopping_criteria=[history])
    return logits, history.kept


def assert_same(case: Case, most: int = 1 << 30, **options) -> list[list[int]]:
    """Assert that evictions at once leave the same, and return what `layers_at_once` yields."""
    logits, kept = run(case, **options)
    with layers_at_once(most) as evicted:
        ours, ours_kept = run(case, **options)
    for seen, layers in kept.items():
        for of_layer, of_ours in zip(layers, ours_kept[seen], strict=True):
            assert [[head.tolist() for head in row] for row in of_ours] == [
                [head.tolist() for head in row] for row in of_layer
            ]
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)
    return evicted


def case_of(method: str, lengths: tuple[int, ...], family: str = "qwen2", **options) -> Case:
    if "window_size" in kvcompress.list_methods()[method].options:
        options.setdefault("window_size", 4)
    return Case(FAMILIES[family], (4, 2), lengths, None, method, tuple(options.items()), 0.5, seed=0)


@pytest.mark.parametrize(("method", "lengths"), paired(METHODS, [(40,), (33, 33)]))
def test_every_method_keeps_the_same_whether_it_evicts_from_one_layer_or_several(method, lengths):
    case = case_of(method, lengths)
    evicted = assert_same(case, **EVICTING, **case.unmerged)
    assert bool(evicted) != (method in NEED_LAYER)


@pytest.mark.parametrize("family", some(FAMILIES, SOME_FAMILIES))
@examples(3)
@given(data=st.data())
def test_any_configuration_keeps_the_same(family, data):
    case = data.draw(cases(family))
    budget, interval = data.draw(st.sampled_from([4, 10, 30])), data.draw(st.integers(1, 4))
    assert_same(case, decode_budget=budget, decode_interval=interval, **case.unmerged)


OPTIONS = [
    *({"layer_budget": name} for name in list_layer_budgets()),
    *({"head_budget": head_budget} for head_budget in ("shared", *ADAPTIVE)),
    {"head_budget": "adaptive", "layer_budget": "pyramid"},
    *({"merge": merge} for merge in MERGES if merge != "none"),
    {"protect": "first:3"},
    {"protect": "prompt", "decode_budget": 22},
    {"scope": "context", "context_tokens": 20},
    {"prefill_chunk": 16},
]


@pytest.mark.parametrize(
    ("options", "method"), paired(OPTIONS, ["snapkv", "h2o", "d2o", "adakv", "expected-attention"])
)
def test_every_option_keeps_the_same(options, method):
    try:
        make_policy(method, 0.5, **EVICTING | options)
    except kvcompress.KVCompressError:
        method = "snapkv"
    assert assert_same(case_of(method, (40, 40)), **EVICTING | options)


def test_layers_are_evicted_from_at_once_up_to_a_number_of_bytes():
    case = case_of("snapkv", (40,))
    evicted = assert_same(case, **EVICTING)
    assert {len(nbytes) for nbytes in evicted} == {3}
    of_three, of_two = (min(nbytes[layers] for nbytes in evicted) for layers in (2, 1))
    assert {len(nbytes) for nbytes in assert_same(case, of_three - 1, **EVICTING)} == {2}
    assert assert_same(case, of_two - 1, **EVICTING) == []


def test_a_method_that_compares_heads_counts_what_it_needs_for_each_token_so_far(monkeypatch):
    case = case_of("kvcompose", (40,))
    counted = [nbytes[2] for nbytes in assert_same(case, **EVICTING)]
    monkeypatch.setattr(type(make_policy("kvcompose", 0.5).cluster), "mixes_heads", False)
    entries_alone = [nbytes[2] for nbytes in assert_same(case, **EVICTING)]
    of_tokens = [all_ - some for all_, some in zip(counted, entries_alone, strict=True)]
    assert of_tokens == [3 * 2 * 12 * seen for seen in (43, 46)]  # three layers of two heads


def test_entries_in_cpu_memory_are_evicted_from_layer_by_layer():
    assert assert_same(case_of("snapkv", (40,)), **EVICTING, cache_implementation="offloaded") == []


def is_first_or_unknown(view) -> bool:
    """A method that takes any error for an answer."""
    try:
        return view.place == 0
    except Exception:
        return True


USES = {
    "compares": lambda view: view.place == 0,
    "indexes a list": lambda view: [1, 0, 0][view.place],
    "indexes a tensor": lambda view: torch.tensor([1, 0, 0])[view.place],
    "computes": lambda view: 1 + view.place * 2 - 3 // (view.place + 1) < 0,
    "prints": lambda view: f"{view.place}" == "0",
    "looks up": lambda view: {0: 1}.get(view.place, 0),
    "tests": lambda view: not view.place,
    "is even": lambda view: not view.place & 1 and divmod(view.place, 2)[0] == 0,
    "shifts": lambda view: 1 << view.place == 1,
    "draws": lambda view: torch.Generator().manual_seed(view.place).initial_seed() == 0,
    "fills": lambda view: torch.full((), view.place) == 0,
    "is of a class": lambda view: isinstance(view.module, torch.nn.Module) and view.module.layer_idx == 0,
    "catches": is_first_or_unknown,
    "asks the module": lambda view: view.module.layer_idx == 0,
    "calls the module": lambda view: callable(view.module.forward),
    "has a default": lambda view: getattr(view.module, "layer_idx", 1) == 0,
}


@pytest.mark.parametrize("use", USES)
def test_a_method_that_uses_its_layer_gets_each_layer_alone(use, registry, caplog):
    @dataclass(frozen=True)
    class FirstLayerOldestKVCluster(kvcompress.KVCluster):
        query_window = 0

        def score(self, queries, keys, values, view):
            columns = torch.arange(keys.shape[2], dtype=torch.float32).expand(keys.shape[:3])
            return -columns if USES[use](view) else columns

    kvcompress.register_method("first-layer-oldest")(FirstLayerOldestKVCluster)
    assert assert_same(case_of("first-layer-oldest", (40,)), **EVICTING) == []
    warned = "evicting layer by layer from now on: manual_seed expected a long" in caplog.text
    assert warned == (use == "draws"), "only torch's own refusal is told"


def test_layers_that_wait_in_a_pass_that_breaks_off_are_not_evicted_from_later():
    model = FAMILIES["qwen2"].build(3)
    cache = kvcompress.CompressedCache(model.config, "snapkv", 0.5, window_size=4, **EVICTING)

    def answer(breaks_off: bool) -> list[list[int]]:
        cache.reset()
        fail = Mock(side_effect=[None] * 3 + [RuntimeError("out of memory")] if breaks_off else None, return_value=None)
        handle = model.model.layers[2].register_forward_pre_hook(fail)
        try:
            for ids in torch.arange(FIRST_TEXT, FIRST_TEXT + 40).split([37, 1, 1, 1]):
                model(ids[None], past_key_values=cache)
        finally:
            handle.remove()
        return [head.tolist() for layer in range(3) for head in cache.kept_indices(layer)[0]]

    with layers_at_once() as evicted, kvcompress.attach(model), torch.no_grad():
        kept = answer(breaks_off=False)
        with pytest.raises(RuntimeError, match="out of memory"):
            answer(breaks_off=True)
        assert pickle.dumps(cache.compressed_layers[0]._evictions) == pickle.dumps(joint_eviction.Evictions())
        assert answer(breaks_off=False) == kept
    assert [len(nbytes) for nbytes in evicted] == [3, 3]
