"""Fixtures that several test files use."""

from collections.abc import Iterator

import pytest

from tests.support.flash_attn_stand_in import flash_attn_stand_in


@pytest.fixture
def fake_flash_attn() -> Iterator[None]:
    """The test runs with the stand-in for flash-attn: see tests/support/fake_flash_attn."""
    with flash_attn_stand_in():
        yield
