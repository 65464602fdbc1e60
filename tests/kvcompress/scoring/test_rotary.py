"""Queries without their rotation, on every family, and the rotation of positions to come."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

import kvcompress
from kvcompress.clusters.expected_attention import ExpectedAttentionKVCluster
from kvcompress.hooks.model import text_decoder
from kvcompress.hooks.rotary import rotary_embeddings, watch_rotary
from kvcompress.scoring.rotary import Rotary
from tests.support.families import FAMILIES, HEAD_DIM, MORE_FAMILIES, VLM_FAMILIES

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


@pytest.fixture
def given(monkeypatch) -> list[tuple]:
    """Everything that expected attention is given, one (queries, prompt) per layer and eviction."""
    calls = []
    score = ExpectedAttentionKVCluster.score

    @kvcompress.handles_padding
    def noting(self, queries, keys, values, prompt):
        calls.append((queries, prompt))
        return score(self, queries, keys, values, prompt)

    monkeypatch.setattr(ExpectedAttentionKVCluster, "score", noting)
    return calls


@contextmanager
def unrotated_by_hooks(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """A list that fills with each layer's queries before their rotation: the output of q_norm, or of q_proj without
    one."""
    calls, hooks = [], []
    for module in model.modules():
        if hasattr(module, "q_proj") and hasattr(module, "layer_idx"):
            source = getattr(module, "q_norm", module.q_proj)

            def note(_, args, output):
                calls.append(output.reshape(*output.shape[:2], -1, HEAD_DIM).transpose(1, 2))

            hooks.append(source.register_forward_hook(note))
    yield calls
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_unrotated_queries_are_those_before_the_rotary_embedding(family, scope, given):
    family = FAMILIES[family]
    model = family.build()
    inputs = family.inputs(model, [50, 31], [1, 2] if family.is_vlm else None)
    real = inputs["attention_mask"].bool()
    options = {"scope": "context", "context_tokens": -7} if scope == "context" else {}
    with unrotated_by_hooks(model) as expected, kvcompress.compress(model, "expected-attention", 0.5, **options):
        model(**inputs)
    assert len(given) == len(expected) == 3
    for (ours, prompt), theirs in zip(given, expected, strict=True):
        for row, length in enumerate(prompt.lengths):
            torch.testing.assert_close(ours[row, :, -length:], theirs[row][:, real[row]][:, :length], atol=2e-5, rtol=0)


def assert_rotates_ahead(prompt: kvcompress.Prompt, rotary: Rotary, columns: list[int]) -> None:
    """The mean rotation of one position to come is that of these columns, one of each row."""
    ahead = prompt.rotary.mean_rotation(1, HEAD_DIM, prompt.padding)
    cos, sin = ahead.diagonal(dim1=1, dim2=2), ahead.diagonal(HEAD_DIM // 2, 1, 2)
    rows = range(len(columns))
    torch.testing.assert_close(cos, rotary.cos[rows, columns], atol=1e-5, rtol=0)
    torch.testing.assert_close(-sin, rotary.sin[rows, columns, : HEAD_DIM // 2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_to_come_are_rotated_as_the_model_goes_on(family, given):
    family = FAMILIES[family]
    model = family.build()
    inputs = family.inputs(model, [50, 31], [1, 2] if family.is_vlm else None)
    with kvcompress.compress(model, "expected-attention", 0.5, decode_budget=25, decode_interval=1):
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    (_, prompt), (_, next_token) = given[0], given[3]  # layer 0, in the prompt and when one more token was seen
    assert next_token.stored.seen == prompt.rotary.cos.shape[1] + 1
    assert_rotates_ahead(prompt, next_token.rotary, [0, 0])


@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_behind_an_image_text_goes_on_where_the_model_lets_it(family, given):
    """Under M-RoPE that is after the largest of the image's three positions."""
    family = FAMILIES[family]
    model = family.build()
    inputs = family.inputs(model, [70, 51], [2, 1])
    whole = []
    with kvcompress.compress(model, "expected-attention", 0.5, scope="context") as session:
        hooks = watch_rotary(text_decoder(model), whole.append)
        model(**inputs)
        for hook in hooks:
            hook.remove()
    assert session.cache.seen_tokens == inputs["input_ids"].shape[1]
    prompt = given[0][1]
    pads = (inputs["attention_mask"] == 0).sum(1).tolist()
    assert_rotates_ahead(prompt, whole[0], [pad + length for pad, length in zip(pads, prompt.lengths, strict=True)])


