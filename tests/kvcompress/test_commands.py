"""`python -m kvcompress COMMAND`: the package's own commands, and those that others register."""

import argparse
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints, distribution
from pathlib import Path

import pytest

import kvcompress
from kvcompress import KVCompressError, __main__
from kvcompress.command_line import SCRIPTS_FOLDER, Parser, called
from kvcompress.policy.make import make_policy
from lmms_eval_plugins.model.input_methods import INPUT_METHODS

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def parser() -> argparse.ArgumentParser:
    this = Parser("hello")
    this.add_argument("--to-whom")
    return this


def hello(arguments: list[str]) -> None:
    if not arguments:
        raise KVCompressError("hello whom?")
    print("hello", *arguments)


@pytest.fixture
def registered(monkeypatch):
    """A command `hello` of another package."""
    entry = EntryPoint("hello", f"{__name__}:hello", __main__.GROUP)
    monkeypatch.setattr(__main__, "registered", lambda: EntryPoints([entry]))


def test_a_registered_command_gets_its_arguments_and_its_error_is_one_line(registered, capsys):
    assert __main__.main(["hello", "you", "--there"]) == 0
    assert capsys.readouterr().out == "hello you --there\n"
    assert __main__.main(["hello"]) == 2
    assert capsys.readouterr().err == "error: hello whom?\n"


def test_help_has_a_line_for_own_and_registered_commands(registered, capsys):
    assert __main__.main(["--help"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    own = ["bench", "calibrate", "check", "export", "hello", "list", "serve", "speech", "train"]
    assert [name for name, _ in lines] == own
    assert dict(lines)["hello"] == "the package's own commands, and those that others register"


def test_no_command_says_how_to_begin(capsys):
    assert __main__.main([]) == 0
    assert "To begin:\n  kvcompress list methods " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("kvcompress ca", "calibrate "),
        ("kvcompress bench --larg", "--largest-batch "),
        ("kvcompress list me", "methods "),
    ],
)
def test_the_shell_completes_commands_and_their_flags(tmp_path, line, found):
    """As bash asks: what is on the line, and where the cursor is; the answers go to a file."""
    answers = tmp_path / "answers"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answers),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-m", "kvcompress"], env={**os.environ, **asked}, check=True)
    assert answers.read_text(encoding="utf-8").split("\n") == [found]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_a_full_disk_does_not_take_is_one_line():
    with open("/dev/full", "w") as full:
        listing = subprocess.run(
            [sys.executable, "-m", "kvcompress", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (listing.returncode, listing.stderr) == (
        1,
        "error: a file cannot be written or read: No space left on device\n",
    )


def test_a_reader_who_has_enough_ends_a_command_in_silence():
    listing = subprocess.Popen(
        [sys.executable, "-m", "kvcompress", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    listing.stdout.close()  # as `head` does
    assert listing.wait(60) == 141
    assert listing.stderr.read() == b""


@pytest.mark.parametrize(
    ("program", "scripts", "command", "name"),
    [
        ("/usr/bin/kvcompress", None, "heatmap", "kvcompress heatmap"),
        ("/usr/bin/kvcompress", None, "eval", "kvcompress eval"),
        ("/x/kvcompress/__main__.py", None, "eval", "python -m kvcompress eval"),
        ("/x/lmms_eval_plugins/evaluate.py", "./scripts", "eval", "./scripts/run_eval.sh"),
        ("/x/lmms_eval_plugins/evaluate.py", "./scripts", "list", "./scripts/run_eval.sh list"),
        ("/x/lmms_eval_plugins/evaluate.py", "./scripts", "heatmap", "python -m kvcompress heatmap"),
    ],
)
def test_a_command_is_named_as_it_is_called(monkeypatch, program, scripts, command, name):
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.delenv(SCRIPTS_FOLDER, raising=False)
    if scripts:
        monkeypatch.setenv(SCRIPTS_FOLDER, scripts)
    assert called(command) == name
    assert Parser(command).prog == name


def test_every_command_says_the_version(capsys):
    for name in __main__.commands():
        with pytest.raises(SystemExit):
            __main__.module_of(name).parser().parse_args(["--version"])
        assert capsys.readouterr().out == f"kvcompress {kvcompress.__version__}\n"


def test_what_is_not_installed_is_named_with_what_installs_it(monkeypatch, capsys):
    def missing(arguments):
        raise ModuleNotFoundError("No module named 'lmms_eval'", name="lmms_eval")

    monkeypatch.setattr(__main__, "find_command", lambda name: missing)
    assert __main__.main(["eval"]) == 1
    assert capsys.readouterr().err == (
        "error: lmms_eval is not installed; everything that commands need comes with: pip install 'kvcompress[eval]'\n"
    )


def test_an_unknown_command_is_one_line_with_the_valid_ones(registered, capsys):
    assert __main__.main(["helo"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: there is no command 'helo' (did you mean 'hello'?); valid: bench, calibrate, check, ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve some/model snapkv 0.2 ratio=0.3", "'ratio=0.3' is not an option: RATIO sets it"),
        (
            "export snapkv 0.2 --engine openvino --tokens 999 method=h2o",
            "'method=h2o' is not an option: METHOD sets it",
        ),
        ("calibrate some/model --method q-filters --text x --out x method=h2o", "'method=h2o' is not an option"),
    ],
)
def test_what_a_word_of_the_command_sets_is_no_option(words, message, capsys):
    assert __main__.main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_every_command_that_this_project_registers_is_there():
    import tomllib

    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    commands = project["entry-points"][__main__.GROUP]
    assert set(commands) == {
        *("bench", "calibrate", "eval", "heatmap", "leaderboard", "list", "long-pack"),
        *("metrics", "report", "reproduce", "serve", "show", "sweep", "table"),
    }
    for name, value in commands.items():
        function = EntryPoint(name, value, __main__.GROUP).load()
        assert callable(function)
        assert isinstance(sys.modules[function.__module__].parser(), Parser)


def test_methods_lists_those_with_the_word(capsys):
    assert __main__.main(["list", "methods"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(kvcompress.list_methods()) + len(INPUT_METHODS)
    assert __main__.main(["list", "methods", "SnapKV"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 0 < len(lines) < len(kvcompress.list_methods())
    assert all("snapkv" in line.lower() for line in lines)
    assert __main__.main(["list", "methods", "nonesuch"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_each_method_is_listed_with_a_whole_sentence(capsys):
    assert __main__.main(["list", "methods"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert line.endswith("."), line
        assert line.count("(") == line.count(")"), line


def test_a_method_may_be_written_with_capitals_and_underscores():
    assert make_policy("Expected_Attention", 0.5).method == "expected-attention"


def test_the_version_is_the_packages(capsys):
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvcompress {kvcompress.__version__}\n"
    assert distribution("kvcompress").version == kvcompress.__version__
