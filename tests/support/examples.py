"""How much the property tests draw. `EXAMPLES=10 ./scripts/run_tests.sh` draws ten times as many examples, and crosses
what an ordinary run only pairs: every method with every family, for instance."""

import itertools
import os
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("EXAMPLES", "1"))


def examples(count: int) -> settings:
    """Decorator of a property test: so many examples in an ordinary run."""
    return settings(max_examples=count * TIMES, deadline=None, suppress_health_check=list(HealthCheck))


def some(names: Iterable[str], few: Sequence[str]) -> list:
    """For `parametrize`: all names; in an ordinary run those that are not among the `few` are slow."""
    return [name if name in few or TIMES > 1 else pytest.param(name, marks=pytest.mark.slow) for name in names]


def paired(*lists: Sequence) -> list[tuple]:
    """For `parametrize`: every element of every list at least once, beside others of the other lists in turn."""
    if TIMES > 1:
        return list(itertools.product(*lists))
    most = max(map(len, lists))
    return [tuple(each[i % len(each)] for each in lists) for i in range(most)]
