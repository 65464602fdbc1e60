"""Prompts with images and videos for tests of token methods, and the full model in which dropped tokens are hidden."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

import kvcompress
from kvcompress.check import token_promises
from kvcompress.check.reference import generate, hidden_from
from tests.support.families import FAMILIES, MORE_FAMILIES
from tests.support.kept import real_lengths

NEW = 3
TOLERANCE = 1e-4  # fp32, logits of order 1
LENGTHS, IMAGES = [40, 26, 61, 9], [1, 1, 2, 0]


def budget(ratio: float, tokens: int) -> int:
    return max(1, math.floor(ratio * tokens + 0.5)) if tokens else 0


def batch(family: str, lengths=LENGTHS, images=IMAGES, layers: int = 4) -> tuple:
    made = (FAMILIES | MORE_FAMILIES)[family]
    model = made.build(layers)
    return model, made.inputs(model, lengths, images)


def vision_of(inputs: dict) -> torch.Tensor:
    return inputs["input_ids"] == 1


def kept_columns(cache: kvcompress.CompressedCache) -> list[list[list[int]]]:
    """[layer][row]: the columns stored, the same for every KV head."""
    for layer in range(len(cache.layers)):
        for heads in cache.kept_indices(layer):
            assert all(torch.equal(head, heads[0]) for head in heads)
    return token_promises.kept_columns(cache)


def full_attention(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, ...]:
    """The weights of every layer, (batch, heads, columns, columns), by transformers' eager attention."""
    model.set_attn_implementation("eager")
    try:
        return model(**inputs, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")


@contextmanager
def entering(model: torch.nn.Module, index: int) -> Iterator[list[torch.Tensor]]:
    """The hidden states that decoder layer `index` really runs on, at each pass."""
    states = []
    norm = model.get_decoder().layers[index].input_layernorm
    handle = norm.register_forward_pre_hook(lambda _, args: states.append(args[0].clone()))
    try:
        yield states
    finally:
        handle.remove()


def run(method: str, ratio: float, **options: object) -> tuple:
    """LLaVA-OneVision: the model, its inputs, kept columns of the rows, embeddings, embeddings that reach layer 0."""
    model, inputs = batch("llava-onevision")
    with entering(model, 0) as states:
        generate(model, inputs, 1)
        with kvcompress.compress(model, method, ratio, **options) as session:
            generate(model, inputs, 1)
    return model, inputs, kept_columns(session.cache)[0], states[0], states[1]


VIDEO_FAMILIES = {"llava-onevision": 1, "qwen2-vl": 12, "qwen2.5-vl": 12, "qwen3-vl": 12, "internvl": 9}  # per frame


def video_batch(family: str, frames: list[int]) -> tuple[torch.nn.Module, dict, list[list[list[int]]]]:
    """A model, left-padded prompts with one video of so many frames each, and the columns of each row's frames."""
    size, (image, video, start, end) = VIDEO_FAMILIES[family], range(1, 5)
    model, generator = FAMILIES[family].build(4), torch.Generator().manual_seed(3)
    rows = []
    for number, count in enumerate(frames):
        text = torch.arange(20 + 10 * number, 29 + 10 * number).tolist()
        if family in ("qwen3-vl", "internvl"):  # each frame on its own
            token = image if family == "internvl" else video
            shown = [t for frame in range(count) for t in (9 + frame, start, *[token] * size, end)]
        else:
            shown = [start, *[video] * (count * size + (family == "llava-onevision")), end]
        rows.append([*text[:3], *shown, *text[3:]])
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    pixels = {"generator": generator}
    if family == "llava-onevision":
        inputs["pixel_values_videos"] = torch.randn(len(frames), frames[0], 3, 8, 8, **pixels)
    elif family == "internvl":
        inputs["pixel_values"] = torch.randn(sum(frames), 3, 24, 24, **pixels)
    else:
        patch = 3 * 2 * (16 if family == "qwen3-vl" else 14) ** 2
        inputs["pixel_values_videos"] = torch.randn(sum(frames) * 48, patch, **pixels)
        inputs["video_grid_thw"] = torch.tensor([[count, 6, 8] for count in frames])
        inputs["mm_token_type_ids"] = 2 * (ids == video).int()
    columns = [((row == video) | (row == image)).nonzero()[:, 0].tolist() for row in ids]
    of_frames = [[c[i * size : (i + 1) * size] for i in range(n)] for c, n in zip(columns, frames, strict=True)]
    return model, inputs, of_frames


class Hidden(NamedTuple):
    """An answer, which is that of the full model in which what was dropped is hidden.

    kept: columns, [layer][row]; weights: of each layer of the prompt's pass in that full model, (batch, heads, columns,
    columns)."""

    kept: list[list[list[int]]]
    tokens: torch.Tensor
    logits: torch.Tensor
    weights: list[torch.Tensor]


def as_hidden(model: torch.nn.Module, inputs: dict, method: str, ratio: float | None, **options: object) -> Hidden:
    """Generate; raise AssertionError if the logits are not those of the full model in which what was dropped is
    hidden."""
    with kvcompress.compress(model, method, ratio, **options) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept) as weights:
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    return Hidden(kept, tokens, logits, weights[: len(kept)])


def assert_rows_as_alone(
    model: torch.nn.Module, family: str, inputs: dict, method: str, ratio: float, **options: object
) -> None:
    """Raise AssertionError if a row alone keeps other tokens or has other logits than in its batch."""
    with kvcompress.compress(model, method, ratio, **options) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    for row, length in enumerate(real_lengths(inputs)):
        solo, pads = FAMILIES[family].solo(inputs, row), inputs["input_ids"].shape[1] - length
        with kvcompress.compress(model, method, ratio, **options) as session:
            _, alone = generate(model, solo, NEW, forced=tokens[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], atol=TOLERANCE, rtol=0)
        assert [[c - pads for c in layer[row]] for layer in kept] == [layer[0] for layer in kept_columns(session.cache)]


def of_video(method: str, family: str, ratio: float, **options: object) -> tuple[list, torch.Tensor, list]:
    """Generate from two videos; logits must be those of the full model in which what was dropped is hidden, at ratio 1
    bit for bit. Returns each row's kept columns, the states that enter the language model, and the frames' columns."""
    model, inputs, of_frames = video_batch(family, [8, 8] if family == "llava-onevision" else [7, 5])
    with entering(model, 0) as states:
        _, full_logits = generate(model, inputs, NEW)
    hidden = as_hidden(model, inputs, method, ratio, **options)
    if ratio == 1:
        assert torch.equal(hidden.logits, full_logits)
    return hidden.kept[0], states[0], of_frames
