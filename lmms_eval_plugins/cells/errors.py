"""What ends a command with one line, and its exit code. Imports nothing heavy."""

import sys

from kvcompress.errors import KVCompressError


class UsageError(KVCompressError):
    """Bad input of a command. The message is one line that names the value and what is allowed."""


class DamagedFile(UsageError):
    """A file does not hold what was written, or what is asked of it. The message names it."""


class EvaluationFailed(RuntimeError):
    """The input is fine, but there are no results. The message is one line and says what to do."""

    exit_code = 1


def leave_out(what: object, reason: object) -> None:
    """Say that something is not looked at, and why."""
    print(f"left out: {what}: {reason}", file=sys.stderr, flush=True)
