"""Files are whole or not there, whoever else writes; a folder that cannot be written is one line."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from kvcompress import KVCompressError, files
from kvcompress.command_line import exit_code
from kvcompress.learned.checkpoints import save_fastkvzip, save_kvzap
from kvcompress.train import samples


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_at_the_end_or_stays(tmp_path):
    path = tmp_path / "new" / "a.txt"
    files.write_text(path, "old")

    def failing():
        with files.replacing(path) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing()
    assert (names(path.parent), path.read_text()) == (["a.txt"], "old")
    with files.replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert (names(path.parent), path.read_text()) == (["a.txt"], "new")


def test_a_file_may_be_read_by_whom_the_umask_lets(tmp_path):
    (tmp_path / "plain").touch()
    files.write_text(tmp_path / "a", "")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    texts, errors = [str(writer) * 10_000 for writer in range(4)], []

    def write(text):
        try:
            for _ in range(50):
                files.write_text(tmp_path / "a", text)
        except OSError as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not (tmp_path / "a").exists() or (tmp_path / "a").read_text() in texts
    assert not errors
    assert names(tmp_path) == ["a"]


# Imports the module alone: the package takes seconds.
CHILD = """
import importlib.util, sys, time, types
from pathlib import Path
sys.modules["kvcompress"] = package = types.ModuleType("kvcompress")
package.__path__ = [str(Path(sys.argv[1]).parent)]
import kvcompress.files as files
with files.unfinished(Path(sys.argv[2])) as folder:
    (folder / "half").touch()
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def child(folder):
    command = [sys.executable, "-c", CHILD, files.__file__, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path):
    killed, _ = child(tmp_path)
    living, kept = child(tmp_path)
    killed.kill()
    killed.wait()
    (tmp_path / ".unfinished-older").mkdir()
    files.write_text(tmp_path / "a", "")
    assert names(tmp_path) == [kept, "a"]
    assert names(tmp_path / kept) == ["half"]
    living.communicate("")
    assert names(tmp_path) == ["a"]


def test_a_folder_that_was_taken_for_a_dead_ones_is_made_anew(tmp_path, monkeypatch):
    made, original = [], tempfile.mkdtemp

    def mkdtemp(**settings):
        made.append(original(**settings))
        if len(made) == 1:
            files.remove_unfinished(tmp_path)  # by another process, before the lock
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with files.unfinished(tmp_path) as folder:
        assert [str(folder)] == made[1:]
        assert folder.is_dir()


def test_one_at_a_time_is_inside_a_locked_folder(tmp_path):
    inside, most = [], []

    def enter():
        for _ in range(20):
            with files.locked(tmp_path):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1


def test_a_file_system_without_locks_is_written_and_nothing_is_taken_from_others(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    (tmp_path / ".unfinished-another").mkdir()
    with files.locked(tmp_path):
        files.write_text(tmp_path / "a", "")
    assert names(tmp_path) == [".unfinished-another", "a"]


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path):
    files.check_output(tmp_path / "a" / "b", "one.md", "two.md")
    assert names(tmp_path / "a" / "b") == []


@pytest.mark.parametrize(
    ("folder", "name", "message"),
    [
        ("file", "x", "'{}/file' cannot be written: File exists"),
        ("file/sub", "x", "'{}/file/sub' cannot be written: Not a directory"),
        ("n" * 300, "x", "cannot be written: File name too long"),
        (".", "n" * 300, "cannot be written: File name too long"),
        (".", "folder", "'{}/folder' cannot be written: Is a directory"),
    ],
)
def test_what_is_in_the_way_is_named_in_one_line(tmp_path, folder, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(KVCompressError) as error:
        files.check_output(tmp_path / folder, name)
    assert message.format(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["file", "folder"]


def fails(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("module", "call"), [(tempfile, "mkdtemp"), (os, "fsync"), (Path, "mkdir")])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_one_line(tmp_path, monkeypatch, module, call, number):
    monkeypatch.setattr(module, call, fails(number))
    with pytest.raises(KVCompressError) as error:
        files.check_output(tmp_path)
    assert str(error.value) == f"{str(tmp_path)!r} cannot be written: {os.strerror(number)}"
    monkeypatch.undo()
    assert names(tmp_path) == []


def test_a_disk_that_becomes_full_is_named_by_the_file_that_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", fails(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as error:
        files.write_text(tmp_path / "a.txt", "new")
    assert error.value.filename == str(tmp_path / "a.txt")


@pytest.fixture
def small_disk():
    """A disk that takes no file of more than 10 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


LARGE = torch.ones(100, 100)


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize(
    "write",
    [
        lambda path: files.write_text(path, "a" * 20_000),
        lambda path: files.write_torch(path, LARGE),
        lambda path: save_fastkvzip([{"b": LARGE}], path),
        lambda path: save_kvzap([{"weight": LARGE, "bias": torch.ones(100)}], path),
        lambda path: samples._save(samples.Samples(LARGE[None], torch.ones(1, 1, 100)), path),
    ],
    ids=["text", "torch", "fastkvzip", "kvzap", "samples"],
)
def test_a_disk_that_becomes_full_is_one_line_that_names_the_file(tmp_path, capfd, write):
    path = tmp_path / "a"
    assert exit_code(lambda _: write(path), []) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"error: {path} cannot be written or read: File too large"
    assert names(tmp_path) == []
