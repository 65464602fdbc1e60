"""For methods that read the context a second time: the model is fed its own prompt again, on its full cache, and every
layer notes which entries that needs. Nothing of the second pass is stored."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from .scoring import pad_columns

if TYPE_CHECKING:
    from .cache import CompressedCache


@dataclass(frozen=True)
class DecoderInputs:
    """What a prompt gave to the text decoder: embeddings (batch, columns, hidden), with the image features in them, and
    position ids (batch, columns) or (axes, batch, columns), None where the decoder counts columns."""

    embeddings: torch.Tensor
    position_ids: torch.Tensor | None

    @classmethod
    def of(cls, decoder: PreTrainedModel, kwargs: dict) -> "DecoderInputs":
        """From the keyword arguments of the decoder's forward pass."""
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            embeddings = decoder.get_input_embeddings()(kwargs["input_ids"])
        return cls(embeddings, kwargs.get("position_ids"))

    def following(self, seen: int, pads: torch.Tensor) -> torch.Tensor:
        """Position ids of tokens of text behind the prompt, in the shape of the prompt's own; `pads` (batch, tokens)
        are not counted."""
        steps = (~pads).cumsum(1)
        if self.position_ids is None:
            return seen - 1 + steps
        last = self.position_ids.amax(-1, keepdim=True)
        if last.ndim == 3:  # several axes: behind an image, text goes on from the largest
            last = last.amax(0, keepdim=True).expand_as(last)
        return last + steps


@dataclass(frozen=True)
class Reading:
    """A chunk of the prompt that is being read again, as a layer sees it.

    Attributes:
        chunk: the columns of the compressed part whose entries are scored.
        pads: bool (batch, chunk), True at the chunk's pad columns.
    """

    chunk: slice
    pads: torch.Tensor


def received(
    queries: torch.Tensor,
    keys: torch.Tensor,
    fed_keys: torch.Tensor,
    pads: torch.Tensor,
    scaling: float,
    block: int = 128,
) -> torch.Tensor:
    """The most attention that each key of a chunk receives from any query that reads the chunk again, (batch, kv_heads,
    chunk): weights over the chunk's keys and, causally, over the fed tokens themselves (KVzip,
    https://arxiv.org/abs/2505.23416, section 3.2), the largest over queries and the query heads of a KV head.

    Args:
        queries: (batch, heads, fed, head_dim); the fed tokens are the chunk's, behind an instruction or not.
        keys, fed_keys: (batch, kv_heads, chunk or fed, head_dim).
        pads: as in `Reading`.
    """
    batch, kv_heads, fed, _ = fed_keys.shape
    chunk = keys.shape[2]
    fed_pads = torch.nn.functional.pad(pads, (fed - chunk, 0))  # the instruction has none
    all_keys = torch.cat([keys, fed_keys], dim=2).float()
    hidden = torch.cat([pads, fed_pads], dim=1)[:, None, None, None]
    best = torch.zeros(batch, kv_heads, chunk, device=keys.device)
    for start in range(0, fed, block):
        rows = slice(start, min(start + block, fed))
        grouped = queries[:, :, rows].float().unflatten(1, (kv_heads, -1))
        logits = grouped @ all_keys[:, :, None].transpose(3, 4) * scaling
        column = torch.arange(chunk + fed, device=keys.device) - chunk
        future = column > torch.arange(rows.start, rows.stop, device=keys.device)[:, None]
        weights = logits.masked_fill(hidden | future, -torch.inf).softmax(-1)[..., :chunk]
        weights = weights.nan_to_num(0.0).masked_fill(fed_pads[:, None, None, rows, None], 0.0)
        best = torch.maximum(best, weights.amax((2, 3)))
    return best


@torch.no_grad()
def read_again(decoder: PreTrainedModel, inputs: DecoderInputs, cache: "CompressedCache") -> None:
    """Feed the prompt that waits in the cache once more, chunk by chunk; each layer scores its entries."""
    waiting = [layer for layer in cache.compressed_layers if layer.pending is not None]
    if not waiting:
        return
    cluster, part = cache.policy.cluster, waiting[0].pending.part
    embeddings = inputs.embeddings
    if part.source is not None:
        embeddings = embeddings.gather(1, part.source[..., None].expand(-1, -1, embeddings.shape[2]))
    columns = part.keys.shape[2]
    pads = torch.zeros(len(embeddings), columns, dtype=torch.bool, device=embeddings.device)
    if part.prompt.padding is not None:
        pads = pad_columns(part.prompt.padding, columns)[:, 0]
    ids = torch.tensor(cluster.instruction, dtype=torch.long, device=embeddings.device)
    instruction = decoder.get_input_embeddings()(ids).expand(len(embeddings), -1, -1)
    others = [layer for layer in cache.layers if layer not in waiting]
    before = [dict(layer.__dict__) for layer in others]  # sliding windows must not slide over it
    # Chunks are counted from the end, where all rows are aligned: a row is cut as it would be alone.
    for end in range(columns, 0, -cluster.chunk_size):
        chunk = slice(max(end - cluster.chunk_size, 0), end)
        fed = torch.cat([instruction, embeddings[:, chunk]], dim=1)
        fed_pads = torch.nn.functional.pad(pads[:, chunk], (len(ids), 0))
        for layer in waiting:
            layer.reading = Reading(chunk, pads[:, chunk].to(layer.device))
        decoder(
            inputs_embeds=fed,
            position_ids=inputs.following(cache.seen_tokens, fed_pads),
            past_key_values=cache,
            use_cache=True,
        )
        for layer, state in zip(others, before, strict=True):
            layer.__dict__.update(state)
    for layer in waiting:
        layer.reading = None
