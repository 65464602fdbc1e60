"""Several questions in one training sequence, and the model over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from lmms_eval_plugins.tiny_vlm.questions import POST_PROMPT, Question
from tiny_vlm.modeling import BASE_TOKENS, FRAME_TOKENS, GRID_TOKENS, IMAGE_TOKENS
from tiny_vlm.signs import GRID

IGNORED = -100
LONG_PREFIX = 800  # tokens, of which on the fused attention kernel is the faster one
# What the language model sees of a picture: base and grid view as in LLaVA-OneVision's prompts with one picture, the
# base view alone as in those with several, or the grid view alone: half the work, for early training.
View = Literal["both", "base", "grid"]
Via = Literal["via", "holder", "sign"]
VIEW_TOKENS: dict[View, int] = {"both": IMAGE_TOKENS, "base": BASE_TOKENS + 1, "grid": GRID_TOKENS}


@dataclass
class PackedBatch:
    """Several questions about what each row shows, in one sequence; T is the longest row's length.

    Rows begin with what is shown: pictures, a video, text, in `prefix` tokens, the shorter ones padded.

    ids, segments, positions and targets (B, T): `segments` is 0 for what is shown, the question's number from 1, -1 for
    padding; `targets` holds the next token where it belongs to an answer, else IGNORED. kinds[row][question] as in
    `signs`. pixels (N, 3, SIDE, SIDE) uint8 and labels (N, len(LABELS), GRID, GRID): the pictures of all rows in turn,
    N / B each. frames (M, 3, SIDE, SIDE) uint8 and frame_labels (M, len(LABELS), FRAME_GRID, FRAME_GRID): the different
    frames of all videos; frame_index (B, F) which of them each row shows, before (B, F) as in `regimes.Shown`.
    text_labels (2, B, T): of each character of a text of facts, the character to its left, and of a number's the one
    of the word that would stand above it on a sign, both as in `signs.Scene`; IGNORED where there is no such character.
    via (B, T): the token of `Question.via` or `holder`, where the first token of an answer is predicted; IGNORED
    elsewhere.
    """

    pixels: Tensor
    ids: Tensor
    segments: Tensor
    positions: Tensor
    targets: Tensor
    labels: Tensor
    kinds: list[list[str]]
    prefix: int
    view: View
    image: int  # the token that stands for a picture's patch
    video: int
    frames: Tensor | None = None
    frame_labels: Tensor | None = None
    frame_index: Tensor | None = None
    before: Tensor | None = None
    text_labels: Tensor | None = None
    via: Tensor | None = None

    def to(self, device: torch.device) -> PackedBatch:
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


class Packer:
    """Turns images with questions into a PackedBatch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.start, self.end = self.encode("<|im_start|>user "), self.encode("\n")
        self.image, self.video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def segment(self, question: Question, post_prompt: bool) -> tuple[list[int], list[int]]:
        """ids and targets of one question with its answer, as the chat template lays them out."""
        prompt = question.text + (POST_PROMPT if post_prompt else "")
        asked = self.encode(f"{prompt}<|im_end|><|im_start|>assistant\n")
        answer = self.encode(f"{question.answer}<|im_end|>")
        targets = [IGNORED] * (len(asked) - 1) + answer + [IGNORED]
        return asked + answer, targets

    def prefix(self, pictures: int, view: View, frames: int = 0, text: str = "") -> list[int]:
        """ids of what is shown before the question, as the processor and the chat template lay it out."""
        ids = list(self.start)
        for _ in range(pictures):
            ids += [self.image] * VIEW_TOKENS[view] + self.end
        if frames:
            ids += [self.video] * (frames * FRAME_TOKENS + 1) + self.end
        return ids + self.encode(text)

    def rows(
        self, prefixes: list[list[int]], asked: list[list[Question]], post_prompt: bool
    ) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """The length of the longest prefix; ids, segments, positions and targets (B, T)."""
        rows = []
        prefix = max(map(len, prefixes))
        fills = (self.tokenizer.pad_token_id, -1, 0, IGNORED)
        for shown, questions in zip(prefixes, asked, strict=True):
            start, missing = len(shown), prefix - len(shown)
            kept = (shown, [0] * start, list(range(start)), [IGNORED] * start)
            ids, segments, positions, targets = (
                [*part, *[fill] * missing] for part, fill in zip(kept, fills, strict=True)
            )
            for number, question in enumerate(questions, start=1):
                segment_ids, segment_targets = self.segment(question, post_prompt)
                ids += segment_ids
                targets += segment_targets
                segments += [number] * len(segment_ids)
                positions += range(start, start + len(segment_ids))
            rows.append((ids, segments, positions, targets))
        longest = max(len(row[0]) for row in rows)
        ids, segments, positions, targets = (
            torch.tensor([row[i] + [fill] * (longest - len(row[i])) for row in rows]) for i, fill in enumerate(fills)
        )
        return prefix, ids, segments, positions, targets

    def via(
        self,
        asked: list[list[Question]],
        name: Via,
        ids: Tensor,
        segments: Tensor,
        targets: Tensor,
        throughout: bool = False,
    ) -> Tensor:
        """PackedBatch.via of rows as `rows` gives them; `name`: which of a question's words, of `sign` the
        other where it has none; `throughout`: wherever a
        token of the answer is foretold, not only its first."""
        via = torch.full_like(ids, IGNORED)
        for row, questions in enumerate(asked):
            for number, question in enumerate(questions, start=1):
                if word := getattr(question, name) or (question.via if name == "sign" else ""):
                    predicts = (segments[row] == number) & (targets[row] != IGNORED)
                    places = predicts.nonzero()[:, 0]
                    via[row, places if throughout else places[:1]] = self.encode(f" {word}")[0]
        return via

    def batch(
        self,
        pixels: Tensor,
        asked: list[list[Question]],
        labels: Tensor,
        post_prompt: bool,
        base_view: bool = True,
    ) -> PackedBatch:
        """One picture in each row."""
        view: View = "both" if base_view else "grid"
        prefix, ids, segments, positions, targets = self.rows([self.prefix(1, view)] * len(asked), asked, post_prompt)
        kinds = [[question.kind for question in questions] for questions in asked]
        return PackedBatch(
            pixels, ids, segments, positions, targets, labels, kinds, prefix, view, self.image, self.video
        )


