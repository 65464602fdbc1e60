"""`kvcompress COMMAND`: what is there, and what a wrong one says."""

from importlib.metadata import distribution

import kvcompress
from kvcompress.__main__ import main


def test_every_command_of_the_project_can_be_imported():
    points = distribution("kvcompress").entry_points
    commands = points.select(group="kvcompress.commands")
    assert {"eval", "sweep", "reproduce", "report", "show"} <= commands.names
    for point in [*commands, *points.select(group="console_scripts")]:
        assert callable(point.load())


def test_methods_lists_those_with_the_word(capsys):
    assert main(["methods"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(kvcompress.list_methods())
    assert main(["methods", "SnapKV"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 0 < len(lines) < len(kvcompress.list_methods())
    assert all("snapkv" in line.lower() for line in lines)


def test_a_word_that_no_method_has_is_one_line(capsys):
    assert main(["methods", "nonesuch"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvcompress {kvcompress.__version__}\n"
    assert distribution("kvcompress").version == kvcompress.__version__


def test_a_misspelt_command_names_those_there_are(capsys):
    assert main(["bnech"]) == 2
    assert "bench" in capsys.readouterr().err
