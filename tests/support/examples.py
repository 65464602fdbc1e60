"""How many examples the property tests draw.

`EXAMPLES=10 ./scripts/run_tests.sh --every-case` draws ten times as many, and tests all combinations of what an
ordinary run only pairs, such as every method with every family."""

import itertools
import os
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("EXAMPLES", "1"))


def examples(count: int) -> settings:
    """Decorator of a property test: the number of examples in an ordinary run."""
    return settings(max_examples=count * TIMES, deadline=None, suppress_health_check=list(HealthCheck))


def some(cases: Iterable[str | tuple], few: Sequence[str]) -> list:
    """For `parametrize`: all cases; in an ordinary run, those whose name (or first item) is not in `few` are slow."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        is_slow = values[0] not in few and TIMES == 1
        found.append(pytest.param(*values, marks=pytest.mark.slow if is_slow else ()))
    return found


def paired(*lists: Sequence) -> list[tuple]:
    """For `parametrize`: every element of every list at least once, paired with elements of the other lists in turn."""
    if TIMES > 1:
        return list(itertools.product(*lists))
    most = max(map(len, lists)) if all(lists) else 0  # METHODS= may leave none
    return [tuple(each[i % len(each)] for each in lists) for i in range(most)]


def every_third(cases: Iterable[str | tuple]) -> list:
    """For `parametrize`: all cases, of which an ordinary run takes every third; the others are slow."""
    found = []
    for place, case in enumerate(cases):
        is_slow = place % 3 > 0 and TIMES == 1
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=pytest.mark.slow if is_slow else ()))
    return found