def test_the_mean_rotation_is_the_mean_of_the_models_rotations():
    inv_freq = torch.tensor([1.0, 0.3])
    rotary = Rotary(torch.ones(1, 5, 4), torch.zeros(1, 5, 4), torch.arange(5)[None] + 10, inv_freq, scaling=1.5)
    query = torch.randn(6, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(6)
    for position in (15, 16, 17):
        a, b = torch.complex(query[:2], query[2:4]) * torch.exp(1j * inv_freq * position) * 1.5, query[4:]
        expected += torch.cat([a.real, a.imag, b]) / 3
    torch.testing.assert_close(rotary.mean_rotation(3, 6)[0] @ query, expected)


def test_the_positions_of_pads_do_not_count():
    positions = torch.tensor([[99, 0, 1], [0, 1, 2]])
    angles = torch.ones(2, 3, 4)
    rotary = Rotary(angles, angles, positions, torch.tensor([1.0, 0.3]))
    short, long = rotary.mean_rotation(1, 4, torch.tensor([[1], [0]])).diagonal(dim1=1, dim2=2)[:, 0]
    torch.testing.assert_close(torch.stack([short, long]), torch.tensor([2.0, 3.0]).cos())


def test_gemma3_with_a_rotary_embedding_per_type_of_layer_gives_the_full_layers_their_own(given):
    config = Gemma3TextConfig(
        **TINY,
        head_dim=HEAD_DIM,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad(), unrotated_by_hooks(model) as expected, kvcompress.compress(model, "expected-attention", 0.5):
        model(torch.arange(1, 21)[None])
    assert len(given) == 1
    torch.testing.assert_close(given[0][0], expected[1].transpose(1, 2), atol=1e-5, rtol=0)


def test_scaled_cos_and_sin_are_undone_and_rotated_ahead(given):
    """YaRN multiplies cos and sin by a factor, so that rotated queries are longer than the projected ones."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(
        **TINY,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad(), unrotated_by_hooks(model) as expected, kvcompress.compress(model, "expected-attention", 0.5):
        model(torch.arange(1, 21)[None])
    queries, prompt = given[0]
    torch.testing.assert_close(queries, expected[0], atol=1e-5, rtol=0)
    rotation = prompt.rotary.mean_rotation(1, HEAD_DIM)[0]
    assert rotation.norm(dim=1).min() > 1.1
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(HEAD_DIM) * prompt.rotary.scaling**2)


MIXED = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)), "has no rotary position"),
        (lambda: SmolLM3ForCausalLM(SmolLM3Config(**TINY, no_rope_layers=[1, 0])), "layers without rotary embedding"),
        (lambda: Cohere2ForCausalLM(Cohere2Config(**TINY, layer_types=MIXED)), "layers without rotary embedding"),
        (lambda: LlamaForCausalLM(LlamaConfig(**TINY, layer_rope_theta=[1e4, 0])), "layers without rotary embedding"),
        (lambda: LlamaForCausalLM(LlamaConfig(**TINY, layer_rope_theta=[1e4, 1e6])), "rotates layers in several ways"),
        (lambda: Exaone4ForCausalLM(Exaone4Config(**TINY, layer_types=MIXED)), "layers without rotary embedding"),
    ],
)
def test_a_model_whose_rotation_cannot_be_undone_is_an_error_at_once(model, message):
    with pytest.raises(kvcompress.KVCompressError, match=message):
        kvcompress.compress(model(), "expected-attention", 0.5)


def test_a_rotation_of_other_pairs_of_channels_is_an_error_at_once(monkeypatch):
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos + q.flip(-1) * sin, k))
    with pytest.raises(kvcompress.KVCompressError, match="LlamaModel rotates queries in an unknown way"):
        kvcompress.compress(model, "expected-attention", 0.5)


@pytest.mark.skipif(not hasattr(transformers, "Molmo2Config"), reason="transformers has no Molmo 2 yet")
def test_layers_that_are_rotated_in_several_ways_are_an_error_at_once():
    config = MORE_FAMILIES["molmo2"].build().config.get_text_config().to_dict()
    config = transformers.AutoConfig.for_model(**config | {"rope_scaling_layers": [0]})
    model = transformers.AutoModel.from_config(config)
    with pytest.raises(kvcompress.KVCompressError, match="Molmo2TextModel rotates layers in several ways"):
        rotary_embeddings(model)


PAIRED = {
    "neighbours": lambda: Glm4ForCausalLM(Glm4Config(**TINY, head_dim=HEAD_DIM)),  # half of the channels
    "neighbours, angles too": lambda: CohereForCausalLM(CohereConfig(**TINY, use_qk_norm=False)),
    "neighbours, three axes": lambda: MORE_FAMILIES["glm4v"].build(),
}


@pytest.mark.parametrize("make", PAIRED.values(), ids=PAIRED)
def test_pairs_of_neighbouring_channels_are_turned_as_the_model_turns_them(make, given):
    """Back for the queries of the prompt, forth for those to come and for keys that move."""
    model = make().eval()
    with torch.no_grad(), unrotated_by_hooks(model) as expected, kvcompress.compress(model, "expected-attention", 0.5):
        model(torch.arange(8, 28)[None])
    queries, view = given[0]
    torch.testing.assert_close(queries, expected[0], atol=2e-5, rtol=0)
    decoder = text_decoder(model)
    apply = sys.modules[type(decoder).__module__].apply_rotary_pos_emb

    def turned(states: torch.Tensor, position: int) -> torch.Tensor:
        position_ids = torch.full((1, 1), position)
        if model.config.model_type == "glm4v":
            position_ids = position_ids.expand(3, 1, 1)
        return apply(states, states, *decoder.rotary_emb(states, position_ids=position_ids))[0]

    state = expected[0][:, :, :1]
    ahead = view.rotary.mean_rotation(1, HEAD_DIM)[0]
    torch.testing.assert_close(state @ ahead.T, turned(state, 20), atol=1e-5, rtol=0)
    moved = view.rotary.moved(turned(state, 4), torch.full(state.shape[:3], 7))
    torch.testing.assert_close(moved, turned(state, 11), atol=1e-5, rtol=0)


def test_nothing_watches_the_rotary_embedding_between_prompt_passes():
    """A decode step is compiled with static shapes: a hook would be in its graph."""
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [20])
    with kvcompress.compress(model, "expected-attention", 0.5) as session:
        model(**inputs)
        assert len(session.cache.kept_indices(0)[0][0]) == 10
        assert not model.model.rotary_emb._forward_hooks
