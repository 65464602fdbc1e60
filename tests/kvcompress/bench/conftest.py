"""What all tests of the bench share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collecting_garbage_is_quick() -> Iterator[None]:
    """The bench collects garbage before each turn. That takes a second where all that other tests left is looked at."""
    gc.freeze()
    yield
    gc.unfreeze()
