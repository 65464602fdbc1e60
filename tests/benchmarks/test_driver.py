"""What benchmarks share: their flags are checked, and an interrupted run continues."""

import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import benchmarks
from benchmarks.driver import Run, speed_parser
from kvcompress import KVCompressError
from kvcompress.command_line import Parser
from tests.support.docs import ROOT
from tests.support.wrong_values import flags_with_values


def source(module):
    return (ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")


MODULES = [info.name for info in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.") if not info.ispkg]
# benchmarks.gpu parses before kvcompress can be imported; the script runs in a peer's Python.
ELSEWHERE = {"benchmarks.gpu.__main__", "benchmarks.fidelity_kvpress"}
BENCHMARKS = [name for name in MODULES if name not in ELSEWHERE and "def main(" in source(name)]


class Declared(BaseException):
    """A benchmark's parser; not an Exception, so that nothing handles it as a failure."""


def told(cell):
    """Stands for a measurement."""
    return [{"cell": cell, "half": half} for half in (0, 1)]


@pytest.fixture
def run(tmp_path):
    def begin(*words):
        return Run(speed_parser("nothing", "Measures nothing."), [*words, "--out", str(tmp_path / "out")])

    return begin


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_flag_of_every_benchmark_declares_what_it_may_be(name, monkeypatch):
    def declared(parser, words):
        raise Declared(parser)

    monkeypatch.setattr(Parser, "parse_args", declared)
    with pytest.raises(Declared) as made:
        importlib.import_module(name).main([])
    (parser,) = made.value.args
    assert parser.prog == f"python -m {name}"
    for action in flags_with_values(parser):
        assert action.choices is not None or action.type not in (None, int, float, str), action.dest


def test_a_run_that_was_cut_goes_on_with_the_cells_that_are_missing(run, tmp_path):
    run().measure([{"cell": 1}], told)
    again, asked = run("--resume"), []
    again.measure([{"cell": 1}, {"cell": 2}], lambda cell: asked.append(cell) or told(cell))
    assert asked == [2]
    assert [record["cell"] for record in again.records] == [1, 1, 2, 2]
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["records"] == again.records
    assert stored["settings"]["dtype"] == "float32"


def test_a_run_without_resume_measures_anew(run):
    run().measure([{"cell": 1}], told)
    again, asked = run(), []
    again.measure([{"cell": 1}], lambda cell: asked.append(cell) or told(cell))
    assert asked == [1]


def test_a_run_goes_on_with_its_own_settings_only(run):
    run().measure([{"cell": 1}], told)
    with pytest.raises(KVCompressError, match="cannot be resumed: it was made with dtype='float32', not 'bfloat16'"):
        run("--resume", "--dtype", "bfloat16")


def test_a_page_has_the_command_and_where_it_was_made(run, tmp_path, capsys):
    run("--clock", "cpu").report("Nothing", "Some words.")
    text = (tmp_path / "out.md").read_text()
    assert text.startswith(
        f"# Nothing\n\n`python -m benchmarks.nothing --clock cpu --out {tmp_path}/out`\n\nSome words."
    )
    assert text.splitlines()[-1].startswith("Made on date ")
    assert capsys.readouterr().out.strip() == text.strip()
