"""KVCOMPRESS_METHODS: methods in files of one's own."""

import os
import re
from unittest.mock import patch

import pytest
import torch

import kvcompress
from kvcompress import KVCompressError, methods
from kvcompress.check.command import main as check_main
from kvcompress.check.promises import Broken
from kvcompress.policy.make import make_policy
from tests.support.docs import DOCS, python_blocks
from tests.support.families import FAMILIES

pytestmark = pytest.mark.usefixtures("registry")
DEFINITION = python_blocks(DOCS / "adding-a-method.md")[0]
TOKENS = next(block for block in python_blocks(DOCS / "adding-a-method.md") if "TokenMethod" in block)
MERGE = next(block for block in python_blocks(DOCS / "adding-a-method.md") if "register_merge" in block)
RULE = next(block for block in python_blocks(DOCS / "adding-a-method.md") if "register_layer_budget" in block)
SUBCLASS = """
from dataclasses import dataclass
import kvcompress
from kvcompress.clusters.snapkv import SnapKVCluster

@kvcompress.register_method("mine")
@dataclass(frozen=True)
class Mine(SnapKVCluster):
    half: int = 4
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        named = os.pathsep.join(str(tmp_path / f"{name}.py") for name in files)
        monkeypatch.setenv(methods.FILES, named)

    return write


def test_a_method_of_a_file_is_one_like_any_other(write):
    write(mine=DEFINITION, other=DEFINITION.replace("value-norm", "value-norm-2"))
    assert {"value-norm", "value-norm-2", "snapkv"} <= kvcompress.list_methods().keys()
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40])
    with kvcompress.compress(model, "value-norm", 0.5, window_size=4) as session:
        model.generate(**inputs, max_new_tokens=2)
    assert session.cache.realised_ratios()[0] == [0.5]


def test_it_is_found_by_name_before_the_list_was_asked_for(write):
    write(mine=DEFINITION)
    assert methods.method_info("value-norm").options == {"window_size": 8}


def test_a_layer_budget_of_a_file_is_one_like_any_other(write, capsys):
    write(mine=RULE)
    kvcompress.list_methods()
    assert "not checked" not in capsys.readouterr().err  # `kvcompress check` is for methods
    model = FAMILIES["qwen2"].build(4)
    inputs = FAMILIES["qwen2"].inputs(model, [40])
    with kvcompress.compress(model, "snapkv", budget=8, window_size=4, layer_budget="first-half") as session:
        model.generate(**inputs, max_new_tokens=1)
    assert [len(session.cache.kept_indices(layer)[0][0]) for layer in range(4)] == [12, 12, 4, 4]


def test_a_token_method_of_a_file_is_one_like_any_other(write, capsys):
    write(mine=TOKENS)
    family = FAMILIES["llava-onevision"]
    model = family.build()
    inputs = family.inputs(model, [60], [1])
    vision = int((inputs["input_ids"] == model.config.image_token_id).sum())
    with kvcompress.compress(model, "large-embeddings", 0.5) as session:
        model.generate(**inputs, max_new_tokens=1)
    assert len(session.cache.kept_indices(0)[0][0]) == 60 - vision + round(vision / 2)
    assert "mine.py was not checked in its present form" in capsys.readouterr().err


def test_a_merge_of_a_file_is_one_like_any_other(write, capsys):
    write(mine=MERGE)
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40, 21])
    values = {}
    for merge in ("none", "faint", "average"):
        with kvcompress.compress(model, "snapkv", 0.3, window_size=4, merge=merge) as session:
            model.generate(**inputs, max_new_tokens=1)
        values[merge] = session.cache.layers[0].memory.kept().values
    assert "not checked" not in capsys.readouterr().err  # `kvcompress check` is for methods
    assert not torch.equal(values["faint"], values["none"])
    assert (values["faint"] - values["none"]).norm() < (values["average"] - values["none"]).norm()
    for number, name in enumerate(("average", "none")):
        write(**{f"taken{number}": MERGE.replace("faint", name)})
        with pytest.raises(KVCompressError, match=f"merge '{name}' is already registered"):
            kvcompress.list_methods()
    write(budget=MERGE.replace("faint", "pyramid"))  # the name of a layer budget, which is no merge
    kvcompress.list_methods()


@pytest.mark.parametrize(
    ("sees", "layers", "first"),
    [("embeddings", [99], 0), ("embeddings", [], 0), ("embeddings", [2, 1], 0), ("attention", [0], 1)],
)
def test_a_token_method_that_names_a_layer_that_is_not_there_is_one_line(write, sees, layers, first):
    wrong = TOKENS.replace('sees = "embeddings"', f"sees = {sees!r}").replace("return [0]", f"return {layers}")
    write(mine=wrong)
    family = FAMILIES["qwen2-vl"]
    model = family.build()
    inputs = family.inputs(model, [40], images=[1])
    said = re.escape(f"LargeEmbeddings.layers returned {layers}: with sees={sees!r} they ascend, from {first} to ")
    with pytest.raises(KVCompressError, match=said), kvcompress.compress(model, "large-embeddings", 0.5):
        model.generate(**inputs, max_new_tokens=2)


@pytest.mark.parametrize("layers", [[0], 0, None, [1.0], torch.tensor([1])])
def test_layers_of_another_kind_are_one_line(write, layers):
    write(mine=TOKENS.replace('sees = "embeddings"', 'sees = "attention"'))
    family = FAMILIES["qwen2-vl"]
    model = family.build()
    inputs = family.inputs(model, [40], images=[1])
    with patch.object(kvcompress.list_methods()["large-embeddings"].cls, "layers", lambda self, num_layers: layers):
        said = rf"LargeEmbeddings.layers returned {re.escape(str(layers))}: with sees='attention' they ascend, from 1"
        with pytest.raises(KVCompressError, match=said), kvcompress.compress(model, "large-embeddings", 0.5):
            model.generate(**inputs, max_new_tokens=2)


def test_a_token_method_that_sees_embeddings_scores_the_hidden_states_of_any_layer(write):
    write(mine=TOKENS.replace("return [0]", "return [2]"))
    family = FAMILIES["qwen2-vl"]
    model = family.build(3)
    inputs = family.inputs(model, [40], images=[1])
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[2][0].norm(dim=-1)
    with kvcompress.compress(model, "large-embeddings", 0.5) as session:
        model.generate(**inputs, max_new_tokens=1)
    is_vision = inputs["input_ids"][0] == model.config.image_token_id
    kept = session.cache.kept_indices(2)[0][0]
    kept = kept[is_vision[kept]]
    best = states.masked_fill(~is_vision, -1).topk(round(int(is_vision.sum()) / 2)).indices
    assert kept.tolist() == sorted(best.tolist())
    assert len(session.cache.kept_indices(1)[0][0]) == 40


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({'"embeddings"': '"embedding"'}, r"there is no sees 'embedding' .did you mean 'embeddings'"),
        ({"tokens.hidden.float().norm(dim=-1)": "tokens.last_attention()"}, r"last_attention\(\) needs sees = \"atten"),
        (
            {"tokens.hidden.float()": "tokens.hidden.mul_(2)"},
            "method 'large-embeddings' changes what it is given in pl",
        ),
        ({"tokens.hidden.float()": "tokens.vision.logical_not_()[..., None].float()"}, "changes what it is given"),
        (
            {
                '"embeddings"': '"attention"',
                "[0]": "[1]",
                "tokens.hidden.float().norm": "tokens.attention.keys.mul_(2).sum",
            },
            "changes what it is given",
        ),
    ],
)
def test_a_token_method_that_is_wrong_is_one_line(write, changed, said):
    text = TOKENS
    for old, new in changed.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    write(mine=text)
    family = FAMILIES["qwen2-vl"]
    model = family.build()
    inputs = family.inputs(model, [40], images=[1])
    with pytest.raises(KVCompressError, match=said), kvcompress.compress(model, "large-embeddings", 0.5):
        model.generate(**inputs, max_new_tokens=1)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("keys.mul_(2) and kept", "merge 'faint' changes what it is given in place: use copies"),
        ("replace(kept, keys=kept.keys.double())", r"merge 'faint' returned keys of 16 channels in torch.float64"),
        ("replace(kept, values=kept.values.half())", r"merge 'faint' returned values of 16 channels in torch.float16"),
        ("replace(kept, keys=kept.keys[..., 1:])", r"merge 'faint' returned keys of 15 channels .* made of 16"),
        (
            "replace(kept, **{name: getattr(kept, name)[:, :, 1:] for name in ('keys', 'values', 'indices')})",
            r"merge 'faint' returned 19 entries per head of 20: .* drops none",
        ),
    ],
)
def test_a_merge_that_is_wrong_is_one_line(write, returned, said):
    begin = MERGE.index("    def share")
    write(
        mine=f"from dataclasses import replace\n{MERGE[:begin]}    return {returned.replace(' and ', '.sum() and ')}\n"
    )
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40])
    with pytest.raises(KVCompressError, match=said), kvcompress.compress(model, "knorm", 0.5, merge="faint"):
        model.generate(**inputs, max_new_tokens=1)


MEASURED = """
from kvcompress.layer_budgets import LayerBudget, register_layer_budget