def project(model: LlavaOnevisionForConditionalGeneration, pixels: Tensor) -> Tensor:
    """(B, 3, SIDE, SIDE) uint8 -> (B, GRID * GRID, width): one language-model embedding per patch."""
    pixels = pixels.float() / 127.5 - 1  # the image processor's rescaling and normalisation
    tower = model.model.vision_tower(pixels, output_hidden_states=True)
    return model.model.multi_modal_projector(tower.hidden_states[-1])  # before the tower's last norm


def packed_forward(
    model: LlavaOnevisionForConditionalGeneration, batch: PackedBatch
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...]]:
    """The model over packed rows: each question sees what is shown and itself, at the positions it has alone.

    Returns the features of the pictures' patches (N, GRID * GRID, width) and those of the frames' pooled patches (M,
    FRAME_TOKENS, width), None where there are none, and the language model's hidden states: the embeddings, then each
    layer's output, the last one normalised; (B, T, width) each.
    """
    inner = model.model
    embeddings = inner.language_model.embed_tokens(batch.ids)
    features, frame_features = visual_features(model, batch)
    if features is not None:
        embeddings = _placed(embeddings, batch.ids == batch.image, _viewed(model, features, batch.view))
    if frame_features is not None:
        video = frame_features[batch.frame_index].flatten(1, 2)
        video = torch.cat((video, inner.image_newline.to(video.dtype).expand(len(video), 1, -1)), 1)
        embeddings = _placed(embeddings, batch.ids == batch.video, video)
    output = inner.language_model(
        inputs_embeds=embeddings,
        attention_mask=question_mask(batch.segments, batch.prefix),
        position_ids=batch.positions,
        output_hidden_states=True,
        use_cache=False,
    )
    return features, frame_features, output.hidden_states


def visual_features(
    model: LlavaOnevisionForConditionalGeneration, batch: PackedBatch
) -> tuple[Tensor | None, Tensor | None]:
    """The first two of `packed_forward`."""
    features = project(model, batch.pixels) if len(batch.pixels) else None
    frames = None if batch.frames is None else model.model.apply_pooling(project(model, batch.frames))
    return features, frames


