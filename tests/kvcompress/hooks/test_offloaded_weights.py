"""Models whose weights accelerate keeps elsewhere: between their own passes they are on "meta", without numbers."""

import copy

import pytest
import torch

import kvcompress
from kvcompress import CompressedCache, KVCompressError
from tests.support.families import FAMILIES

accelerate = pytest.importorskip("accelerate")
MODEL = FAMILIES["qwen2"].build()
INPUTS = FAMILIES["qwen2"].inputs(MODEL, [40])
NEW = 4


@pytest.fixture(scope="module")
def offloaded():
    return accelerate.cpu_offload(copy.deepcopy(MODEL), execution_device=torch.device("cpu"))


def in_flight(model) -> torch.Tensor:
    with kvcompress.compress(model, "adakv", 0.4) as session:
        (answer,) = session.generate_many([INPUTS], slots=1, max_new_tokens=NEW)
    assert answer.error is None
    return answer.tokens


def loaded(model, path) -> torch.Tensor:
    with torch.no_grad(), kvcompress.compress(model, "adakv", 0.4) as session:
        model(**INPUTS)
        session.cache.save(path)
        return model(torch.tensor([[20]]), past_key_values=CompressedCache.load(path, model)).logits


def test_requests_in_flight_get_the_tokens_of_the_whole_model(offloaded):
    assert torch.equal(in_flight(offloaded), in_flight(MODEL))


def test_a_saved_cache_goes_on_as_in_the_whole_model(offloaded, tmp_path):
    assert torch.equal(loaded(offloaded, tmp_path / "a"), loaded(MODEL, tmp_path / "b"))


def test_a_method_that_reads_a_weight_says_that_it_is_not_there(offloaded):
    with (
        kvcompress.compress(offloaded, "criticalkv", 0.4),
        pytest.raises(KVCompressError, match="o_proj, which is off"),
    ):
        offloaded(**INPUTS)
