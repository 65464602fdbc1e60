"""A filled cache can be saved or copied, and continues like the original."""

import copy
import io
import pickle

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.families import FAMILIES
from tests.support.storages import STORAGES

STORED = {"dynamic": {}, "ragged": {"head_budget": "adaptive"}, "evicting": {"decode_budget": 8, "decode_interval": 2}}
STORED |= STORAGES


def torch_saved(cache: kvcompress.CompressedCache) -> kvcompress.CompressedCache:
    torch.save(cache, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "deepcopy": copy.deepcopy, "torch": torch_saved}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", STORED)
def test_a_cache_that_was_saved_goes_on_as_the_one_that_was_kept(stored, way):
    model = FAMILIES["qwen2"].build()
    inputs, more = FAMILIES["qwen2"].inputs(model, [40]), FAMILIES["qwen2"].inputs(model, [12], seed=1)
    with kvcompress.attach(model):
        cache = kvcompress.CompressedCache(model.config, "h2o", 0.3, **STORED[stored])
        tokens, _ = generate(model, inputs, 4, past_key_values=cache)
        both = torch.cat([inputs["input_ids"], tokens, more["input_ids"]], 1)
        second = {"input_ids": both, "attention_mask": torch.ones_like(both)}
        saved = WAYS[way](cache)
        _, from_saved = generate(model, second, 4, past_key_values=saved)
        _, from_kept = generate(model, second, 4, past_key_values=cache)  # which the other did not touch
    torch.testing.assert_close(from_saved, from_kept, rtol=0, atol=0)
    assert saved.nbytes == cache.nbytes


@pytest.mark.parametrize("way", WAYS)
def test_a_decode_step_reads_the_entries_of_the_copy(way):
    """A compiled kernel knows where they lie. The original, in another process, is gone."""
    model, token = FAMILIES["qwen2"].build(), torch.tensor([[9]])
    cache = kvcompress.CompressedCache(model.config, "h2o", 0.3, **STORED["quanto"])
    with kvcompress.attach(model), torch.no_grad():
        generate(
            model, FAMILIES["qwen2"].inputs(model, [40]), 3, past_key_values=cache
        )  # fewer than are packed together
        saved = WAYS[way](cache)
        expected = model(token, past_key_values=copy.deepcopy(cache)).logits
        if way != "deepcopy":  # which shares what is packed
            for layer in cache.layers:
                for tensor in layer.storage.tensors():
                    tensor.data.zero_()
        found = model(token, past_key_values=saved).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_no_part_of_the_model(way):
    """Nor its hooks, which may not be picklable."""
    model = copy.deepcopy(FAMILIES["qwen2"].build())
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *hooked: None)
    with kvcompress.compress(model, "h2o", 0.3) as session:
        generate(model, FAMILIES["qwen2"].inputs(model, [40]), 2)
    assert [layer.module for layer in WAYS[way](session.cache).layers] == [None] * 3
    assert session.cache.layers[0].module is model.model.layers[0].self_attn
