"""Open submissions: results folders, or tar archives of them."""

import argparse
import contextlib
import lzma
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvcompress.errors import KVCompressError, one_line
from kvcompress.flag_types import shown

from ..cells.errors import UsageError

# What unpacking a damaged archive raises; of times or names that no file can have the last three.
UNPACKING = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError)
UNPACKING += (ValueError, OverflowError, RecursionError)


def submission(text: str) -> Path:
    """Return an existing folder or tar archive as an absolute path; a type for argparse."""
    path = Path(text)
    with contextlib.suppress(OSError, ValueError):
        if text.strip() and (path.is_dir() or (path.is_file() and tarfile.is_tarfile(path))):
            return path.resolve()
    raise argparse.ArgumentTypeError(f"{shown(text)} is neither a folder with results nor a tar archive of one")


def name_of(path: Path) -> str:
    """Return `mine` for the folder `mine` or `mine.tar.xz`; for a folder `results`, `parent/results`."""
    name = path.name if path.is_dir() else path.name.partition(".tar")[0]
    return f"{path.parent.name}/{name}" if name == "results" else name


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield a submission's folder; an archive is unpacked into a temporary one, whose name no error shows."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")  # only plain files, none outside the folder
        except UNPACKING as error:
            raise UsageError(f"{str(path)!r} cannot be unpacked: {one_line(error)}") from None
        try:
            yield Path(folder)
        except KVCompressError as error:
            raise UsageError(str(error).replace(folder, str(path))) from None
