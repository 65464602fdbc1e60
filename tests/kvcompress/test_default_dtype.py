"""A program's own default dtype (`torch.set_default_dtype`), under which a model's forward pass gives the same, changes
neither what is kept nor the logits."""

from collections.abc import Iterator

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES
from tests.support.kept import kept_lists

VLM = FAMILIES["llava-onevision"]
METHODS = ["cam", "capkv", "compactor", "criticalkv", "duoattention", "expected-attention", "leverage", "sparsemm"]
METHODS += ["h2o", "hindsight", "kvcrush", "kvzip", "random"]
METHODS += ["cdpruner", "divprune", "prumerge+", "random-tokens", "sparsevlm"]
CASES = [{"method": method} for method in METHODS]
CASES += [{"method": "snapkv", "layer_budget": name} for name in ("entropy", "sparsity", "variance", "vision")]


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default(request) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_another_default_dtype_changes_nothing(case, default):
    model = VLM.build()
    inputs, options = VLM.inputs(model, [40, 33], [1, 1]), case | calibration_of(case["method"], model)
    found = []
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        with kvcompress.compress(model, ratio=0.5, **options) as session:
            logits = generate(model, inputs, 3)[1]
        found.append((kept_lists(session.cache), logits))
    assert found[1][0] == found[0][0]
    assert torch.equal(found[1][1], found[0][1])
