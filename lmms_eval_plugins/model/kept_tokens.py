"""Which tokens of a prompt each layer and KV head kept, as one JSON entry per answered question."""

import base64
import io
import zlib
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.scoring.vision import vision_token_mask

from .image_layout import Layout, layouts, painted, strips
from .prompts import ChatProcessor, ChatPrompt, on_device

LONGEST_SIDE = 768  # of a stored image
JPEG_QUALITY = 82


@dataclass(frozen=True)
class KeptSets:
    """The kept sets of the compressed layers.

    Attributes:
        columns: layer -> [row][KV head] -> the columns that the layer stores.
        importance: layer -> how much the answer needs each of the prompt's columns, (rows, KV heads, columns); filled
            only by `hindsight`.
    """

    columns: dict[int, list[list[torch.Tensor]]]
    importance: dict[int, torch.Tensor]

    @classmethod
    def of(cls, cache: CompressedCache) -> "KeptSets":
        layers = [layer.layer_idx for layer in cache.compressed_layers]
        importance = {layer: cache.answer_scores(layer) for layer in layers}
        return cls(
            {layer: cache.kept_indices(layer) for layer in layers},
            {layer: worth.cpu() for layer, worth in importance.items() if worth is not None},
        )


def kept_mask(kept: KeptSets, row: int, real: torch.Tensor) -> np.ndarray:
    """Return whether each real token of a prompt is stored, bool (layers, KV heads, tokens).

    Args:
        row: the prompt's row in `kept` (beam search has several rows per prompt).
        real: bool (columns,), False at the prompt's padding, on the CPU.
    """
    heads = max(len(rows[row]) for rows in kept.columns.values())
    mask = np.zeros((len(kept.columns), heads, len(real)), dtype=bool)
    for place, rows in enumerate(kept.columns.values()):
        for head, columns in enumerate(rows[row]):
            mask[place, head, columns[columns < len(real)].numpy()] = True  # beyond it: the answer's own tokens
    return mask[..., real.numpy()]


@dataclass(frozen=True)
class Shown:
    """The part of a question's overlay that is the same under every method.

    Attributes:
        real: bool (columns,), False at the prompt's padding.
        vision: bool (tokens,), True for the real tokens that belong to images and videos.
        pieces: the other real tokens as text.
        images: one JSON object per run of vision tokens, with its `layout`, and for an image also its `size` and its
            `jpeg` in base64.
    """

    real: torch.Tensor
    vision: torch.Tensor
    pieces: list[str]
    images: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        chat: ChatProcessor,
        prompt: ChatPrompt,
        inputs: dict[str, torch.Tensor],
        row: int,
    ) -> "Shown":
        """Build it for the question in row `row` of a batch's `inputs`."""
        ids, mask = inputs["input_ids"][row], inputs.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[row].bool()
        vision = vision_token_mask(model.config, inputs["input_ids"])[row][real].cpu()
        found = []
        if bool(vision.any()):
            pictures = [painted(*image.size) for image in prompt.images]
            seen = on_device(chat.inputs([replace(prompt, images=pictures)]), model.device)
            found = layouts(model, chat.processor, seen)
        images = [{"jpeg": base64.b64encode(jpeg(image)).decode(), "size": list(image.size)} for image in prompt.images]
        # Which tokens belong to which image may be unknown: then list images and strips separately.
        if len(images) != len(found):
            note = found[0].note if found else ""
            found = [Layout(0, 0, note=note) for _ in images] + strips(vision, note)
            images += [{} for _ in found[len(images) :]]
        for one, layout in zip(images, found, strict=True):
            one["layout"] = asdict(layout)
        pieces = [chat.tokenizer.decode([token]) for token in ids[real].cpu()[~vision].tolist()]
        return cls(real.cpu(), vision, pieces, images)


def record(shown: Shown, kept: KeptSets, place: int, questions: int) -> dict[str, Any]:
    """Return the JSON entry from which the overlay of one answered question is drawn.

    Args:
        kept: the kept sets of the batch's cache.
        place: the question's index among the batch's `questions`.
    """
    rows = len(next(iter(kept.columns.values())))
    row = place * (rows // questions)  # the first beam
    stored = kept_mask(kept, row, shown.real)
    vision = shown.vision.numpy()
    entry = {
        "layers": list(kept.columns),
        "kv_heads": stored.shape[1],
        "vision": packed_bits(stored[..., vision]),
        "text": packed_bits(stored[..., ~vision]),
        "pieces": shown.pieces,
        "images": shown.images,
    }
    if kept.importance:
        worth = np.zeros(stored.shape, dtype=np.float32)
        for number, layer in enumerate(kept.columns):
            worth[number] = kept.importance[layer][row][:, shown.real].numpy()
        entry["needs"] = {
            "vision": packed_worth(worth[..., vision], worth.max(2)),
            "text": packed_worth(worth[..., ~vision], worth.max(2)),
        }
    return entry


def packed_worth(worth: np.ndarray, most: np.ndarray) -> dict[str, Any]:
    """Pack non-negative numbers (layers, heads, tokens) into JSON: their shape, and the square roots of their shares of
    their head's `most` (layers, heads), in 256 levels, deflated, in base64."""
    share = worth / np.maximum(most, np.finfo(np.float32).tiny)[..., None]
    levels = (255 * np.sqrt(share)).round().astype(np.uint8).tobytes()
    return {"shape": list(worth.shape), "levels": base64.b64encode(zlib.compress(levels, 9)).decode()}


def jpeg(image: Image.Image) -> bytes:
    """Encode an image as JPEG, scaled down to at most LONGEST_SIDE pixels a side."""
    small = image.convert("RGB")
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def packed_bits(mask: np.ndarray) -> dict[str, Any]:
    """Pack a bool array (layers, heads, tokens) into JSON: its shape, and its bits in C order, deflated, in base64."""
    bits = np.packbits(mask, bitorder="little").tobytes()
    return {"shape": list(mask.shape), "bits": base64.b64encode(zlib.compress(bits, 9)).decode()}
