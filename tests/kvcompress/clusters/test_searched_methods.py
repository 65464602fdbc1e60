"""The methods that benchmarks/own_method.py found are the recipes that it wrote down, part for part."""

import json

import pytest
import torch

import kvcompress
from benchmarks.method_table import RESULTS
from tests.support.families import FAMILIES

SEARCHES = {"adamixkv": "own_method_first_search.json", "r-cake": "own_method_search.json"}
BUDGETS = [{"ratio": 0.5}, {"ratio": 0.2}, {"budget": 12, "decode_budget": 12}]  # the last evicts at the 32nd token


@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen2-vl"])
@pytest.mark.parametrize("method", SEARCHES)
def test_it_keeps_and_answers_what_the_recipe_does(method, family, budgets):
    recipe = json.loads((RESULTS / SEARCHES[method]).read_text(encoding="utf-8"))["recipe"]
    model = FAMILIES[family].build()
    images = [1, 0, 2] if family == "qwen2-vl" else None
    inputs = FAMILIES[family].inputs(model, [60, 30, 45], *([images] if images else []))
    found = []
    for options in ({"method": method}, recipe):
        with kvcompress.compress(model, **budgets, **options) as session:
            ids = model.generate(
                **inputs, max_new_tokens=36, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        layers = range(model.config.get_text_config().num_hidden_layers)
        kept = [[[head.tolist() for head in row] for row in session.cache.kept_indices(layer)] for layer in layers]
        found.append((kept, torch.stack(ids.logits)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_r_cakes_layers_keep_different_numbers_which_are_r_kvs_in_sum():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [60])
    counts = {}
    for method in ("r-cake", "r-kv"):
        with kvcompress.compress(model, method=method, ratio=0.3) as session:
            model.generate(**inputs, max_new_tokens=1, do_sample=False)
        layers = range(model.config.num_hidden_layers)
        counts[method] = [len(session.cache.kept_indices(layer)[0][0]) for layer in layers]
    assert len(set(counts["r-kv"])) == 1
    assert len(set(counts["r-cake"])) > 1
    assert sum(counts["r-cake"]) == sum(counts["r-kv"])
