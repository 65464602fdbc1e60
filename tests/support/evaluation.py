"""The words of an evaluation that is over in seconds, and what a command says where it fails."""

import pytest

FOUR = ["tiny_textvqa", "tiny", "snapkv", "0.2"]


def error_line(capsys: pytest.CaptureFixture) -> str:
    """The last line of stderr."""
    return capsys.readouterr().err.strip().splitlines()[-1]
