"""What ends a command with one line, and its exit code. Imports nothing heavy."""

import difflib
import sys
import traceback
from collections.abc import Callable, Iterable


class UsageError(ValueError):
    """Bad input. The message is one line that names the value and what is allowed."""


class EvaluationFailed(RuntimeError):
    """The input is fine, but there are no results. The message is one line and says what to do."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` where some valid name is near, else nothing."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def exit_code(command: Callable[[list[str]], None], argv: list[str] | None, kept: str) -> int:
    """Run a command: 0, 2 for bad input, 1 where something else is wrong, 130 after Ctrl-C.

    Every error ends with one line on stderr. `argv` defaults to the process's; `kept`: what outlives Ctrl-C.
    """
    try:
        command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return fail(f"interrupted; finished {kept} are kept, the same command goes on from there", 130)
    except UsageError as error:
        return fail(error, 2)
    except EvaluationFailed as error:
        return fail(error, 1)
    except Exception as error:
        from kvcompress import KVCompressError  # takes seconds, unless something imported it already

        if isinstance(error, KVCompressError):
            return fail(error, 2)
        traceback.print_exc()
        return fail(f"{type(error).__name__}: {error}", 1)
    return 0


def fail(error: object, code: int) -> int:
    """Print the error's line; returns the exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code
