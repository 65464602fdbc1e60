"""Token methods: vision tokens dropped before or inside the language model, so that the prompt pass gets shorter."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import kvcompress
from tests.families import FAMILIES, VLM_FAMILIES
from tests.masked_reference import generate

NEW = 4
TOLERANCE = 1e-4  # fp32, logits of order 1
LENGTHS, IMAGES = [40, 26, 61, 9], [1, 1, 2, 0]


def budget(ratio: float, tokens: int) -> int:
    return max(1, math.floor(ratio * tokens + 0.5)) if tokens else 0


def batch(family: str, lengths=LENGTHS, images=IMAGES, layers: int = 4) -> tuple:
    model = FAMILIES[family].build(layers)
    return model, FAMILIES[family].inputs(model, lengths, images)


def vision_of(inputs: dict) -> torch.Tensor:
    return inputs["input_ids"] == 1


def kept_columns(cache: kvcompress.CompressedCache) -> list[list[list[int]]]:
    """[layer][row]: the columns stored, the same for every KV head."""
    layers = [cache.kept_indices(layer) for layer in range(len(cache.layers))]
    for rows in layers:
        for heads in rows:
            assert all(torch.equal(head, heads[0]) for head in heads)
    return [[heads[0].tolist() for heads in rows] for rows in layers]


@contextmanager
def hidden_from(model: torch.nn.Module, kept: list[list[list[int]]]) -> Iterator[None]:
    """Plain attention in which a layer sees, of all columns up to the last that is listed, only the listed ones."""

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        columns, new = key.shape[2], query.shape[2]
        visible = torch.ones(new, columns, dtype=torch.bool).tril(columns - new)
        visible = visible.expand(len(query), 1, -1, -1).clone()
        for row, listed in enumerate(kept[module.layer_idx]):
            hidden = sorted(set(range(columns)) - set(listed) - set(range(max(listed) + 1, columns)))
            visible[row, ..., hidden] = False
        visible[..., -new:] |= torch.eye(new, dtype=torch.bool)  # pads and dropped tokens: no NaN
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    AttentionInterface.register("hidden_from", attention)
    AttentionMaskInterface.register("hidden_from", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = "hidden_from"
    try:
        yield
    finally:
        config._attn_implementation = before


def full_attention(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, ...]:
    """The weights of every layer, (batch, heads, columns, columns), by transformers' eager attention."""
    model.set_attn_implementation("eager")
    try:
        return model(**inputs, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")


# -- the mechanism, with FastV


@pytest.mark.parametrize("ratio", [0.05, 0.5])
@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_fastv_equals_the_full_model_in_which_dropped_tokens_are_hidden_from_layer_k_on(family, ratio):
    model, inputs = batch(family)
    with kvcompress.compress(model, "fastv", ratio) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert len(kept[1][0]) > len(kept[2][0])


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_fastv_keeps_what_the_last_token_attends_to_in_the_layer_before(family, layer):
    model, inputs = batch(family)
    vision, real = vision_of(inputs), inputs["attention_mask"].bool()
    weights = full_attention(model, inputs)[layer - 1].double().mean(1)[:, -1]  # (batch, columns)
    with kvcompress.compress(model, "fastv", 0.3, layer=layer) as session:
        generate(model, inputs, 1)
    kept = kept_columns(session.cache)
    for row in range(len(LENGTHS)):
        best = weights[row].masked_fill(~vision[row], -1).topk(budget(0.3, int(vision[row].sum()))).indices
        text = (real[row] & ~vision[row]).nonzero()[:, 0]
        assert kept[layer][row] == sorted([*best.tolist(), *text.tolist()])
        assert kept[layer - 1][row] == real[row].nonzero()[:, 0].tolist()
        assert all(later[row] == kept[layer][row] for later in kept[layer:])
    ratios = session.cache.realised_ratios()
    assert ratios[layer] == pytest.approx([len(k) / n for k, n in zip(kept[layer], LENGTHS, strict=True)])
    assert ratios[layer - 1] == [1.0] * len(LENGTHS)


@contextmanager
def noting(model: torch.nn.Module) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Of every decoder layer that runs: the columns of its MLP, and the cosines that its attention rotates by."""
    widths, cosines, handles = [], [], []
    for layer in model.get_decoder().layers:
        handles += [
            layer.mlp.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1])),
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs: cosines.append(kwargs["position_embeddings"][0]), with_kwargs=True
            ),
        ]
    try:
        yield widths, cosines
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_layers_behind_the_choice_run_on_fewer_columns_at_their_own_positions(family):
    model, inputs = batch(family)
    with noting(model) as (widths, cosines), kvcompress.compress(model, "fastv", 0.25) as session:
        generate(model, inputs, 2)
    vision = vision_of(inputs).sum(1).tolist()
    left = [n - v + budget(0.25, v) for n, v in zip(LENGTHS, vision, strict=True)]
    assert widths == [61, 61, max(left), max(left), 1, 1, 1, 1]
    whole, shorter = (cos.expand(len(LENGTHS), -1, -1) for cos in cosines[1:3])
    for row, columns in enumerate(kept_columns(session.cache)[2]):
        assert torch.equal(shorter[row, -left[row] :], whole[row, columns[: left[row]]])


@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_a_text_only_prompt_and_ratio_one_run_as_the_full_model_bit_for_bit(family):
    model, inputs = batch(family)
    tokens, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, "fastv", 1.0):
        ours, logits = generate(model, inputs, NEW)
    assert torch.equal(ours, tokens)
    assert torch.equal(logits, expected)
    model, inputs = batch(family, [17, 30], [0, 0])
    _, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, "fastv", 0.1) as session:
        _, logits = generate(model, inputs, NEW)
    assert torch.equal(logits, expected)
    assert session.cache.realised_ratios() == [[1.0, 1.0]] * 4
