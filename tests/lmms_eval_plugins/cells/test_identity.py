"""A cell counts only while all that its numbers depend on is the same."""

import ast
import functools
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmms_eval_plugins.cells import identity
from lmms_eval_plugins.cells.results import Cell
from lmms_eval_plugins.model.arguments import ModelArguments

ROOT = Path(identity.__file__).parents[2]


def test_code_identity_ignores_comments_and_docstrings_and_sees_code(tmp_path):
    source = tmp_path / "method.py"
    code = 'class Own:\n    """{}"""\n    kept = "a"\n\n    async def score(self):\n        """{}"""\n'
    source.write_text(code.format("One.", "One."))
    before = identity.code_identity(tmp_path)
    source.write_text("# a comment\n\n" + code.format("Two.", "Two."))
    assert identity.code_identity(tmp_path) == before
    source.write_text('"""Of a module."""\n' + code.format("Two.", "Two."))
    assert identity.code_identity(tmp_path) == before
    source.write_text(code.format("One.", "One.").replace('"a"', '"b"'))
    assert identity.code_identity(tmp_path) != before


def own_class(source: str, line: int = 0) -> type:
    """A class that is defined in no file, as in a notebook."""
    namespace = {"__name__": "__main__"}
    exec("\n" * line + source, namespace)
    return namespace["Own"]


def test_the_identity_of_a_class_of_ones_own_sees_its_code_and_not_its_place():
    source = "class Own:\n    kept = 3\n    def score(self, keys, scale=2):\n        return keys * scale + 1\n"
    before = identity.own_identity(own_class(source))
    assert identity.own_identity(own_class(source, line=7)) == before
    for change in (("+ 1", "+ 2"), ("+ 1", "- 1"), ("kept = 3", "kept = 4"), ("scale=2", "scale=3"), ("* scale", "")):
        assert identity.own_identity(own_class(source.replace(*change))) != before
    described = source.replace("scale=2):\n", 'scale=2):\n        """{}"""\n')
    one, other = (identity.own_identity(own_class(described.format(text))) for text in "ab")
    assert one == other
    assert identity.own_identity(list) == identity.own_identity(Cell) == identity.own_identity(None) == ""


def test_the_identity_of_a_notebooks_class_sees_the_functions_and_constants_beside_it():
    helpers = (
        "import functools\nPOWER = 2\n"
        "def more(x):\n    return [y + 1 for y in x]\n"
        "def helper(x):\n    return more(x) * POWER\n"
        "def noted(function):\n    return functools.wraps(function)(lambda *given: function(*given))\n"
    )
    source = helpers + "class Own:\n    @noted\n    def score(self, keys):\n        return helper(keys)\nother = 1\n"
    before = identity.own_identity(own_class(source))
    assert identity.own_identity(own_class(source.replace("other = 1", "other = 2"))) == before
    for change in (("y + 1", "y + 2"), ("POWER = 2", "POWER = 3"), ("(x) * ", "(x) + "), ("(keys)\n", "(-keys)\n")):
        assert identity.own_identity(own_class(source.replace(*change))) != before


OF_FILE = """
from functools import partial
from dataclasses import dataclass
import kvcompress
from kvcompress.layer_budgets import LayerBudget, register_layer_budget
from kvcompress.scoring.merging import into_most_similar, register_merge

POWERS = {"keys": 2}

def share(evicted, into, cosine):
    return evicted, cosine

register_merge("own-of-file")(partial(into_most_similar, share=share))

@register_layer_budget("own-of-file")
class Own(LayerBudget):
    def fixed(self, budget, length, num_layers, window, beta):
        return [budget] * num_layers

@kvcompress.register_method("own-of-file")
@dataclass(frozen=True)
class OwnKVCluster(kvcompress.KVCluster):
    def score(self, queries, keys, values, view):
        return keys.float().norm(dim=-1) ** POWERS["keys"]
"""


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("own-of-file", {}),
        ("snapkv", {"scorer": "own-of-file"}),
        ("snapkv", {"layer_budget": "own-of-file"}),
        ("snapkv", {"merge": "own-of-file"}),
    ],
)
def test_a_cell_depends_on_the_whole_file_of_what_is_ones_own(method, options, tmp_path, monkeypatch):
    from kvcompress import methods
    from kvcompress.layer_budgets import base
    from kvcompress.scoring import merging

    cell = Cell("task", "model", method, ratio=0.2)
    arguments = SimpleNamespace(pretrained="hub/id", revision="main", chat_template=None, system_prompt=None)
    file = tmp_path / "own_of_file.py"

    def code(source: str) -> str:
        with monkeypatch.context() as patch:
            for module, name in ((methods, "_METHODS"), (base, "_RULES"), (merging, "MERGES"), (methods, "_FILES")):
                patch.setattr(module, name, getattr(module, name).copy())
            patch.setitem(sys.modules, "kvcompress_methods_own_of_file", None)
            file.write_text(source)
            methods.import_file(file, file.name)
            identity._file_identity.cache_clear()
            return identity.fingerprint(cell, arguments, options, {}, {})["code"]

    methods.list_methods()
    before = code(OF_FILE)
    assert code(f"# a comment\n{OF_FILE}") == before
    assert code(OF_FILE.replace('"keys": 2', '"keys": 3')) != before
    assert code(OF_FILE.replace("evicted, cosine\n", "evicted, -cosine\n")) != before


