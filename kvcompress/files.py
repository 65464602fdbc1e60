"""Files that are whole or not there, also where several processes write into one folder; can one write; JSON."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: nothing tells a dead process's folder from a living one's, so none is removed
    fcntl = None

from .errors import KVCompressError

UNFINISHED = ".unfinished-"
TRIAL_BYTES = 1 << 20  # a disk with less room is full


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, for what is not finished. It is gone at the end.

    Where its process is killed, the next call for the same `folder` removes it.
    """
    remove_unfinished(folder)
    path, lock = _new_and_locked(folder)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_unfinished(folder: Path) -> None:
    """Remove what dead processes left in `folder`. A living one holds the lock of its own."""
    for path in folder.glob(UNFINISHED + "*"):
        with contextlib.suppress(OSError):  # gone meanwhile, locked, or on a file system without locks
            lock = os.open(path, os.O_RDONLY)
            try:
                if _lock(lock, wait=False):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _new_and_locked(folder: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):
                _lock(lock)
            if path.exists():
                return path, lock
            os.close(lock)
        # Between the two steps another process took it for a dead one's: once more.


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other process is inside for the same folder. On a file system without locks nothing is held back."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            _lock(lock)
        yield
    finally:
        os.close(lock)


def _lock(descriptor: int, wait: bool = True) -> bool:
    """Lock an open folder until it is closed; False where there are no locks. Raises OSError where it cannot be locked,
    without `wait` also where another holds it."""
    if fcntl is None:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write a file to; at the end the file takes the place of `path` in one rename.

    Missing folders are made. An exception inside leaves an older file as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path.parent) as folder:
        yield folder / path.name
        os.replace(folder / path.name, path)


def parse_json(text: str | bytes) -> Any:
    """What JSON says. Raises ValueError, also for bytes that are no text, and for what is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def check_output(folder: Path, *names: str) -> None:
    """Try to write into `folder`, which is made where it is missing, and under each of the file names.

    Raises KVCompressError, one line, where that fails: a file stands in the way, the folder is read-only, a name is too
    long, the disk is full. To be called before hours of work.
    """
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished(folder) as draft:
            _write_trial(draft / "trial")
            for path in [folder / name for name in names]:
                _write_trial(draft / path.name)
                if path.is_dir():
                    raise IsADirectoryError(None, "Is a directory")
    except OSError as error:
        raise KVCompressError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None


def _write_trial(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(bytes(TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())  # a full disk may say so only now
    path.unlink()
