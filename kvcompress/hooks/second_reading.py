"""For methods that read the context a second time, on the full cache, while every layer scores its entries.

Nothing of the second pass is stored."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache_name import CACHE
from ..device import on_device
from ..scoring.windows import pad_columns


@dataclass(frozen=True)
class DecoderInputs:
    """A prompt's inputs to the text decoder.

    Attributes:
        embeddings: (batch, columns, hidden), image features included.
        position_ids: (batch, columns) or (axes, batch, columns); None if the decoder counts columns itself.
        by_layer: embeddings for each layer, (batch, columns, layers, size); None if there are none (Gemma 3n and 4 have
            them).
    """

    embeddings: torch.Tensor
    position_ids: torch.Tensor | None
    by_layer: torch.Tensor | None = None

    @classmethod
    def of(cls, decoder: PreTrainedModel, kwargs: dict) -> "DecoderInputs":
        """Create the inputs from the keyword arguments of the decoder's forward pass."""
        embeddings, by_layer = kwargs.get("inputs_embeds"), kwargs.get("per_layer_inputs")
        if embeddings is None:
            embeddings, by_layer = embedded(decoder, kwargs["input_ids"])
        return cls(embeddings, kwargs.get("position_ids"), by_layer)

    @classmethod
    def watch(cls, decoder: PreTrainedModel, take: "Callable[[DecoderInputs], None]") -> RemovableHandle:
        """Pass the inputs of each forward pass to `take`, until the returned handle is removed."""
        names = list(inspect.signature(decoder.forward).parameters)

        def before_forward(decoder: PreTrainedModel, args: tuple, kwargs: dict) -> None:
            take(cls.of(decoder, dict(zip(names, args, strict=False)) | kwargs))

        return decoder.register_forward_pre_hook(before_forward, with_kwargs=True)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if part is not None)

    def to(self, device: torch.device | str) -> "DecoderInputs":
        """Return these inputs on a device."""
        return DecoderInputs(*(None if part is None else part.to(device) for part in vars(self).values()))

    def following(self, seen: int, pads: torch.Tensor) -> torch.Tensor:
        """Return position ids for text tokens that follow the prompt, in the shape of the prompt's own.

        `pads` (batch, tokens) are not counted."""
        steps = (~pads).cumsum(1)
        if self.position_ids is None:
            return seen - 1 + steps
        last = self.position_ids.amax(-1, keepdim=True)
        if last.ndim == 3:  # several axes: after an image, text continues from the largest
            counted = int(len(last) == 4)  # transformers numbers the columns before the three axes of M-RoPE
            axes = last[counted:]
            last = torch.cat([last[:counted], axes.amax(0, keepdim=True).expand_as(axes)])
        return last + steps


def embedded(decoder: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the `embeddings` and `by_layer` of tokens (batch, columns)."""
    embeddings = decoder.get_input_embeddings()(ids)
    by_layer = None
    if getattr(decoder, "hidden_size_per_layer_input", 0):
        names = inspect.signature(decoder.get_per_layer_inputs).parameters
        by_layer = decoder.get_per_layer_inputs(*[ids, embeddings][: len(names)])
    return embeddings, by_layer


@torch.no_grad()
def read_again(decoder: PreTrainedModel, inputs: DecoderInputs, cache: CompressedCache) -> None:
    """Feed the prompt that waits in the cache again, chunk by chunk; each layer scores its entries."""
    cluster, part = cache.policy.cluster, cache.compressed_layers[0].waiting.candidates
    embeddings, by_layer = inputs.embeddings, inputs.by_layer
    rows = torch.arange(len(embeddings), device=embeddings.device)[:, None]
    if part.source is not None:
        embeddings = embeddings[rows, part.source]
        by_layer = None if by_layer is None else by_layer[rows, part.source]
    columns = part.keys.shape[2]
    pads = torch.zeros(len(embeddings), columns, dtype=torch.bool, device=embeddings.device)
    if part.view.padding is not None:
        pads = pad_columns(part.view.padding, columns)[:, 0]
    ids = on_device(cluster.instruction, embeddings.device, torch.long)
    instruction = embedded(decoder, ids.expand(len(embeddings), -1))
    # Chunks are counted from each row's first token after its sinks, so a row is cut as it would be alone.
    first = pads.sum(1, keepdim=True)
    behind = max(part.view.lengths) - cluster.sinks
    for start in range(0, behind, cluster.chunk_size):
        width = min(cluster.chunk_size, behind - start)
        chunk = first + cluster.sinks + start + torch.arange(width, device=first.device)
        sinks = first + torch.arange(cluster.sinks, device=first.device)
        scored = torch.cat([sinks, chunk], dim=1)
        missing = scored >= columns  # shorter rows end earlier
        scored = scored.clamp(max=columns - 1)
        read = scored[:, cluster.sinks :]
        fed = {"inputs_embeds": torch.cat([instruction[0], embeddings[rows, read]], dim=1)}
        if by_layer is not None:
            fed["per_layer_inputs"] = torch.cat([instruction[1], by_layer[rows, read]], dim=1)
        fed_pads = torch.nn.functional.pad(missing[:, cluster.sinks :], (len(ids), 0))
        for layer in cache.compressed_layers:
            layer.read_again(scored.to(layer.device), missing.to(layer.device), cluster.sinks)
        with cache.other_layers_unchanged():  # sliding windows must not move
            decoder(**fed, position_ids=inputs.following(cache.seen_tokens, fed_pads), use_cache=True, **{CACHE: cache})
