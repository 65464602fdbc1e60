"""What ends a command with one line, and its exit code. Imports nothing heavy."""

import difflib
import re
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


def exit_code(command: Callable[[list[str]], int | None], argv: list[str] | None, kept: str) -> int:
    """Run a command: what it returns or 0, 2 for bad input, 1 where something else is wrong, 130 after Ctrl-C.

    Every error ends with one line on stderr. `argv` defaults to the process's; `kept`: what outlives Ctrl-C.
    """
    try:
        return command(sys.argv[1:] if argv is None else argv) or 0
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


def fail(error: object, code: int) -> int:
    """Print the error's line, control characters spelt out and endless words cut; returns the exit code."""
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(error))
    line = re.sub(r"\S{500,}", lambda word: word[0][:80] + "...", line)
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code