def test_a_cell_depends_on_a_layer_budget_of_ones_own(monkeypatch):
    from kvcompress.layer_budgets import base

    def code(layer_budget: str, first: int = 3) -> str:
        source = f"class Own(LayerBudget):\n    def fixed(self, *_):\n        return [{first}, 1]\n"
        namespace = {"LayerBudget": base.LayerBudget, "__name__": "own"}
        exec(source, namespace)
        monkeypatch.setattr(base, "_RULES", {**base._RULES, "own": namespace["Own"]()})
        cell = Cell("task", "model", "snapkv", ratio=0.2)
        arguments = SimpleNamespace(pretrained="hub/id", revision="main", chat_template=None, system_prompt=None)
        return identity.fingerprint(cell, arguments, {"layer_budget": layer_budget}, {}, {})["code"]

    assert code("own") == code("own") != code("own", first=5)
    assert code("uniform") == code("uniform", first=5) != code("own")


# -- our own code

COUNTED = (
    "kvcompress/measure.py", "kvcompress/clusters/snapkv.py", "kvcompress/clusters/more/deeper.py",
    "lmms_eval_plugins/model/lm.py", "lmms_eval_plugins/model/more/part.py", "lmms_eval_plugins/tasks/official.py",
    "lmms_eval_plugins/tasks/mine/scores.py", "lmms_eval_plugins/cells/run.py", "lmms_eval_plugins/cells/data.py",
    "lmms_eval_plugins/cells/new.py", "lmms_eval_plugins/text/run.py",
)  # fmt: skip
NOT_COUNTED = (
    "lmms_eval_plugins/cells/errors.py",
    "lmms_eval_plugins/report/table.py",
    "lmms_eval_plugins/evaluate.py",
)


