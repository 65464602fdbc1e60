"""A transformers whose pages are others, such as the oldest that is supported."""

import importlib.util

import pytest

from kvcompress import paged
from kvcompress.errors import KVCompressError
from tests.support.families import FAMILIES

KNOWN = importlib.util.find_spec("transformers.generation.continuous_batching.cache_allocators") is not None


@pytest.mark.skipif(KNOWN, reason="its pages are those that are known")
def test_other_pages_are_refused_in_one_line():
    with pytest.raises(KVCompressError, match=r"another continuous batching than kvcompress\.paged knows") as refusal:
        paged.compress(FAMILIES["qwen2"].build(2), "keydiff", budget=8)
    assert "\n" not in str(refusal.value)