def _viewed(model: LlavaOnevisionForConditionalGeneration, features: Tensor, view: View) -> Tensor:
    """(N, GRID * GRID, width) -> (N, VIEW_TOKENS[view], width). Base view and grid view show the same pixels, so the
    tower runs once; the grid view has a newline after each row, the base view alone has one at its end."""
    newline = model.model.image_newline.to(features.dtype)
    if view == "base":
        return torch.cat((features, newline.expand(len(features), 1, -1)), 1)
    rows = features.unflatten(1, (GRID, GRID))
    grid = torch.cat((rows, newline.expand(len(features), GRID, 1, -1)), 2).flatten(1, 2)
    return torch.cat((features, grid), 1) if view == "both" else grid


def _placed(embeddings: Tensor, where: Tensor, values: Tensor) -> Tensor:
    return embeddings.masked_scatter(where[..., None], values.to(embeddings.dtype))


def question_mask(segments: Tensor, prefix: int) -> Tensor:
    """(B, 1, T - prefix, T) bool: what the tokens after the prefix may attend to."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    key, query = segments[:, None, :], segments[:, prefix:, None]
    return (causal[prefix:] & ((key == 0) | (key == query)))[:, None]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal over the prefix and `question_mask` for the rest; everything to everything without a mask.

    Plain matrix products: on a CPU, backward included, twice as fast as the fused kernels for a prefix of one picture.
    They form the whole causal matrix, so that past LONG_PREFIX the fused kernel is the faster one.
    """

    def attend(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        length, groups = query.shape[2], query.shape[1] // key.shape[1]
        query = (query * scaling).unflatten(1, (-1, groups)).flatten(2, 3)  # groups of one KV head side by side
        scores = query @ key.transpose(2, 3)
        if mask is not None:
            scores = (scores.unflatten(2, (groups, length)) + mask).flatten(2, 3)
        output = scores.softmax(-1).to(value.dtype) @ value[:, :, : key.shape[2]]
        return output.unflatten(2, (groups, length)).flatten(1, 2)

    if attention_mask is None:
        output = attend(query, key, None)
    else:
        after = attention_mask.shape[2]
        prefix = query.shape[2] - after
        rest = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
        early = query[:, :, :prefix], key[:, :, :prefix], value[:, :, :prefix]
        if prefix > LONG_PREFIX:
            groups = query.shape[1] // key.shape[1]
            shared = (part.repeat_interleave(groups, 1) for part in early[1:])
            first = F.scaled_dot_product_attention(early[0], *shared, is_causal=True, scale=scaling)
        else:
            causal = torch.full((prefix, prefix), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
            first = attend(*early[:2], causal)
        output = torch.cat((first, attend(query[:, :, prefix:], key, rest[:, :, None])), 2)
    return output.transpose(1, 2), None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def answer_logits(
    model: LlavaOnevisionForConditionalGeneration, hidden: Tensor, batch: PackedBatch
) -> tuple[Tensor, Tensor]:
    """Logits (N, vocabulary) at the N places with a target, and those targets (N)."""
    here = batch.targets != IGNORED
    return F.linear(hidden[here].float(), model.lm_head.weight.float()), batch.targets[here]


def picture_patches(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """The hidden states of the pictures' patches, newlines left out, of the later view where there are two:
    (N, GRID * GRID, width)."""
    tokens = hidden[batch.ids == batch.image].unflatten(0, (-1, VIEW_TOKENS[batch.view]))
    if batch.view == "base":
        return tokens[:, :BASE_TOKENS]
    return tokens[:, -GRID_TOKENS:].unflatten(1, (GRID, GRID + 1))[:, :, :GRID].flatten(1, 2)


def frame_patches(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """The hidden states of the frames' pooled patches: (B, F, FRAME_TOKENS, width)."""
    frames = batch.frame_index.shape[1]
    tokens = hidden[batch.ids == batch.video].unflatten(0, (-1, frames * FRAME_TOKENS + 1))
    return tokens[:, :-1].unflatten(1, (frames, FRAME_TOKENS))
