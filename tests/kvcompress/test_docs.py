"""The code in the documentation runs."""

import torch

import kvcompress
from kvcompress import methods
from tests.support.docs import DOCS, python_blocks
from tests.support.families import FAMILIES

README = DOCS.parent / "README.md"


def test_the_example_method_is_registered_and_keeps_the_largest_values(monkeypatch, capsys):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [200])
    namespace = {"kvcompress": kvcompress, "model": model, "inputs": inputs | {"max_new_tokens": 2}}
    definition, use = python_blocks("adding-a-method.md")
    assert len(definition.strip().splitlines()) <= 21
    exec(definition, namespace)
    assert kvcompress.list_methods()["value-norm"].options == {"window_size": 8}
    exec(use, namespace)
    session = namespace["session"]
    assert session.cache.realised_ratios()[0] == [0.2]
    kept = session.cache.kept_indices(0)[0][0]
    assert len(kept) == 40 + 1
    assert torch.equal(kept[-17:], torch.arange(184, 201))
    assert "tensor(" in capsys.readouterr().out


def test_the_readme_has_a_row_for_every_method_and_no_other():
    tables = README.read_text().split("## Methods")[1].split("\n## ")[0]
    rows = [line.split("`")[1] for line in tables.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(kvcompress.list_methods())
