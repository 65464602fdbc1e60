"""Tiny checkpoints on disk, shared by all tests of a run."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """family name -> folder with its tiny checkpoint, which no test may change."""
    return cache(lambda family: save_checkpoint(family, tmp_path_factory.mktemp(family)))
