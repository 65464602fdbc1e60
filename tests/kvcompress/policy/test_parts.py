"""A method in parts: scores, layer budgets, head budgets and merging can be exchanged one by one."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.layer_budgets import LayerBudget, base, layer_budget, list_layer_budgets, register_layer_budget
from kvcompress.methods import method_info
from kvcompress.policy.make import make_policy
from kvcompress.policy.options import all_options
from kvcompress.scoring.layer_view import LayerView, Settings
from kvcompress.scoring.selection import adaptive_indices
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES
from tests.support.kept import kept_of
from tests.support.strategies import LEARNED


def kept(method: str, **options: object) -> list:
    family = FAMILIES["llava-onevision"]
    model = family.build()
    with kvcompress.compress(model, method, 0.3, **options) as session:
        generate(model, family.inputs(model, [60, 41], [1, 2]), 3)
    return [[[head.tolist() for head in row] for row in layer] for layer in kept_of(session.cache)]


@pytest.mark.parametrize("scorer", ["knorm", "expected-attention", "h2o", "tova"])
def test_a_scorer_gives_its_scores_and_the_method_the_rest(scorer):
    assert kept("adakv", scorer=scorer) == kept(scorer, head_budget="adaptive", layer_budget="uniform", merge="none")
    assert kept("adakv", scorer=scorer) != kept("adakv")


@pytest.mark.parametrize(("method", "scorer"), [("snapkv", "pyramidkv"), ("mixkv", "adamixkv")])
def test_a_scorer_that_derives_from_the_method_leaves_it_its_parts(method, scorer):
    parts = {part: getattr(method_info(method).cls, part) for part in ("layer_budget", "head_budget", "merge")}
    assert kept(method, scorer=scorer) == kept(scorer, **parts)


def test_a_scorer_brings_its_own_options():
    small = kept("pyramidkv", scorer="snapkv", window_size=2, kernel_size=1)
    assert small == kept("snapkv", window_size=2, kernel_size=1, layer_budget="pyramid")
    with pytest.raises(kvcompress.KVCompressError, match="no option 'kernel_size'"):
        make_policy("pyramidkv", 0.5, scorer="knorm", kernel_size=1)


def test_the_default_of_every_part_is_the_methods_own():
    for name, info in kvcompress.list_methods().items():
        if name in ("full", *LEARNED) or not issubclass(info.cls, kvcompress.KVCluster):
            continue
        options = make_policy(name, 0.5, **calibration_of(name, FAMILIES["qwen2"].build())).options
        for part in ("layer_budget", "head_budget", "merge", "safeguard", "decode_interval"):
            assert options[part] == getattr(info.cls, part), (name, part)


def test_shared_heads_keep_the_same_tokens():
    for layer in kept("snapkv", head_budget="shared", window_size=4):
        assert all(row[0] == row[1] for row in layer)
    assert any(row[0] != row[1] for layer in kept("snapkv", window_size=4) for row in layer)


@pytest.mark.parametrize("rule", ["sparsity", "hybrid", "sparsity-effivlm"])
def test_layers_in_which_nothing_counts_share_evenly(rule):
    """Such as those of a row whose embeddings are not finite."""
    prompt = kvcompress.Prompt(0, 3, [40], [10], 1.0)
    assert layer_budget(rule).budgets(prompt, torch.zeros(3, 1)) == [[10]] * 3


@pytest.mark.parametrize("rule", [name for name, rule in list_layer_budgets().items() if rule.is_exact])
def test_every_rule_shares_out_exactly_what_uniform_layers_would_hold(rule):
    uniform = kept("snapkv", window_size=4)
    ours = kept("snapkv", window_size=4, layer_budget=rule)
    for row in range(2):
        total = sum(len(head) for layer in ours for head in layer[row])
        assert total == sum(len(head) for layer in uniform for head in layer[row])


def test_one_ranking_of_all_layers_and_heads_keeps_the_best_of_all_to_the_entry():
    draw = torch.Generator().manual_seed(0)
    scores = [torch.randn(2, 3, 40, generator=draw) for _ in range(4)]
    view = LayerView(0, 4, [40, 40], [11, 3], 1.0, settings=Settings(head_budget="adaptive", safeguard=0.0))
    rule = list_layer_budgets()["global"]
    shares = rule.budgets(view, torch.stack([rule.measure(None, None, None, of_layer, view) for of_layer in scores]))
    chosen = [adaptive_indices(of_layer, own, 0.0) for of_layer, own in zip(scores, shares, strict=True)]
    for row, budget in enumerate(view.budgets):
        found = [
            of_layer[row, head, columns[row, head][columns[row, head] >= 0]]
            for of_layer, columns in zip(scores, chosen, strict=True)
            for head in range(3)
        ]
        best = torch.stack(scores)[:, row].flatten().topk(budget * 4 * 3).values
        assert torch.equal(torch.cat(found).sort(descending=True).values, best)


@pytest.mark.parametrize("rule", sorted(list_layer_budgets()))
def test_a_row_of_which_nothing_can_be_evicted_is_kept_whole(rule):
    family = FAMILIES["llava-onevision"]
    model = family.build()
    with kvcompress.compress(model, "snapkv", 0.3, ratio_of="vision", layer_budget=rule) as session:
        generate(model, family.inputs(model, [60, 41], [1, 0]), 1)
    assert all(len(head) == 41 for layer in kept_of(session.cache) for head in layer[1])


def test_a_rule_of_ones_own_is_a_layer_budget_everywhere(monkeypatch):
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))  # no other test shall draw it

    @register_layer_budget("test-last-layer")
    class LastLayerBudget(LayerBudget):
        """Gives the last layer ten times as much."""

        def measure(self, queries, keys, values, scores, prompt):
            share = 10.0 if prompt.place == prompt.num_layers - 1 else 1.0
            return torch.full((keys.shape[0],), share)

    layers = kept("snapkv", window_size=4, layer_budget="test-last-layer")
    sizes = [len(layer[0][0]) - 2 for layer in layers]  # two decoded tokens
    assert (sum(sizes) == 3 * 18 and sizes == [5, 4, 45]) or sizes == [4, 5, 45]
    with pytest.raises(kvcompress.KVCompressError, match=r"'test-last-layer' is already registered by .*LastLayer"):
        register_layer_budget("test-last-layer")(LayerBudget)


@pytest.mark.parametrize("wrong", [None, [3], [3.0, 3.0], [7, -1], [10, -4], [3, 4], [1, 1]])
def test_a_rule_that_shares_out_something_else_is_one_line(wrong):
    class Wrong(LayerBudget):
        def fixed(self, budget, length, num_layers, window, beta):
            return wrong

    with pytest.raises(
        kvcompress.KVCompressError, match=r"^Wrong.fixed returned .* 2 whole numbers from 0 to 9, .* 6$"
    ):
        Wrong().budgets(LayerView(0, 2, [9], [3], 1.0))


@pytest.mark.parametrize("wrong", [None, [1.0], [1.0, float("nan")], [1.0, float("inf")], [[1.0], [1.0]], ["a", "b"]])
def test_weights_that_are_no_number_per_layer_are_one_line(wrong):
    class Wrong(LayerBudget):
        def weights(self, measured, budget, length):
            return wrong

    with pytest.raises(
        kvcompress.KVCompressError, match=r"^Wrong.weights returned .*: it must be 2 finite numbers, one per layer$"
    ):
        Wrong().budgets(LayerView(0, 2, [9], [3], 1.0), torch.ones(2, 1))


def test_what_was_measured_of_states_that_are_not_finite_is_no_error():
    rule = type("Any", (LayerBudget,), {"measure": lambda self, *_: None})()
    measured = torch.tensor([[1.0, torch.nan], [3.0, torch.nan]])
    assert rule.budgets(LayerView(0, 2, [9, 9], [4, 4], 1.0), measured) == [[2, 4], [6, 4]]


@pytest.mark.parametrize(("wrong", "said"), [(None, "NoneType"), (1.0, "float"), (torch.ones(3), r"\(3,\)")])
def test_a_measurement_that_is_no_tensor_of_the_rows_is_one_line(wrong, said, monkeypatch):
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))  # no other test shall draw it
    register_layer_budget("wrong")(type("Wrong", (LayerBudget,), {"measure": lambda self, *_: wrong}))
    with pytest.raises(
        kvcompress.KVCompressError,
        match=rf"^Wrong.measure returned {said}: it must be a tensor \(batch, ...\), here \(2, ...\)$",
    ):
        kept("snapkv", layer_budget="wrong")


def test_temperatures_of_cake_beyond_what_fp32_holds_are_one_line():
    with pytest.raises(kvcompress.KVCompressError, match=r"^layer_budget='cake': .* give a larger tau1= or tau2=$"):
        kept("cake", tau1=0.01, window_size=8)


@pytest.mark.parametrize("vision", [None, torch.zeros(1, 9, dtype=torch.bool)], ids=["unknown", "none"])
def test_without_vision_tokens_no_layer_has_a_cross_modal_entropy(vision):
    queries, keys = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    view = LayerView(0, 2, [9], [3], 1.0, vision=vision)
    assert layer_budget("entropy").measure(queries, keys, keys, keys.norm(dim=-1), view).tolist() == [0.0]


@dataclass(frozen=True)
class PublishedKVCluster(kvcompress.KVCluster):
    window_size: int = 4
    variant: Literal["code", "paper"] = "code"

    presets: ClassVar = {"longbench": {"window_size": 8, "decode_budget": 128}}
    by_variant: ClassVar = {"paper": {"layer_budget": "pyramid", "decode_interval": 3}}

    def score(self, queries, keys, values, view):
        return keys.norm(dim=-1)


@pytest.fixture
def published(registry):
    kvcompress.register_method("published")(PublishedKVCluster)


@pytest.mark.usefixtures("published")
def test_a_preset_stands_for_its_options_and_what_is_given_besides_goes_before_it():
    assert kvcompress.list_methods()["published"].presets == PublishedKVCluster.presets
    options = make_policy("published", 0.5, preset="longbench").options
    assert (options["window_size"], options["decode_budget"]) == (8, 128)
    assert options == make_policy("published", 0.5, window_size=8, decode_budget=128).options
    assert make_policy("published", 0.5, preset="longbench", window_size=2).options["window_size"] == 2
    assert make_policy("published", 0.5, preset=None).options["window_size"] == 4


def test_a_preset_that_brings_its_size_brings_what_decoding_keeps_with_it():
    def sizes(*size: object, **options: object) -> tuple:
        policy = make_policy("cake", *size, preset="llama-3.1-8b-128", **options)
        return policy.budget.ratio, policy.budget.entries, policy.engine.decode_ratio, policy.engine.decode_budget

    assert sizes() == (None, 128, None, 128)
    assert sizes(decode_budget=64) == (None, 128, None, 64)
    assert sizes(decode_ratio=0.5) == (None, 128, 0.5, None)
    assert sizes(0.5) == (0.5, None, None, None)
    assert sizes(None, 60) == (None, 60, None, None)
    assert sizes(None, 60, decode_budget=60) == (None, 60, None, 60)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(("method", "message"), [("published", "no preset 'x'.*longbench"), ("knorm", "no option")])
def test_an_unknown_preset_is_an_error_that_names_those_that_there_are(method, message):
    with pytest.raises(kvcompress.KVCompressError, match=message):
        make_policy(method, 0.5, preset="x")


def test_a_preset_that_sets_what_is_no_option_is_an_error(registry):
    misspelt = type("Misspelt", (PublishedKVCluster,), {"presets": {"longbench": {"window_siz": 8}}})
    kvcompress.register_method("misspelt")(misspelt)
    with pytest.raises(kvcompress.KVCompressError, match=r"preset 'longbench' of .* no option 'window_siz' \(did you"):
        make_policy("misspelt", 0.5, preset="longbench")


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("head_budget", "adaptve", r"no head_budget 'adaptve' \(did you mean 'adaptive'"),
        ("second_pass", "contxt", r"no second_pass 'contxt' \(did you mean 'context'"),
        ("second_pass", "answer", "second_pass='answer', but no option 'answer_tokens'"),
        ("second_pass", "context", "second_pass='context', but no option 'chunk_size', 'sinks', 'instruction'"),
        ("safeguard", 1.5, "'misspelt': 'safeguard' is 1.5"),
        ("decode_interval", 0, "'misspelt': 'decode_interval' is 0"),
    ],
)
def test_a_wrong_class_attribute_of_a_method_is_an_error(attribute, value, said, registry):
    misspelt = type("Misspelt", (PublishedKVCluster,), {attribute: value})
    kvcompress.register_method("misspelt")(misspelt)
    with pytest.raises(kvcompress.KVCompressError, match=said):
        make_policy("misspelt", 0.5)


@pytest.mark.parametrize("name", ["ratio", "preset", "protect"])
def test_an_option_with_the_name_of_one_of_every_method_is_an_error(name, registry):
    """Only one of the two could be given, or be recorded with a result."""
    taking = type("Taking", (PublishedKVCluster,), {"__annotations__": {name: int}, name: 4})
    kvcompress.register_method("taking")(dataclass(frozen=True)(taking))
    with pytest.raises(kvcompress.KVCompressError, match=f"option '{name}' of method 'taking' needs another name"):
        make_policy("taking", 0.5)


@pytest.mark.usefixtures("published")
def test_a_variant_prescribes_layer_budget_and_schedule_unless_they_are_given():
    code, paper = (make_policy("published", 0.5, variant=variant) for variant in ("code", "paper"))
    assert (code.chosen("layer_budget"), code.decode_interval) == ("uniform", 16)
    assert (paper.chosen("layer_budget"), paper.decode_interval) == ("pyramid", 3)
    assert make_policy("published", 0.5, variant="paper", layer_budget="uniform").chosen("layer_budget") == "uniform"
    assert make_policy("published", 0.5, scorer="snapkv", variant="paper").chosen("layer_budget") == "uniform"


def test_a_policy_lists_every_option_of_its_method_with_the_value_in_force():
    """The protocol of a result: a preset stands there as what it sets."""
    valid = all_options(method_info("snapkv"))
    options = make_policy("snapkv", 0.5, window_size=8, prefill_chunk=64).options
    assert options.keys() == valid.keys() - {"preset"}
    assert (options["window_size"], options["prefill_chunk"]) == (8, 64)
    assert options["kernel_size"] == valid["kernel_size"]
