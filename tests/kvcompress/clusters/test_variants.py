"""Each variant and each preset of a method is its own: it says what it changes, and changes what is kept."""

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar, Literal, get_args, get_type_hints

import pytest
import torch

import kvcompress
from kvcompress import KVCompressError
from kvcompress.policy.make import make_policy
from kvcompress.policy.options import PRESCRIBED, all_options
from kvcompress.scoring.layer_view import LayerView, Settings
from kvcompress.tokens import TokenMethod
from tests.oracle.authors.ours import Held, ours
from tests.oracle.authors.states import states
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES

INFOS = kvcompress.list_methods()
VARIANTS = {
    name: get_args(get_type_hints(info.cls)["variant"]) for name, info in INFOS.items() if "variant" in info.options
}
WHERE = {  # what they differ by shows
    "kvzip": {"ratio": 0.2},
    "r-kv": {"similar": 0.99, "balance": 0.0},
    "simlayerkv": {"lazy_threshold": 0.5},
}
KV = [name for name in VARIANTS if not issubclass(INFOS[name].cls, TokenMethod)]  # others: tokens/test_tokens.py


def held(method: str, name: str, budget: int, **options: object) -> Held:
    given = states(name)
    return ours(given, given.prompt, 0, method, budget, **options)


def is_same(one: Held, other: Held) -> bool:
    def equal(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
        return all(torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))

    return torch.equal(one.kept, other.kept) and equal(one.keys, other.keys) and equal(one.values, other.values)


@pytest.mark.parametrize(
    ("method", "one", "other"), [(name, *pair) for name in KV for pair in combinations(VARIANTS[name], 2)]
)
def test_no_two_variants_of_a_method_keep_the_same(method, one, other):
    """Of one of these prompts at least: a variant that ran another's code would of none."""
    prompts = (("random_gqa", 60), ("tiny", 76), ("random_gqa", 8))
    assert not all(
        is_same(*(held(method, *prompt, variant=name, **WHERE.get(method, {})) for name in (one, other)))
        for prompt in prompts
    )


@pytest.mark.parametrize("method", KV)
def test_what_a_variant_prescribes_is_in_force_where_it_is_chosen(method):
    for variant in VARIANTS[method]:
        policy = make_policy(method, 0.5, variant=variant)
        for name, value in INFOS[method].cls.by_variant.get(variant, {}).items():
            assert policy.cluster.of_variant(name) == value
            assert name not in PRESCRIBED or policy.chosen(name) == value


def test_every_variant_of_every_method_is_drawn_by_the_property_tests():
    from tests.support.strategies import OPTIONS

    without_budget = {("simlayerkv", "code"), ("simlayerkv", "paper")}
    for method in KV:
        assert {*OPTIONS[method]["variant"]} == {
            variant for variant in VARIANTS[method] if (method, variant) not in without_budget
        }


@pytest.mark.parametrize("method", [name for name, info in INFOS.items() if info.presets])
def test_every_preset_of_a_method_sets_what_it_names_and_something_that_is_no_default(method):
    info = INFOS[method]
    for name, settings in info.presets.items():
        share = {} if {"ratio", "budget"} & settings.keys() else {"ratio": 0.5}
        policy = make_policy(method, preset=name, **share, **calibration_of(method, FAMILIES["qwen2"].build()))
        options = {**policy.options, "ratio": policy.budget.ratio, "budget": policy.budget.entries}
        assert {option: options[option] for option in settings} == settings
        assert settings.items() - all_options(info).items(), name


# -- what registration refuses


@dataclass(frozen=True)
class Variants(kvcompress.KVCluster):
    variant: Literal["paper", "code", "kvpress"] = "paper"

    rounds_up: ClassVar[bool] = False
    by_variant: ClassVar = {"code": {"rounds_up": True}, "kvpress": {"layer_budget": "pyramid"}}


def changed(name: str, **members: object) -> type:
    return dataclass(frozen=True)(type(name, (Variants,), {"__annotations__": {}, **members}))


class Comparing(Variants):
    def score(self, queries, keys, values, view):
        return keys.norm(dim=-1) if self.variant == "paper" else values.norm(dim=-1)


class InAProperty(Variants):
    @property
    def query_window(self):
        return 4 if self.variant == "paper" else 8


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (changed("Missing", by_variant={"code": {"rounds_up": True}}), "does not say what variant 'kvpress' changes"),
        (changed("Empty", by_variant={**Variants.by_variant, "code": {}}), "does not say what variant 'code' changes"),
        (changed("Strange", by_variant={**Variants.by_variant, "cod": {"rounds_up": True}}), "'cod', which is no"),
        (changed("Default", by_variant={**Variants.by_variant, "paper": {"rounds_up": True}}), "'paper', which is no"),
        (changed("Misspelt", by_variant={**Variants.by_variant, "code": {"round_up": True}}), "'round_up'.*not have"),
        (changed("Same", by_variant={**Variants.by_variant, "code": {"rounds_up": False}}), "with the same value"),
        (changed("Twice", by_variant={name: {"rounds_up": True} for name in ("code", "kvpress")}), "change the same"),
        (changed("None_", variant="paper", __annotations__={"variant": str}), "'code', which is not a variant"),
        (Comparing, r"Comparing\.score reads `variant`"),
        (InAProperty, r"InAProperty\.query_window reads `variant`"),
    ],
)
def test_a_variant_that_falls_through_to_anothers_code_is_an_error_at_registration(cls, message, registry):
    with pytest.raises(KVCompressError, match=message):
        kvcompress.register_method("wrong")(cls)
    assert "wrong" not in kvcompress.list_methods()


def test_a_variant_has_its_own_class_attributes_in_place_of_the_methods(registry):
    kvcompress.register_method("variants")(Variants)
    assert [Variants(variant).of_variant("rounds_up") for variant in VARIANTS["pyramidkv"][:2]] == [False, False]
    assert Variants("code").of_variant("rounds_up")
    assert (Variants("kvpress").of_variant("layer_budget"), Variants("code").layer_budget) == ("pyramid", "uniform")


def test_effivlms_window_in_vl_cache_is_a_tenth_of_the_layers_mean_budget():
    cluster = kvcompress.make_cluster("vl-cache", variant="effivlm")
    keys, settings = torch.randn(1, 2, 200, 8), Settings(cluster)
    for own in (160, 20):
        view = LayerView(0, 3, [200], [own], 1.0, settings=settings, mean_budgets=(64,))
        scores = cluster.score(torch.randn(1, 4, 200, 8), keys, keys, view)
        assert (scores == torch.inf).sum(-1).tolist() == [[6, 6]]
