"""Atomic file writes, also with several processes in one folder; checks that a folder is writable; JSON."""

import contextlib
import io
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
except ImportError:  # Windows: a dead process's folder looks like a living one's, so none is removed
    fcntl = None

from .errors import KVCompressError

UNFINISHED = ".unfinished-"
TRIAL_BYTES = 1 << 20  # a disk with less room is full


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Create a temporary folder in `folder` for unfinished files, and remove it at the end.

    If the process is killed, the next call for the same `folder` removes it.
    """
    remove_unfinished(folder)
    path, lock = _new_and_locked(folder)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_unfinished(folder: Path) -> None:
    """Remove temporary folders that dead processes left in `folder`. A living process holds a lock on its own."""
    for path in folder.glob(UNFINISHED + "*"):
        with contextlib.suppress(OSError):  # already gone, locked, or on a file system without locks
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
        # Another process removed the folder before it was locked: try again.


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder. On a file system without locks this has no effect."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            _lock(lock)
        yield
    finally:
        os.close(lock)


def _lock(descriptor: int, wait: bool = True) -> bool:
    """Lock an open folder until it is closed; return False if there are no locks.

    Raises OSError if it cannot be locked or, without `wait`, if another process holds the lock."""
    if fcntl is None:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to; at the end the file replaces `path` in one rename.

    Missing folders are created. An exception inside leaves an existing file unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path.parent) as folder:
        try:
            yield folder / path.name
        except OSError as error:
            error.filename = error.filename or str(path)  # that of a full disk names no file
            raise
        os.replace(folder / path.name, path)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for bytes that are not text and for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_torch(path: Path, content: Any) -> None:
    """Write a file of `torch.save` atomically. It goes through memory: of a full disk torch itself says only that a
    position is unexpected."""
    import torch

    made = io.BytesIO()
    torch.save(content, made)
    with replacing(path) as draft:
        draft.write_bytes(made.getbuffer())


def check_output(folder: Path, *names: str) -> None:
    """Check that `folder`, created if missing, and each of the file names in it can be written.

    Call this before hours of work. Raises KVCompressError if a file is in the way, the folder is read-only, a name is
    too long or the disk is full.
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


def check_not_read(out: Path, flag: str, given: Path | None) -> None:
    """Raise KVCompressError if writing `out` would overwrite the file that a flag gave to read."""
    if given is not None and out.exists() and given.exists() and out.samefile(given):
        raise KVCompressError(f"--out {str(out)!r} would overwrite the file of {flag}")


def _write_trial(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(bytes(TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())  # a full disk may fail only here
    path.unlink()
