"""A submission with anything missing, edited or impossible is refused, in one line for each problem."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from kvcompress import list_methods
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.cells.results import dumps
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.leaderboard import checks, plausible
from lmms_eval_plugins.leaderboard.checks import problems
from lmms_eval_plugins.leaderboard.command import main
from lmms_eval_plugins.leaderboard.tables import FILE
from lmms_eval_plugins.model.input_methods import INPUT_METHODS, method_options
from tests.lmms_eval_plugins.leaderboard.conftest import ARCHIVE

TASK = "tiny_textvqa"


@pytest.fixture
def two(shipped, tmp_path):
    """The full cache and one compressed cell, in a folder of their own; the name of the latter."""
    folder = shipped / TASK / "tiny"
    (compressed,) = (path for path in folder.glob("snapkv-0.2-*") if "first_token" not in path.name)
    (full,) = (path for path in folder.glob("full-1-*") if "first_token" not in path.name)
    for cell in (compressed, full):
        shutil.copytree(cell, tmp_path / TASK / "tiny" / cell.name)
    return tmp_path / TASK / "tiny" / compressed.name


def test_what_ships_is_complete_and_plausible(shipped, capsys):
    assert problems(shipped) == []
    assert main(["--check", str(ARCHIVE), str(shipped)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "leaderboard: complete and plausible"


def edited(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def each_measurement(**values):
    def edit(sample):
        for name, value in values.items():
            sample["measurement"][name] = value(sample["measurement"][name])

    return edit


# fmt: off
OF_RESULTS = {  # how results.json is edited, and what is said
    "other option": (lambda r: r["protocol"]["options"].update(window_size=16), "fingerprint has options="),
    "other ratio": (lambda r: r["protocol"].update(ratio=0.3), "fingerprint has ratio=0.2, but its protocol ratio=0.3"),
    "changed options": (lambda r: r["protocol"].update(changed_options={}),
                        "its changed options are {}, but its options"),
    "unknown option": (lambda r: [r[part]["options"].update(colour=1) for part in ("protocol", "fingerprint")],
                       "snapkv has no option colour in this version"),
    "unknown method": (lambda r: [r[part].update(method="mine") for part in ("protocol", "fingerprint")],
                       "there is no method 'mine'"),
    "limit": (lambda r: r["config"].update(limit=8), "lmms-eval was given limit=8, but its settings have 16"),
    "no code": (lambda r: r["fingerprint"].pop("code"), "its fingerprint has no code"),
    "no fingerprint": (lambda r: r.pop("fingerprint"), "results.json has no fingerprint"),
    "no version": (lambda r: r["environment"]["versions"].pop("torch"), "the versions of torch are missing"),
    "no config": (lambda r: r["environment"].pop("config"), "its environment lacks config"),
    "predicted only": (lambda r: r["results"][TASK].clear(), "it has no score"),
    "another score": (lambda r: r["results"][TASK].update({"exact_match,none": 0.99}),
                      "exact_match of tiny_textvqa is 0.99, but the mean over its questions is "),
    "a question is missing": (lambda r: r["n-samples"][TASK].update(effective=40),
                              "16 of 40 questions of tiny_textvqa are present"),
    "another model's bytes": (lambda r: r["environment"]["config"].update(head_dim=24), "16 of 16 KV"),
    "no throughput": (lambda r: r["efficiency"].update(answers_per_s=-1), "answers_per_s is -1, not above 0"),
    "another median": (lambda r: r["efficiency"]["tpot_s"].update(median=1e-5),
                       "the median of tpot_s is given as 1e-05, but that of its questions is "),
    "odd content": (lambda r: r.update(efficiency={"a": 1}), "the median of ttft_s is given as None"),
    "odder content": (lambda r: r["protocol"].pop("options"), "not in this version's format"),
}
OF_SAMPLES = {  # how the first line of samples.jsonl is edited, and what is said
    "a score is missing": (lambda s: s.update(exact_match=None, submission=None),
                           "1 lines of tiny_textvqa have no"),
    "a question is there twice": (lambda s: s.update(doc_id=1), "15 of 16 questions of tiny_textvqa are present"),
    "another ratio": (each_measurement(realised_ratio=lambda layers: [1.1 * layer for layer in layers]),
                      "1 of 16 realised ratios do not match the request: 0.2"),
    "more bytes": (each_measurement(kv_held_bytes=lambda held: 2 * held), "1 of 16 KV bytes do not match 2 KV"),
    "fewer bytes": (each_measurement(kv_held_bytes=lambda held: held // 2), "KV bytes do not match 2 KV heads"),
    "no time": (each_measurement(ttft_s=lambda _: 0.0), "1 of 16 times are not above 0: ttft_s=0.0"),
    "no time per token": (each_measurement(tpot_s=lambda _: None), "times are not above 0: ttft_s="),
}
# fmt: on


@pytest.mark.parametrize("name", [*OF_RESULTS, *OF_SAMPLES])
def test_what_was_edited_or_lost_is_named_in_a_line(two, name, capsys):
    edit, said = (OF_RESULTS | OF_SAMPLES)[name]
    if name in OF_RESULTS:
        edited(two / "results.json", edit)
    else:
        first, *others = (two / "samples.jsonl").read_text().splitlines()
        sample = json.loads(first)
        edit(sample)
        (two / "samples.jsonl").write_text("\n".join([json.dumps(sample), *others]) + "\n")
    root = two.parents[2]
    assert main(["--check", str(root)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"{root.name}: {TASK}/tiny/") for line in lines)
    assert any(said in line and two.name in line for line in lines), lines


@pytest.mark.parametrize("method", [*list_methods(), *INPUT_METHODS])
def test_a_cell_with_every_option_at_its_default_has_changed_none(method):
    whole = {"task": "t", "model": "m", "method": method, "ratio": 0.2, "budget": None, "settings": {}}
    whole |= {"options": json.loads(dumps(method_options(method)))}
    results = {"protocol": {**whole, "changed_options": {}}, "fingerprint": {**whole, "code": 1, "data": 1, "tasks": 1}}
    assert list(checks._fingerprint(Path("t/m") / f"{method}-0.2", results, [])) == []


def test_the_folder_of_a_cell_with_an_option_of_several_numbers_is_its_own():
    ((cell, options),) = Plan.of(parse(["tiny_textvqa", "tiny", "pyramiddrop", "0.2", "steps=2,3,4"])).cells
    whole = json.loads(dumps(asdict(cell)))
    changed = whole.pop("options")
    whole["options"] = json.loads(dumps(options))
    results = {"protocol": {**whole, "changed_options": changed}}
    results["fingerprint"] = {**whole, "code": 1, "data": 1, "tasks": 1}
    assert list(checks._fingerprint(cell.folder(Path()), results, [])) == []


def test_cells_that_are_damaged_moved_alone_or_unfinished_are_named(two, capsys):
    root, full = two.parents[2], next(two.parent.glob("full-*"))
    shutil.copytree(two, two.parent / ".unfinished-x" / "new")
    two.rename(two.with_name("snapkv-0.1"))
    with open(full / "samples.jsonl", "a") as file:
        file.write("{}\n")
    found = problems(root)
    assert [any(said in line for line in found) for said in (
        "was never finished", "expected tiny_textvqa/tiny/snapkv-0.2", "samples.jsonl, line 17, is damaged: no task",
        "no cell of the full cache to compare it with",
    )] == [True] * 4  # fmt: skip
    assert len(found) == 4
    (full / "results.json").write_text("{")
    assert any("results.json is damaged" in line for line in problems(root))


def test_a_full_cache_of_other_settings_or_questions_is_none_to_compare_with(two):
    root, (full,) = two.parents[2], two.parent.glob("full-*")
    whole = (full / "samples.jsonl").read_text()
    last = json.loads(whole.splitlines()[-1])
    with (full / "samples.jsonl").open("a") as file:
        file.write(json.dumps(last | {"doc_id": 1_000_000}) + "\n")
    assert any(line.startswith(f"{TASK}/tiny/{two.name}: there is no cell of the full") for line in problems(root))
    (full / "samples.jsonl").write_text(whole)
    edited(full / "results.json", lambda results: results["protocol"]["settings"].update(device="cpu"))
    assert any(line.startswith(f"{TASK}/tiny/{two.name}: there is no cell of the full") for line in problems(root))


def test_damaged_tables_are_named_and_whole_ones_need_no_cell(tmp_path):
    (tmp_path / FILE).write_text('{"tables": []}')
    assert problems(tmp_path) == [f"no cell under {str(tmp_path)!r}: expected <task>/<model>/<cell>/results.json"]
    (tmp_path / FILE).write_text("[]")
    (line,) = problems(tmp_path)
    assert line.startswith(f"{str(tmp_path / FILE)!r} is no file of tables: ")


# -- what is possible

ROW = {"tokens_in": 100, "vision_tokens": 60, "realised_ratio": [0.2, 0.2]}
OPTIONS = {"scope": "prompt", "ratio_of": "prompt", "layer_budget": "uniform"}


@pytest.mark.parametrize(
    ("method", "size", "options", "inside", "outside"),
    [
        ("full", {"ratio": 1.0}, {}, [1.0], [0.95]),
        ("snapkv", {"ratio": 0.2}, {}, [0.2, 0.21], [0.15, 0.25]),
        ("snapkv", {"budget": 30}, {}, [0.3], [0.2]),
        ("snapkv", {"budget": 300}, {}, [1.0], [0.9]),
        ("snapkv", {"ratio": 0.5}, {"ratio_of": "vision"}, [0.7], [0.5]),
        ("snapkv", {"ratio": 0.2}, {"scope": "context"}, [0.2, 0.6], [0.1]),
        ("kvzip", {"ratio": 0.2}, {"sinks": 10, "variant": "budget"}, [0.2], [0.28]),
        ("kvzip", {"ratio": 0.2}, {"sinks": 10, "variant": "code"}, [0.28], [0.2, 0.33]),
        ("kvzip", {"budget": 20}, {"sinks": 10, "variant": "code"}, [0.2], [0.28]),
        ("kvzip", {"ratio": 0.5}, {"sinks": 10, "variant": "code", "ratio_of": "vision"}, [0.7], [0.75]),
        ("snapkv", {"ratio": 0.2}, {"scorer": "kvzip", "sinks": 10, "variant": "code"}, [0.28], [0.2]),
        ("simlayerkv", {"budget": 20}, {"layer_budget": "lazy-code"}, [0.2, 1.0], [0.1]),
        ("fastv", {"ratio": 0.2}, {"ratio_of": "vision"}, [0.5, 0.8], [0.3]),
    ],
)
def test_the_ratio_that_can_be_realised_follows_from_what_was_asked_for(method, size, options, inside, outside):
    protocol = {"method": method, "ratio": None, "budget": None, **size, "options": {**OPTIONS, **options}}
    low, high = plausible.realised_ratio(protocol, ROW)
    assert all(low <= ratio <= high for ratio in inside)
    assert not any(low <= ratio <= high for ratio in outside)


@pytest.mark.parametrize(
    ("dtype", "options", "settings", "layers", "processes", "inside", "outside"),
    [
        ("bfloat16", {}, {}, 2, 1, [10240, 11000], [9000, 20480]),
        ("float32", {}, {}, 2, 1, [20480], [10240]),
        ("bfloat16", {"cache_implementation": "quantized", "kv_bits": 4}, {}, 2, 1, [2700, 10240], [2400, 20480]),
        ("bfloat16", {"cache_implementation": "think", "key_channels": 0.5}, {}, 2, 1, [7700, 10240], [7500, 20480]),
        ("bfloat16", {"decode_budget": 8}, {}, 2, 1, [10240, 50000], [9000]),
        ("bfloat16", {}, {"gen_kwargs": {"num_beams": 3}}, 2, 1, [10240, 30720], [9000, 60000]),
        ("bfloat16", {}, {"tp_plan": "auto"}, 2, 2, [5120, 10240], [4000, 20480]),
        ("bfloat16", {}, {}, 4, 1, [10240, 50000], [9000]),
    ],
)
def test_bytes_follow_from_what_is_kept_and_the_models_config(
    dtype, options, settings, layers, processes, inside, outside
):
    """Two layers of 20 tokens, 4 KV heads of 16 numbers."""
    environment = {"dtype": dtype, "processes": processes}
    environment["config"] = {"layers": layers, "kv_heads": 4, "head_dim": 16}
    low, high = plausible.held_bytes({"options": {**OPTIONS, **options}, "settings": settings}, environment, ROW)
    assert all(low <= held <= high for held in inside)
    assert not any(low <= held <= high for held in outside)
