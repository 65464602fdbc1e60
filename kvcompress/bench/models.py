"""What is measured on: a hub id, a local path, or a shape, that is a config with random weights."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import KVCompressError, unknown_name
from ..hooks.model import text_decoder
from .shapes import SHAPES


def source(model: str | None, shape: str | None) -> dict[str, Any]:
    """What `standalone.load` loads: exactly one of a hub id or path, and a shape. Raises KVCompressError."""
    if (model is None) == (shape is None):
        raise KVCompressError(f"give either a model or --shape, not {model!r} and {shape!r}")
    if shape is None:
        return {"pretrained": model}
    if shape not in SHAPES:
        raise unknown_name("there is no shape", shape, SHAPES)
    return {"config": SHAPES[shape]}


def weight_bytes_read(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step reads: the decoder and the output head, of the input embeddings one row."""
    decoder, head, table = text_decoder(model), model.get_output_embeddings(), model.get_input_embeddings()
    weights = {id(weight): weight for part in (decoder, head) if part is not None for weight in part.parameters()}
    if head is None or table.weight is not head.weight:
        weights.pop(id(table.weight), None)
    return sum(nbytes(weight) for weight in weights.values())


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
