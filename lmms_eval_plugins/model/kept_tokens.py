"""Which tokens of a prompt were kept, per layer and KV head: one JSON-ready entry of an answered question."""

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
from .media import ChatPrompt
from .prompts import ChatProcessor, on_device

LONGEST_SIDE = 768  # of a stored image
JPEG_QUALITY = 82


@dataclass(frozen=True)
class KeptSets:
    """What the layers that are compressed hold.

    Attributes:
        columns: layer -> [row][KV head] -> the columns that the layer stores.
        foreseen: layer -> what the prompt's columns are worth to the answer, (rows, KV heads, columns); empty but for
            `hindsight`.
    """

    columns: dict[int, list[list[torch.Tensor]]]
    foreseen: dict[int, torch.Tensor]

    @classmethod
    def of(cls, cache: CompressedCache) -> "KeptSets":
        layers = [layer.layer_idx for layer in cache.compressed_layers]
        foreseen = {layer: cache.foreseen(layer) for layer in layers}
        return cls(
            {layer: cache.kept_indices(layer) for layer in layers},
            {layer: worth.cpu() for layer, worth in foreseen.items() if worth is not None},
        )


def kept_mask(kept: KeptSets, row: int, real: torch.Tensor) -> np.ndarray:
    """bool (layers, KV heads, tokens): whether each real token of a prompt's row is stored.

    Args:
        row: among those of `kept` (beam search has several for each prompt).
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
    """What the overlays of a question show whatever is kept: the same under every method.

    Attributes:
        real: bool (columns,), False at the prompt's padding.
        vision: bool (tokens,), of the real tokens: those of images and videos.
        pieces: the others, as text.
        images: JSON, each with its `layout`, and where it is an image with its `size` and its `jpeg` in base64.
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
        """Of the question that is row `row` of a batch's `inputs`."""
        ids, mask = inputs["input_ids"][row], inputs.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[row].bool()
        vision = vision_token_mask(model.config, inputs["input_ids"])[row][real].cpu()
        found = []
        if bool(vision.any()):
            pictures = [painted(*image.size) for image in prompt.images]
            seen = on_device(chat.inputs([replace(prompt, images=pictures)]), model.device)
            found = layouts(model, chat.processor, seen)
        images = [{"jpeg": base64.b64encode(jpeg(image)).decode(), "size": list(image.size)} for image in prompt.images]
        if len(images) != len(found):  # not known which tokens are whose: pictures and strips stand apart
            note = found[0].note if found else ""
            found = [Layout(0, 0, note=note) for _ in images] + strips(vision, note)
            images += [{} for _ in found[len(images) :]]
        for one, layout in zip(images, found, strict=True):
            one["layout"] = asdict(layout)
        pieces = [chat.tokenizer.decode([token]) for token in ids[real].cpu()[~vision].tolist()]
        return cls(real.cpu(), vision, pieces, images)


def record(shown: Shown, kept: KeptSets, place: int, questions: int) -> dict[str, Any]:
    """What the overlays of one answered question need; JSON, with the images as JPEG in base64 under `jpeg`.

    Args:
        kept: of the batch's cache; the question is at `place` among the batch's `questions`.
    """
    rows = len(next(iter(kept.columns.values())))
    row = place * (rows // questions)  # of beams, the first
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
    if kept.foreseen:
        worth = np.zeros(stored.shape, dtype=np.float32)
        for place, layer in enumerate(kept.columns):
            worth[place] = kept.foreseen[layer][row][:, shown.real].numpy()
        entry["needs"] = {
            "vision": packed_worth(worth[..., vision], worth.max(2)),
            "text": packed_worth(worth[..., ~vision], worth.max(2)),
        }
    return entry


def packed_worth(worth: np.ndarray, most: np.ndarray) -> dict[str, Any]:
    """Numbers (layers, heads, tokens), none below 0: their shape, and the root of each's share of its head's `most`
    (layers, heads) in one of 256 levels, deflated, in base64."""
    share = worth / np.maximum(most, np.finfo(np.float32).tiny)[..., None]
    levels = (255 * np.sqrt(share)).round().astype(np.uint8).tobytes()
    return {"shape": list(worth.shape), "levels": base64.b64encode(zlib.compress(levels, 9)).decode()}


def jpeg(image: Image.Image) -> bytes:
    """The image as JPEG, its longest side at most LONGEST_SIDE."""
    small = image.convert("RGB")
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def packed_bits(mask: np.ndarray) -> dict[str, Any]:
    """A bool array (layers, heads, tokens): its shape, and its bits in C order, deflated, in base64."""
    bits = np.packbits(mask, bitorder="little").tobytes()
    return {"shape": list(mask.shape), "bits": base64.b64encode(zlib.compress(bits, 9)).decode()}
