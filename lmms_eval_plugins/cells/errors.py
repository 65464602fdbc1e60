"""Errors that end a command with one line and an exit code. Imports nothing heavy."""

import sys

from kvcompress.errors import KVCompressError


class UsageError(KVCompressError):
    """Bad input to a command. The message is one line that names the value and what is allowed."""


class DamagedFile(UsageError):
    """A file's content is damaged or unusable. The message names the file."""


class EvaluationFailed(RuntimeError):
    """The input is fine, but there are no results. The message is one line and says what to do."""

    exit_code = 1


def leave_out(what: object, reason: object) -> None:
    """Print that something is left out, and why."""
    print(f"left out: {what}: {reason}", file=sys.stderr, flush=True)
