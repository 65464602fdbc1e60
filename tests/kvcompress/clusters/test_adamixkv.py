"""AdaMixKV is the recipe that the search wrote down, part for part."""

import json

import pytest
import torch

import kvcompress
from benchmarks.driver import RESULTS
from tests.support.families import FAMILIES

RECIPE = json.loads((RESULTS / "own_method_first_search.json").read_text(encoding="utf-8"))["recipe"]
BUDGETS = [{"ratio": 0.5}, {"ratio": 0.2}, {"budget": 12, "decode_budget": 12}]


@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen2-vl"])
def test_it_keeps_and_answers_what_the_recipe_does(family, budgets):
    model = FAMILIES[family].build()
    images = [1, 0, 2] if family == "qwen2-vl" else None
    inputs = FAMILIES[family].inputs(model, [60, 30, 45], *([images] if images else []))
    found = []
    for options in ({"method": "adamixkv"}, RECIPE):
        with kvcompress.compress(model, **budgets, **options) as session:
            ids = model.generate(
                **inputs, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        layers = range(model.config.get_text_config().num_hidden_layers)
        kept = [[[head.tolist() for head in row] for row in session.cache.kept_indices(layer)] for layer in layers]
        found.append((kept, torch.stack(ids.logits)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
