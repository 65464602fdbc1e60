"""`python -m kvcompress COMMAND`: the package's own commands, and those that others register."""

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kvcompress import KVCompressError, __main__

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def hello(arguments: list[str]) -> None:
    if not arguments:
        raise KVCompressError("hello whom?")
    print("hello", *arguments)


@pytest.fixture
def registered(monkeypatch):
    """A command `hello` of another package."""
    entry = EntryPoint("hello", f"{__name__}:hello", __main__.GROUP)
    monkeypatch.setattr(__main__, "entry_points", lambda group: EntryPoints([entry]).select(group=group))


def test_a_registered_command_gets_its_arguments(registered, capsys):
    assert __main__.main(["hello", "you", "--there"]) == 0
    assert capsys.readouterr().out == "hello you --there\n"


def test_its_error_is_one_line(registered, capsys):
    assert __main__.main(["hello"]) == 2
    assert capsys.readouterr().err == "error: hello whom?\n"


def test_help_lists_own_and_registered_commands(registered, capsys):
    assert __main__.main([]) == 0
    assert "{bench,calibrate,hello,speech}" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_with_the_valid_ones(registered, capsys):
    assert __main__.main(["helo"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: there is no command 'helo' (did you mean 'hello'?); valid: bench, calibrate, hello, ")
    assert "pip install -e ." in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_every_command_that_this_project_registers_is_there():
    import tomllib

    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    commands = project["entry-points"][__main__.GROUP]
    assert set(commands) == {"report", "show"}
    for name, value in commands.items():
        assert callable(EntryPoint(name, value, __main__.GROUP).load())
