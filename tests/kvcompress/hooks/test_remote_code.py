"""A model of remote code that leaves writing to a part of it is compressed there."""

import copy
import types

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaModel, PreTrainedModel, Qwen2Config, Qwen2PreTrainedModel

import kvcompress
from kvcompress import CompressedCache, KVCompressError
from tests.support.families import FAMILIES

FAMILY = FAMILIES["qwen2"]
MODEL = FAMILY.build()
IDS = FAMILY.inputs(MODEL, [40])["input_ids"]
NEW = {"max_new_tokens": 5, "do_sample": False}


def prepare_inputs_for_generation(
    llm: PreTrainedModel, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None, **kwargs: object
) -> dict:
    return type(llm).prepare_inputs_for_generation(llm, input_ids, inputs_embeds=inputs_embeds, **kwargs)


class MiniCPMOStandIn(Qwen2PreTrainedModel):
    """The structure of MiniCPM-o 2.6: one config with the language model, whose method is replaced; towers and speech
    beside it; a `generate` that gives embeddings to the language model's, and a forward that is never called."""

    config_class = Qwen2Config

    def __init__(self, llm: PreTrainedModel, **parts: torch.nn.Module):
        super().__init__(llm.config)
        self.llm = llm
        self.vpm = torch.nn.Linear(4, 4)
        small = LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        self.tts = LlamaModel(small)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, **_: object) -> None:
        raise AssertionError("generation does not come by here")

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, **kwargs: object) -> torch.LongTensor:
        embeds = self.llm.get_input_embeddings()(input_ids)
        return self.llm.generate(inputs_embeds=embeds, attention_mask=torch.ones_like(input_ids), **kwargs)


@pytest.fixture
def model(monkeypatch) -> MiniCPMOStandIn:
    method = types.MethodType(prepare_inputs_for_generation, MODEL)
    monkeypatch.setattr(MODEL, "prepare_inputs_for_generation", method, raising=False)
    return MiniCPMOStandIn(MODEL).eval()


def test_the_language_model_inside_is_compressed(model):
    with kvcompress.compress(model, "snapkv", 0.3, window_size=4) as session:
        tokens = model.generate(IDS, **NEW)
        cache = session.cache
    assert session.model is MODEL
    assert len(cache.kept_indices(0)[0][0]) == 0.3 * IDS.shape[1] + NEW["max_new_tokens"] - 1
    with kvcompress.compress(MODEL, "snapkv", 0.3, window_size=4):
        assert torch.equal(MODEL.generate(IDS, **NEW)[:, IDS.shape[1] :], tokens)


def test_full_writes_what_the_plain_model_writes(model):
    plain = model.generate(IDS, **NEW)
    with kvcompress.compress(model, "full"):
        assert torch.equal(model.generate(IDS, **NEW), plain)


def test_a_cache_of_ones_own_goes_to_the_language_model(model):
    cache = CompressedCache(model.config, "snapkv", 0.3, window_size=4)
    with kvcompress.attach(model):
        model.generate(IDS, past_key_values=cache, **NEW)
    assert cache.get_seq_length() == IDS.shape[1] + NEW["max_new_tokens"] - 1


def test_a_cache_of_transformers_is_not_taken_for_compressed(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        MODEL(IDS, past_key_values=cache)
    with kvcompress.compress(model, "snapkv", 0.3), pytest.raises(KVCompressError, match="must be a CompressedCache"):
        MODEL(IDS, past_key_values=cache)


def test_where_several_parts_write_one_line_says_which_to_give():
    model = MiniCPMOStandIn(MODEL, tts=copy.deepcopy(MODEL))
    message = r"MiniCPMOStandIn has several parts that generate: pass one of them, \.llm or \.tts$"
    for connect in (kvcompress.compress, kvcompress.attach, kvcompress.SharedPrompt):
        with pytest.raises(KVCompressError, match=message):
            connect(model)
    assert kvcompress.compress(model.llm).model is MODEL