@pytest.fixture
def tree(tmp_path):
    for name in (*COUNTED, *NOT_COUNTED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize("name", [*COUNTED, *NOT_COUNTED])
def test_a_change_in_any_module_that_makes_answers_is_another_identity(tree, name):
    code = identity.own_code.__wrapped__
    before = code(tree)
    (tree / name).write_text("x = 2\n")
    assert (code(tree) != before) == (name in COUNTED)


def test_the_modules_that_make_no_answer_are_there():
    """A new name for one of them would be another identity of every cell, for a change that changes nothing."""
    folder = Path(identity.__file__).parent
    assert {name for name in identity.WITHOUT_EFFECT if not (folder / name).is_file()} == set()


def test_a_module_that_moves_to_another_folder_is_another_identity(tree):
    code, one = identity.own_code.__wrapped__, tree / "kvcompress" / "clusters" / "snapkv.py"
    before = code(tree)
    one.rename(one.parent / "more" / one.name)
    assert code(tree) != before


def imported(file: Path) -> set[Path]:
    """The files of our packages that a module of them imports, anywhere in its code."""
    package = file.parent.relative_to(ROOT).parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = [*above, *(node.module.split(".") if node.module else ())]
            names = [module, *([*module, alias.name] for alias in node.names)]
        for name in names:
            path = ROOT.joinpath(*name)
            found |= {each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()}
    return {path for path in found if path.relative_to(ROOT).parts[0] in ("kvcompress", "lmms_eval_plugins")}


def test_every_module_that_the_model_and_a_cell_import_counts():
    """But those of `cells` that are named: a new one counts until it is."""
    plugin = ROOT / "lmms_eval_plugins"
    todo, reached = [plugin / "model" / "lm.py", plugin / "cells" / "run.py", plugin / "tasks" / "official.py"], set()
    while todo:
        if (file := todo.pop()) not in reached:
            reached.add(file)
            todo += imported(file)
    counted = [
        *(ROOT / "kvcompress").rglob("*.py"),
        *(plugin / "model").rglob("*.py"),
        *(plugin / "tasks").rglob("*.py"),
        *(plugin / "text").rglob("*.py"),
    ]
    counted += [file for file in (plugin / "cells").rglob("*.py") if file.name not in identity.WITHOUT_EFFECT]
    assert plugin / "cells" / "data.py" in reached
    rest = {str(file.relative_to(plugin)) for file in reached.difference(counted)}
    assert rest <= {f"cells/{name}" for name in identity.WITHOUT_EFFECT} | {"__init__.py"}


# -- tasks


def score(doc, results):
    return {"acc": 1}


def module(tmp_path, source, name="utils"):
    (tmp_path / f"{name}.py").write_text(source)
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def task(**config):
    return SimpleNamespace(config=SimpleNamespace(task="t", **config))


UTILS = "HELP = 1\ndef score(doc, results):\n    return HELP\n"


def test_a_task_is_its_settings_and_the_code_that_it_names(tmp_path):
    utils = module(tmp_path, UTILS)
    one = {"process_results": utils.score, "metric_list": [{"metric": "acc", "aggregation": utils.score}], "repeats": 1}
    before = identity.task_identity(task(**one))
    assert identity.task_identity(task(**one, dataset_path="/elsewhere", dataset_kwargs={})) == before
    assert identity.task_identity(task(**{**one, "repeats": 2})) != before
    assert identity.task_identity(task(**{**one, "process_results": score})) != before
    (tmp_path / "utils.py").write_text("# a comment\n" + UTILS)
    assert identity.task_identity(task(**one)) == before
    for how in (utils.score, functools.partial(utils.score, 1)):
        (tmp_path / "utils.py").write_text(UTILS)
        before = identity.task_identity(task(metric_list=[{"metric": how}]))
        (tmp_path / "utils.py").write_text(UTILS.replace("HELP = 1", "HELP = 2"))
        assert identity.task_identity(task(metric_list=[{"metric": how}])) != before


def test_a_bundled_task_is_also_the_class_that_reads_it(monkeypatch):
    from lmms_eval_plugins.tasks.official import OfficialTask

    own = OfficialTask.__new__(OfficialTask)
    own._config = SimpleNamespace(task="t")
    looked_at = []
    monkeypatch.setattr(identity, "code_identity", lambda *files: looked_at.extend(files) or "")
    identity.task_identity(own)
    assert [file.name for file in looked_at] == ["official.py"]


# -- all of it


def fingerprint(cell=None, data=(), tasks=(), **arguments):
    cell = cell or Cell("t", "tiny", "snapkv", 0.2)
    arguments = ModelArguments(**{"pretrained": "tiny", **arguments})
    return identity.fingerprint(cell, arguments, {"window_size": 32}, dict(data), dict(tasks))


def test_data_tasks_and_the_files_of_arguments_are_part_of_it(tmp_path):
    before = fingerprint()
    assert fingerprint() == before
    assert fingerprint(data={"t": ["a"]}) != before
    assert fingerprint(tasks={"t": "a"}) != before
    for name in ("system_prompt", "chat_template"):
        text = tmp_path / "text"
        text.write_text("Be short.")
        before = fingerprint(**{name: str(text)})
        text.write_text("Be long!!")
        assert fingerprint(**{name: str(text)}) != before
        text.write_text("Be short.")
        assert fingerprint(**{name: str(text)}) == before


def test_a_replaced_file_of_the_model_changes_it(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("config.json", "sub/model.safetensors"):
        (tmp_path / name).write_text("{}")
        before = fingerprint(pretrained=str(tmp_path))
        (tmp_path / name).write_text("{ }")
        assert fingerprint(pretrained=str(tmp_path)) != before
