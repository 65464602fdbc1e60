"""The benchmark's model: a hub id, a local path, or a shape, which is a config with random weights."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import KVCompressError, unknown_name
from ..hooks.model import text_decoder
from .shapes import SHAPES


def source(model: str | None, shape: str | None) -> dict[str, Any]:
    """Return the source for `standalone.load`, from either a hub id or path, or a shape. Raises KVCompressError."""
    if (model is None) == (shape is None):
        raise KVCompressError(f"give either a model or --shape, not {model!r} and {shape!r}")
    if shape is None:
        return {"pretrained": model}
    if shape not in SHAPES:
        raise unknown_name("there is no shape", shape, SHAPES)
    return {"config": SHAPES[shape]}


def weight_bytes_read(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a decode step reads: decoder and output head, but not the input embeddings."""
    decoder, head, table = text_decoder(model), model.get_output_embeddings(), model.get_input_embeddings()
    weights = {id(weight): weight for part in (decoder, head) if part is not None for weight in part.parameters()}
    if head is None or table.weight is not head.weight:
        weights.pop(id(table.weight), None)
    return sum(nbytes(weight) for weight in weights.values())


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
