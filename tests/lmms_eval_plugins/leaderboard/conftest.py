"""The submission that ships with the repository: results of real runs."""

from pathlib import Path

import pytest

from lmms_eval_plugins.leaderboard.submissions import unpacked

ARCHIVE = Path(__file__).parents[3] / "benchmarks" / "results" / "leaderboard.tar.xz"


@pytest.fixture(scope="session")
def shipped():
    """Its folder, which no test may change."""
    with unpacked(ARCHIVE) as folder:
        yield folder
