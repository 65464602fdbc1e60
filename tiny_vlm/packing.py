"""Pack several questions into one training sequence, and run the model on it."""

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
LONG_PREFIX = 800  # tokens above which the fused attention kernel is faster
# What the language model sees of a picture: base and grid view, as in LLaVA-OneVision's prompts with one picture; only
# the base view, as in those with several; or only the grid view, which halves the work in early training.
View = Literal["both", "base", "grid"]
Via = Literal["via", "holder", "sign"]
VIEW_TOKENS: dict[View, int] = {"both": IMAGE_TOKENS, "base": BASE_TOKENS + 1, "grid": GRID_TOKENS}


@dataclass
class PackedBatch:
    """Rows of a prompt and several questions about it in one sequence; T is the longest row's length.

    Each row begins with the prompt (pictures, a video, text), padded to `prefix` tokens.

    Attributes:
        ids, segments, positions, targets: (B, T). `segments` is 0 for the prompt, the question's number from 1, or -1
            for padding; `targets` holds the next token if it belongs to an answer, else IGNORED.
        kinds: [row][question], as in `signs`.
        pixels, labels: (N, 3, SIDE, SIDE) uint8 and (N, len(LABELS), GRID, GRID): the pictures of all rows in order,
            N / B per row.
        frames, frame_labels: (M, 3, SIDE, SIDE) uint8 and (M, len(LABELS), FRAME_GRID, FRAME_GRID): the distinct frames
            of all videos.
        frame_index: (B, F), which of the frames each row shows.
        before: (B, F), as in `Shown`.
        text_labels: (2, B, T), for each character in a text of facts: the character to its left, and for a number's
            characters the one of the word that would be above it on a sign, both as in `signs.Scene`; IGNORED for
            tokens that are not such characters.
        via: (B, T), the token of `Question.via`, `holder` or `sign` where the first token of an answer is predicted;
            IGNORED elsewhere.
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
    image: int  # the placeholder token of a picture's patch
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
        """Return ids and targets of a question with its answer, in the layout of the chat template."""
        prompt = question.text + (POST_PROMPT if post_prompt else "")
        asked = self.encode(f"{prompt}<|im_end|><|im_start|>assistant\n")
        answer = self.encode(f"{question.answer}<|im_end|>")
        targets = [IGNORED] * (len(asked) - 1) + answer + [IGNORED]
        return asked + answer, targets

    def prefix(self, pictures: int, view: View, frames: int = 0, text: str = "") -> list[int]:
        """Return the ids of the prompt before the question, in the layout of processor and chat template."""
        ids = list(self.start)
        for _ in range(pictures):
            ids += [self.image] * VIEW_TOKENS[view] + self.end
        if frames:
            ids += [self.video] * (frames * FRAME_TOKENS + 1) + self.end
        return ids + self.encode(text)

    def rows(
        self, prefixes: list[list[int]], asked: list[list[Question]], post_prompt: bool
    ) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """Return the length of the longest prefix, and ids, segments, positions and targets (B, T)."""
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
        """Return the PackedBatch.via of rows made by `rows`.

        `name`: which of a question's words to use; `sign` falls back to `via`. `throughout`: label every token of the
        answer, not only the first.
        """
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
        """Pack rows of one picture each."""
        view: View = "both" if base_view else "grid"
        prefix, ids, segments, positions, targets = self.rows([self.prefix(1, view)] * len(asked), asked, post_prompt)
        kinds = [[question.kind for question in questions] for questions in asked]
        return PackedBatch(
            pixels, ids, segments, positions, targets, labels, kinds, prefix, view, self.image, self.video
        )


def project(model: LlavaOnevisionForConditionalGeneration, pixels: Tensor) -> Tensor:
    """Map pixels (B, 3, SIDE, SIDE) uint8 to language-model embeddings of patches (B, GRID * GRID, width)."""
    pixels = pixels.float() / 127.5 - 1  # the image processor's rescaling and normalisation
    tower = model.model.vision_tower(pixels, output_hidden_states=True)
    return model.model.multi_modal_projector(tower.hidden_states[-1])  # before the tower's last norm


def packed_forward(
    model: LlavaOnevisionForConditionalGeneration, batch: PackedBatch
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...]]:
    """Run the model on packed rows: each question attends to the prompt and itself, at the positions it has alone.

    Returns the features of the pictures' patches (N, GRID * GRID, width) and of the frames' pooled patches (M,
    FRAME_TOKENS, width), each None if there are none, and the language model's hidden states (B, T, width): the
    embeddings, then each layer's output, the last one normalised.
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
    """Return the first two results of `packed_forward`."""
    features = project(model, batch.pixels) if len(batch.pixels) else None
    frames = None if batch.frames is None else model.model.apply_pooling(project(model, batch.frames))
    return features, frames


def _viewed(model: LlavaOnevisionForConditionalGeneration, features: Tensor, view: View) -> Tensor:
    """Arrange features (N, GRID * GRID, width) as a view (N, VIEW_TOKENS[view], width).

    Base view and grid view show the same pixels, so the tower runs once. The grid view has a newline after each row; a
    base view without a grid view has one at its end.
    """
    newline = model.model.image_newline.to(features.dtype)
    if view == "base":
        return torch.cat((features, newline.expand(len(features), 1, -1)), 1)
    rows = features.unflatten(1, (GRID, GRID))
    grid = torch.cat((rows, newline.expand(len(features), GRID, 1, -1)), 2).flatten(1, 2)
    return torch.cat((features, grid), 1) if view == "both" else grid


def _placed(embeddings: Tensor, where: Tensor, values: Tensor) -> Tensor:
    return embeddings.masked_scatter(where[..., None], values.to(embeddings.dtype))


def question_mask(segments: Tensor, prefix: int) -> Tensor:
    """Return what the tokens after the prefix may attend to, bool (B, 1, T - prefix, T)."""
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
    """Attend causally in the prefix and by `question_mask` after it; without a mask, everything to everything.

    Plain matrix products are, with the backward pass on a CPU, twice as fast as the fused kernels for a prefix of one
    picture. They form the whole causal matrix, so beyond LONG_PREFIX the fused kernel is faster.
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
    """Return the logits (N, vocabulary) at the N positions with a target, and these targets (N)."""
    here = batch.targets != IGNORED
    return F.linear(hidden[here].float(), model.lm_head.weight.float()), batch.targets[here]


def picture_patches(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Return the hidden states of the pictures' patches (N, GRID * GRID, width) without newlines; if there are two
    views, of the later one."""
    tokens = hidden[batch.ids == batch.image].unflatten(0, (-1, VIEW_TOKENS[batch.view]))
    if batch.view == "base":
        return tokens[:, :BASE_TOKENS]
    return tokens[:, -GRID_TOKENS:].unflatten(1, (GRID, GRID + 1))[:, :, :GRID].flatten(1, 2)


def frame_patches(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Return the hidden states of the frames' pooled patches (B, F, FRAME_TOKENS, width)."""
    frames = batch.frame_index.shape[1]
    tokens = hidden[batch.ids == batch.video].unflatten(0, (-1, frames * FRAME_TOKENS + 1))
    return tokens[:, :-1].unflatten(1, (frames, FRAME_TOKENS))
