"""AdaMixKV is the recipe that the search wrote down, part for part."""

import json

import pytest

from benchmarks.driver import RESULTS
from tests.support.answers import answer, assert_same
from tests.support.families import FAMILIES

RECIPE = json.loads((RESULTS / "own_method_first_search.json").read_text(encoding="utf-8"))["recipe"]
BUDGETS = [{"ratio": 0.5}, {"ratio": 0.2}, {"budget": 12, "decode_budget": 12}]


@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen2-vl"])
def test_it_keeps_and_answers_what_the_recipe_does(family, budgets):
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, [60, 30, 45], [1, 0, 2] if family == "qwen2-vl" else None)
    assert_same(*(answer(model, inputs, new=12, **budgets, **asked) for asked in ({"method": "adamixkv"}, RECIPE)))
