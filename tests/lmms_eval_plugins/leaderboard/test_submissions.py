"""An archive that somebody else made: what is wrong with it is one line that names it, and nothing lands elsewhere."""

import io
import tarfile

import pytest

from lmms_eval_plugins.leaderboard.command import main

SYMLINK = {"type": tarfile.SYMTYPE, "linkname": "/etc"}


@pytest.mark.parametrize(
    "member",
    [
        {"name": "../outside"},
        {"name": "link", **SYMLINK},
        {"name": "a", "pax_headers": {"path": "a\0b"}},
        {"name": "a", "mtime": 2**80},
        {"name": "a", "pax_headers": {"mtime": "nan"}},
        {"name": "/".join(["a"] * 2000)},
        {"name": "tables.json"},
        {"name": "task/model/cell/results.json"},
    ],
    ids=lambda member: " ".join(member),
)
def test_what_is_wrong_with_an_archive_is_one_line_that_names_it(tmp_path, capsys, member):
    path = tmp_path / "folder" / "mine.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        file = tarfile.TarInfo()
        for name, value in {**member, "size": 0 if "type" in member else 2}.items():
            setattr(file, name, value)
        archive.addfile(file, io.BytesIO(b"{}"))
    assert main([str(path), "--out", str(tmp_path / "out" / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(path) in line
    assert [each.name for each in tmp_path.iterdir() if each.name not in ("folder", "out")] == []
