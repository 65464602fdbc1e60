"""The tiny LLaVA-OneVision: configuration, tokenizer, processor, and the packed sequence it is trained on.

Model, tokenizer and processor are transformers' own classes. A 156 x 156 image is one anyres tile, so the
prompt holds it twice, as the base view (169 tokens) and as the grid view (13 rows of 13 and a newline, 182
tokens), like any image of the tower's own size in LLaVA-OneVision. Larger images take up to four tiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from lmms_eval_plugins.tiny_vlm.signs import GRID, PATCH, POST_PROMPT, PROMPT_WORDS, SIDE, Question

PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
BASE_TOKENS = GRID * GRID
GRID_TOKENS = GRID * (GRID + 1)
IMAGE_TOKENS = BASE_TOKENS + GRID_TOKENS
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'video' %}{{ '<video>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IGNORED = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over lower case: each prompt word is one token, all else is spelled byte by byte.

    So a word on a sign costs one token per character, in questions and in answers.
    """
    words = "|".join(map(re.escape, PROMPT_WORDS))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf" ?(?<![a-z])(?:{words})(?![a-z])|[\s\S]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than all prompt words need: every one becomes a single token
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{word} {word}" for word in PROMPT_WORDS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<image>", "<video>"],
        padding_side="left",
        model_max_length=2048,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionConfig:
    """2.4 M parameters: SigLIP of 3 layers, Qwen2 of 4 layers with 4 query and 2 key-value heads."""
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",  # SigLIP has no class token to leave out
        vision_aspect_ratio="anyres_max_9",
        tie_word_embeddings=True,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionProcessor:
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionVideoProcessor  # need torchvision

    pixels = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=PINPOINTS, **pixels),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(**pixels),
        num_image_tokens=BASE_TOKENS,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
        vision_aspect_ratio="anyres_max_9",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaOnevisionForConditionalGeneration:
    """Fresh weights. The tower's position embeddings start as 2-D sinusoids, in which "the patch to my right" is
    the same rotation everywhere."""
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(build_config(tokenizer))
    # The path to it differs between transformers releases.
    (positions,) = (
        p for n, p in model.model.vision_tower.named_parameters() if n.endswith("position_embedding.weight")
    )
    positions.data.copy_(0.5 * _sinusoids(positions.shape[1]))
    for layer in (model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2):
        nn.init.xavier_uniform_(layer.weight)  # transformers' default is ten times smaller and learns slower
    return model


