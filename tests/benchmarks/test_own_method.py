"""The search for a method of our own: halves are disjoint, and a recipe is a published method with other parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import own_method
from benchmarks.method_cells import BY_RATIO, Answers, cells_of, compute
from benchmarks.method_tasks import QUERY_AWARE
from benchmarks.own_method import Halves, ablations, changes, difference, half, held_out, later, published, search
from kvcompress.layer_budgets import list_layer_budgets


@pytest.fixture
def even(task, monkeypatch):
    """The only task there is."""
    monkeypatch.setattr(own_method, "TASKS", {"even": lambda questions: replace(task, questions=questions)})
    return task


def numbered(questions, size):
    """A task whose inputs say which questions were asked for."""
    return own_method.Task(
        name="numbered",
        title="",
        identity="",
        model=None,
        questions=questions,
        batch_size=size,
        new_tokens=1,
        inputs=lambda batch: {"places": torch.arange(batch.start, batch.stop)},
        right=lambda batch, new: list(range(batch.start, batch.stop)),
        protocols=(QUERY_AWARE,),
        has_images=False,
    )


@pytest.mark.parametrize(("questions", "size", "asked"), [(8, 2, 8), (10, 2, 8), (100, 20, 80), (6, 3, 6)])
def test_halves_are_disjoint_and_of_one_size(questions, size, asked):
    places = []
    for number in (0, 1):
        part = half(numbered(questions, size), number)
        assert part.questions == asked // 2
        for start in range(0, part.questions, size):
            batch = slice(start, start + size)
            places += (found := part.inputs(batch)["places"].tolist())
            assert found == part.right(batch, None)
    assert sorted(places) == list(range(asked))


def test_what_comes_later_is_in_no_half():
    part = later(numbered(10, 2), 6)
    places = [part.inputs(slice(start, start + 2))["places"].tolist() for start in range(0, part.questions, 2)]
    assert places == [[6, 7], [8, 9]]
    assert part.right(slice(2, 4), None) == [8, 9]


def test_the_recipe_is_confirmed_on_questions_that_no_half_had(even, tmp_path, monkeypatch):
    monkeypatch.setattr(own_method, "HELD_OUT", {"even": 2})
    monkeypatch.setattr(own_method, "CONFIRMED", {"even": (4, ["tova"])})
    whole = Answers(tmp_path / "whole.json", even.identity)
    methods = ("knorm", "tova", own_method.FIRST)
    compute(even, cells_of(replace(even, protocols=(QUERY_AWARE,)), list(methods)), whole)
    known = {
        method: np.stack([whole.of(cell, 4) for cell in cells_of(replace(even, protocols=(QUERY_AWARE,)), [method])])
        for method in methods
    }
    last = own_method.confirm(tmp_path, {"method": "knorm"}).splitlines()[-1]
    means = [f"{100 * known[method][:, 2:].mean():.1f}" for method in methods]
    assert last.startswith(f"| `even` | 2 | {means[0]} | tova {means[1]} | ")
    assert last.split(" | ")[5] == means[2]


def test_less_than_two_batches_have_no_halves():
    with pytest.raises(ValueError, match="3 questions are fewer than two batches of 2"):
        half(numbered(3, 2), 0)


def test_published_answers_are_those_of_the_half_and_of_what_random_answered(even, tmp_path):
    answers = Answers(tmp_path / "method_table_even.json", even.identity)
    for cell in cells_of(even, ["random", "knorm", "tova"]):
        answers.add(cell, [True, True, False, cell.method == "tova"])
    for cell in cells_of(even, ["keydiff"]):
        answers.add(cell, [False, True])
    found = [published("even", tmp_path, number, 4) for number in (0, 1)]
    assert found[0]["keydiff"].tolist() == [[0, 1]] * len(BY_RATIO)
    assert found[0]["knorm"].tolist() == [[1, 1]] * len(BY_RATIO)
    assert found[1]["tova"].tolist() == [[0, 1]] * len(BY_RATIO)
    assert found[1].keys() == {"random", "knorm", "tova"}


def answered_with(known, questions=40):
    """A stand-in for `Halves.all_right`: so many questions, of which `known` says how many a recipe answers rightly."""

    def all_right(self, tried):
        return [[(np.arange(questions) < known(recipe)).astype(float)[None]] for recipe in tried]

    return all_right


@pytest.mark.usefixtures("even")
def test_the_search_takes_what_is_better_by_more_than_its_interval_and_writes_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(own_method, "PARTS", ("kernel_size", "head_budget", "safeguard"))
    known = {("uniform", 5): 10, ("uniform", 3): 12, ("uniform", 9): 30, ("adaptive", 9): 39}
    monkeypatch.setattr(
        Halves, "all_right", answered_with(lambda it: known.get((it["head_budget"], it["kernel_size"]), 0))
    )
    asked = Halves({"even": 4}, 0, tmp_path)
    recipe = search(asked, asked, "snapkv", [], tmp_path / "steps.json")
    assert recipe == {
        "method": "snapkv", "layer_budget": "uniform", "pooling": "avg", "kernel_size": 9, "head_budget": "adaptive",
    }  # fmt: skip
    steps = own_method.json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [step["part"] for step in steps].count("safeguard") == 4, "the recipe so far, and three values"


@pytest.mark.usefixtures("even")
def test_the_search_leaves_what_is_better_by_less(tmp_path, monkeypatch):
    monkeypatch.setattr(own_method, "PARTS", ("kernel_size",))
    monkeypatch.setattr(Halves, "all_right", answered_with(lambda it: 11 if it["kernel_size"] == 9 else 10))
    asked = Halves({"even": 4}, 0, tmp_path)
    assert search(asked, asked, "snapkv", [], tmp_path / "steps.json")["kernel_size"] == 5


@pytest.mark.usefixtures("even")
def test_what_a_task_refuses_is_not_taken(tmp_path):
    asked = Halves({"even": 4}, 1, tmp_path)
    assert asked.all_right([{"method": "dycoke"}]) == [None]
    assert asked.all_right([{"method": "q-filters", "calibrated": True}]) == [None], "no calibration of this model"


def test_processes_answer_as_one_does(task, tmp_path, monkeypatch):
    makers = {"even": lambda questions: task, "odd": lambda questions: replace(task, name="odd")}
    monkeypatch.setattr(own_method, "TASKS", makers)
    folders = [tmp_path / "one", tmp_path / "two"]
    found = []
    for folder, processes in zip(folders, (0, 2), strict=True):
        folder.mkdir()
        asked = Halves({"even": 4, "odd": 4}, 1, folder, processes=processes)
        found.append(asked.all_right([{"method": "knorm"}, {"method": "tova"}]))
    for one, two in zip(*found, strict=True):
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(one, two, strict=True))


@pytest.mark.usefixtures("even")
def test_only_the_schedules_protocol_has_an_interval(tmp_path):
    recipe = {"method": "snapkv", "decode_interval": 4}

    def intervals(protocol, recipe):
        cells = Halves({"even": 4}, 1, tmp_path, protocol)._cells("even", recipe)
        return {cell.options.get("decode_interval") for cell in cells}

    assert intervals(QUERY_AWARE, recipe) == {None}
    assert intervals(own_method.BUDGETS, recipe) == {4}
    assert intervals(own_method.BUDGETS, {"method": "snapkv"}) == {own_method.INTERVAL}


def test_a_recipe_is_answered_on_its_half(even, tmp_path):
    whole = Answers(tmp_path / "whole.json", even.identity)
    cells = cells_of(replace(even, protocols=(QUERY_AWARE,)), ["knorm"])
    compute(even, cells, whole)
    asked = Halves({"even": 4}, 1, tmp_path)
    right = asked.right("even", {"method": "knorm"})
    assert np.array_equal(right, np.stack([whole.of(cell, 4) for cell in cells])[:, 2:])
    assert asked.right("even", {"method": "knorm", "kernel_size": 3}) is None
    assert own_method.score(asked.all_right([{"method": "knorm"}])[0]) == 100 * right.mean()


def test_a_recipe_has_the_tables_window_unless_it_names_another(task, tmp_path, monkeypatch):
    monkeypatch.setitem(own_method.TASKS, "even", lambda questions: replace(task, window_size=3))
    asked = Halves({"even": 4}, 1, tmp_path)

    def windows(recipe):
        return {cell.options.get("window_size") for cell in asked._cells("even", recipe)}

    assert windows({"method": "snapkv"}) == {3}
    assert windows({"method": "adamixkv"}) == {3}, "its own is 4"
    assert windows({"method": "snapkv", "window_size": 2}) == {2}


def test_a_window_shorter_than_the_tables_stays(task):
    assert {"window_size": 8} in [cell.options for cell in cells_of(replace(task, window_size=8), ["snapkv"])]
    assert all(cell.options == {} for cell in cells_of(replace(task, window_size=8), ["adamixkv"]))


def test_held_out_compares_with_the_best_of_the_other_half(even, tmp_path, monkeypatch):
    monkeypatch.setattr(own_method, "HELD_OUT", {"even": 4})
    monkeypatch.setattr(own_method, "SEARCHED", {"even": 4})
    monkeypatch.setattr(own_method, "COMPETITORS", 1)
    answers = Answers(tmp_path / "method_table_even.json", even.identity)
    for cell in cells_of(even, ["random", "knorm", "tova", own_method.FIRST]):  # the last is our own: no rival
        of_first = [cell.method in ("tova", own_method.FIRST), cell.method == own_method.FIRST]
        answers.add(cell, of_first + [cell.method == "knorm"] * 2)
    page = held_out(tmp_path, {"method": "snapkv", "kernel_size": 3})
    own, rival = (Halves({"even": 4}, 1, tmp_path).right("even", {"method": one}) for one in ("snapkv", "tova"))
    assert f"| `even` | 2 | {100 * own.mean():.1f} | tova {100 * rival.mean():.1f} |" in page
    assert f"| mean of those searched |  | {100 * own.mean():.1f} | tova {100 * rival.mean():.1f} |" in page
    assert "| task | kernel_size |" in page


def test_each_part_of_a_recipe_that_is_not_its_methods_own_is_taken_back_alone():
    recipe = {"method": "adakv", "scorer": "mixkv", "head_budget": "adaptive", "kernel_size": 3, "variant": "paper"}
    assert ablations(recipe) == {
        "scorer": {"method": "adakv", "head_budget": "adaptive", "kernel_size": 3, "variant": "paper"},
        "kernel_size": {"method": "adakv", "scorer": "mixkv", "head_budget": "adaptive", "variant": "paper"},
    }


def test_other_scores_bring_the_recipes_parts_that_they_know():
    recipe = {"method": "adakv", "head_budget": "adaptive", "kernel_size": 7}
    found = list(changes(recipe, "scorer", ["adakv", "mixkv", "knorm"]))
    assert found == [
        {"method": "adakv", "head_budget": "adaptive", "kernel_size": 7, "scorer": "mixkv"},
        {"method": "adakv", "head_budget": "adaptive", "scorer": "knorm"},
    ]


def test_parts_that_a_method_lacks_are_not_changed():
    def values(recipe, part):
        return [change[part] for change in changes(recipe, part, [])]

    assert values({"method": "knorm"}, "kernel_size") == []
    assert values({"method": "snapkv"}, "kernel_size") == [5, 7, 9, 13]
    assert values({"method": "snapkv", "kernel_size": 5}, "kernel_size") == [7, 9, 13]
    assert values({"method": "snapkv"}, "safeguard") == []
    assert len(values({"method": "snapkv", "head_budget": "adaptive"}, "safeguard")) == 3
    assert values({"method": "snapkv"}, "calibrated") == []
    assert values({"method": "adakv", "scorer": "mixkv"}, "calibrated") == [True]


def test_a_difference_has_the_sign_of_the_better():
    ours, theirs = np.array([[1, 1, 1, 0], [1, 1, 0, 0]]), np.array([[1, 0, 0, 0], [1, 0, 0, 0]])
    points, low, high = difference([(ours, theirs)])
    assert points == pytest.approx(37.5)
    assert low <= points <= high


def test_a_mean_difference_gives_each_task_the_same_weight():
    pairs = [(np.ones((4, 100)), np.zeros((4, 100))), (np.zeros((4, 2)), np.zeros((4, 2)))]
    assert difference(pairs) == pytest.approx((50, 50, 50))
    noisy = np.tile([1.0, 0.0], (4, 50))
    points, low, high = difference([(noisy, np.zeros((4, 100))), pairs[1]])
    assert points == pytest.approx(25)
    assert 18 < low < 22 < 28 < high < 32


def test_layers_share_the_budget_and_no_more():
    rules = list_layer_budgets()
    assert all(rules[name].is_exact for name in own_method.VALUES["layer_budget"]), "others would win any search"
