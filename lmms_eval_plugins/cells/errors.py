"""What ends an evaluation with one line. Imports nothing heavy."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Bad input. The message is one line that names the value and what is allowed."""


class EvaluationFailed(RuntimeError):
    """The input is fine, but there are no results. The message is one line and says what to do."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` where some valid name is near, else nothing."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