def _sinusoids(width: int) -> Tensor:
    """(GRID * GRID, width): a quarter each of sin row, cos row, sin column, cos column."""
    frequencies = 2.5 * torch.exp(torch.linspace(0, -2.8, width // 4))  # radians per patch
    angle = torch.arange(GRID)[:, None] * frequencies
    columns = torch.cat((angle.sin(), angle.cos()), -1).expand(GRID, GRID, -1)
    return torch.cat((columns.transpose(0, 1), columns), -1).flatten(0, 1)


@dataclass
class PackedBatch:
    """Several questions about each image in one sequence; T is the longest row's length.

    Rows begin with the image, `image_start` tokens in; it ends at `image_end`. Without its base view it has only
    the GRID_TOKENS of the grid view: half the work, for the earlier part of the training.

    pixels (B, 3, SIDE, SIDE) uint8; ids, segments, positions and targets (B, T): `segments` is 0 for the image
    prefix, the question's number from 1, -1 for padding; `targets` holds the next token where it belongs to an
    answer, else IGNORED; labels (B, len(LABELS), GRID, GRID); kinds[row][question] as in `signs`.
    """

    pixels: Tensor
    ids: Tensor
    segments: Tensor
    positions: Tensor
    targets: Tensor
    labels: Tensor
    kinds: list[list[str]]
    image_start: int
    image_end: int

    def to(self, device: torch.device) -> PackedBatch:
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


class Packer:
    """Turns images with questions into a PackedBatch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.start, self.end = self.encode("<|im_start|>user "), self.encode("\n")
        self.image = tokenizer.convert_tokens_to_ids("<image>")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def segment(self, question: Question, post_prompt: bool) -> tuple[list[int], list[int]]:
        """ids and targets of one question with its answer, as the chat template lays them out."""
        prompt = question.text + (POST_PROMPT if post_prompt else "")
        asked = self.encode(f"{prompt}<|im_end|><|im_start|>assistant\n")
        answer = self.encode(f"{question.answer}<|im_end|>")
        targets = [IGNORED] * (len(asked) - 1) + answer + [IGNORED]
        return asked + answer, targets

    def batch(
        self,
        pixels: Tensor,
        asked: list[list[Question]],
        labels: Tensor,
        post_prompt: bool,
        base_view: bool = True,
    ) -> PackedBatch:
        image_tokens = IMAGE_TOKENS if base_view else GRID_TOKENS
        prefix = [*self.start, *[self.image] * image_tokens, *self.end]
        rows = []
        for questions in asked:
            ids, targets = list(prefix), [IGNORED] * len(prefix)
            segments, positions = [0] * len(ids), list(range(len(ids)))
            for number, question in enumerate(questions, start=1):
                segment_ids, segment_targets = self.segment(question, post_prompt)
                ids += segment_ids
                targets += segment_targets
                segments += [number] * len(segment_ids)
                positions += range(len(prefix), len(prefix) + len(segment_ids))
            rows.append((ids, segments, positions, targets))
        fills = (self.tokenizer.pad_token_id, -1, 0, IGNORED)
        longest = max(len(row[0]) for row in rows)
        ids, segments, positions, targets = (
            torch.tensor([row[i] + [fill] * (longest - len(row[i])) for row in rows]) for i, fill in enumerate(fills)
        )
        kinds = [[question.kind for question in questions] for questions in asked]
        image_start = len(self.start)
        image_end = image_start + image_tokens
        return PackedBatch(pixels, ids, segments, positions, targets, labels, kinds, image_start, image_end)


def project(model: LlavaOnevisionForConditionalGeneration, pixels: Tensor) -> Tensor:
    """(B, 3, SIDE, SIDE) uint8 -> (B, GRID * GRID, width): one language-model embedding per patch."""
    pixels = pixels.float() / 127.5 - 1  # the image processor's rescaling and normalisation
    tower = model.model.vision_tower(pixels, output_hidden_states=True)
    return model.model.multi_modal_projector(tower.hidden_states[-1])  # before the tower's last norm


def packed_forward(
    model: LlavaOnevisionForConditionalGeneration, batch: PackedBatch
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The model over packed rows: each question sees the image and itself, at the positions it has alone.

    Returns the projected features of the patches (B, GRID * GRID, width), and the language model's hidden
    states: the embeddings, then each layer's output, the last one normalised; (B, T, width) each.
    """
    inner = model.model
    features = project(model, batch.pixels)
    # Base view and grid view show the same pixels, so the tower runs once; the grid view has a newline after
    # each row.
    newline = inner.image_newline.to(features.dtype).expand(len(features), GRID, 1, -1)
    image = torch.cat((features.unflatten(1, (GRID, GRID)), newline), 2).flatten(1, 2)
    if batch.image_end - batch.image_start == IMAGE_TOKENS:
        image = torch.cat((features, image), 1)
    text = inner.language_model.embed_tokens(batch.ids)
    embeddings = torch.cat((text[:, : batch.image_start], image.to(text.dtype), text[:, batch.image_end :]), 1)
    output = inner.language_model(
        inputs_embeds=embeddings,
        attention_mask=question_mask(batch.segments),
        position_ids=batch.positions,
        output_hidden_states=True,
        use_cache=False,
    )
    return features, output.hidden_states


def question_mask(segments: Tensor) -> Tensor:
    """(B, 1, T - prefix, T) bool: what the tokens after the image prefix may attend to."""
    prefix = int((segments[0] == 0).sum())
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
    """Causal over the image prefix and `question_mask` for the rest; everything to everything without a mask.

    Plain matrix products: on a CPU at these lengths twice as fast, backward included, as the fused kernels.
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
        causal = torch.full((prefix, prefix), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
        rest = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
        first = attend(query[:, :, :prefix], key[:, :, :prefix], causal)
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


def grid_view(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """The hidden states of the grid view's patches, newlines left out: (B, GRID * GRID, width)."""
    rows = hidden[:, batch.image_end - GRID_TOKENS : batch.image_end].unflatten(1, (GRID, GRID + 1))
    return rows[:, :, :GRID].flatten(1, 2)