@register_layer_budget("mine")
class Mine(LayerBudget):
    def measure(self, queries, keys, values, scores, view):
        return {}
"""


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("scores.mean((1, 2))", r"Mine.measure returned NaN or an infinity; scores are \+inf where entries must stay"),
        ("keys.mean((1, 2, 3)) / 0", "Mine.measure returned NaN or an infinity"),
        ("scores.mul_(0).mean((1, 2))", "Mine.measure changes what it is given in place"),
    ],
)
def test_a_rule_that_measures_no_numbers_is_one_line(write, returned, said):
    """Of which nothing could be divided, or layers would get equal shares without a word."""
    write(mine=MEASURED.format(returned))
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40, 21])
    with pytest.raises(KVCompressError, match=said), kvcompress.compress(model, "snapkv", 0.5, layer_budget="mine"):
        model.generate(**inputs, max_new_tokens=1)


@pytest.mark.parametrize("text", [RULE, MERGE, DEFINITION], ids=["layer budget", "merge", "method"])
def test_a_decorator_without_the_name_is_one_line(write, text):
    write(mine=re.sub(r"(@\S*register_\w+)\(.*\)", r"\1", text))
    with pytest.raises(KVCompressError, match=r"mine.py: register_\w+ takes the name of the \w+: @register_"):
        kvcompress.list_methods()


@pytest.mark.parametrize(("text", "part"), [(RULE, "layer_budget=first-half"), (MERGE, "merge=faint")])
def test_a_files_layer_budgets_and_merges_are_checked_with_snapkv(write, tmp_path, monkeypatch, capsys, text, part):
    name = "a method keeps some of what it is asked"
    tried = []
    monkeypatch.setattr("kvcompress.check.promises.PROMISES", {name: lambda checked: tried.append(checked.policy)})
    write(mine=text)
    assert check_main([str(tmp_path / "mine.py")]) == 0
    (policy,) = tried
    assert capsys.readouterr().out == f"ok      snapkv {part}: {name}\n"
    assert policy.method == "snapkv"


def test_one_broken_promise_is_enough_to_fail(monkeypatch, capsys):
    def broken(checked):
        raise Broken("it does not")

    promises = {"it keeps this": lambda checked: None, "and this": broken}
    monkeypatch.setattr("kvcompress.check.promises.PROMISES", promises)
    assert check_main(["snapkv"]) == 1
    assert capsys.readouterr().out == ("ok      snapkv: it keeps this\nFAILED  snapkv: and this\n        it does not\n")


def test_the_variable_is_not_named_where_it_names_another_file():
    with pytest.raises(KVCompressError, match=r"^there is no Python file other\.py"):  # the variable does not name it
        check_main(["other.py"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nonesuch", "ModuleNotFoundError: No module named 'nonesuch'"),
        ("x = (", "SyntaxError"),
        ("x = 1", "it registers no method, no layer budget and no merge"),
        (DEFINITION.replace("value-norm", "snapkv"), "'snapkv' is already registered"),
        *(
            (DEFINITION.replace("value-norm", name), f"cannot be method '{name}': a name has letters, digits, spaces")
            for name in ("", "value/norm", "value,norm", "value:norm", "value=norm", "-norm", "norm ", "..")
        ),
        (DEFINITION.replace("value-norm", "All_KV"), "cannot be method 'All_KV': evaluations mean something else by"),
        (TOKENS.replace("def score", "def scores"), "LargeEmbeddings does not define score"),
        (SUBCLASS.replace("@dataclass(frozen=True)\n", ""), "Mine has the option 'half', but is no dataclass itself"),
        (
            SUBCLASS.replace("half: int", "window_size"),
            "Mine gives its option 'window_size' the default 4 without a type",
        ),
    ],
)
def test_a_file_that_is_wrong_is_one_line_each_time(write, text, said):
    write(mine=text)
    for _ in range(2):
        with pytest.raises(KVCompressError, match=said) as caught:
            kvcompress.list_methods()
        assert "mine.py" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_subclass_may_add_an_option_or_change_a_default_or_only_the_score(write):
    without = SUBCLASS.replace("@dataclass(frozen=True)\n", "").replace("half: int = 4", "mixes_heads = True")
    write(
        one=SUBCLASS,
        two=SUBCLASS.replace("half", "window_size").replace('"mine"', '"mine-2"'),
        three=without.replace('"mine"', '"mine-3"'),
    )
    found = kvcompress.list_methods()
    assert [found[name].options["window_size"] for name in ("mine", "mine-2", "mine-3")] == [32, 4, 32]
    assert found["mine"].options["half"] == 4


def test_an_option_without_a_type_is_named_where_it_is_given(write):
    write(mine=DEFINITION.replace("window_size: int = 8", "window_size = 8"))
    said = r"has no option 'window_size' \(ValueNormKVCluster.window_size has no type, so it is no option\); valid: "
    with pytest.raises(KVCompressError, match=said):
        make_policy("value-norm", 0.5, window_size=4)
    with pytest.raises(KVCompressError, match=said):
        methods.make_method("value-norm", window_size=4)
    with pytest.raises(KVCompressError, match=r"has no option 'scor' \(did you mean 'scorer'"):
        make_policy("value-norm", 0.5, scor=4)


def test_a_type_by_which_no_value_can_be_checked_is_one_line(write):
    write(mine=f"import torch\n{DEFINITION.replace('window_size: int = 8', 'window_size: torch.Tensor | int = 8')}")
    with pytest.raises(
        KVCompressError, match=r"^ValueNormKVCluster: an option has a type by which no .*Tensor"
    ) as caught:
        methods.make_method("value-norm")
    assert "\n" not in str(caught.value)


def test_two_files_of_one_name_are_refused(tmp_path, monkeypatch):
    files = [tmp_path / folder / "mine.py" for folder in ("one", "other")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(DEFINITION.replace("value-norm", f"value-norm-{number}"))
    monkeypatch.setenv(methods.FILES, os.pathsep.join(map(str, files)))
    with pytest.raises(KVCompressError, match=r"other.mine\.py: another file there has the same name"):
        kvcompress.list_methods()


def test_who_named_no_file_and_asks_for_a_method_of_none_is_asked_about_it(write, monkeypatch):
    monkeypatch.delenv(methods.FILES, raising=False)
    with pytest.raises(
        KVCompressError, match=r"there is no method 'mine' \(is the file of your own in KVCOMPRESS_METHOD"
    ):
        methods.method_info("mine")
    with pytest.raises(KVCompressError, match=r"there is no method 'snapvk' \(did you mean 'snapkv'\?\); valid"):
        methods.method_info("snapvk")
    write(other=DEFINITION)
    with pytest.raises(KVCompressError, match="there is no method 'mine'; valid: adakv"):
        methods.method_info("mine")


def test_a_file_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(methods.FILES, str(tmp_path / "mine.py"))
    with pytest.raises(KVCompressError, match=r"KVCOMPRESS_METHODS: there is no Python file .*mine\.py"):
        kvcompress.list_methods()
