"""Drop tokens before a decoder layer, so that it and all later layers process and cache fewer columns.

The hooks of one prefill do this on an unmodified model. Before a layer they gather the remaining columns (hidden
states, rotary embeddings, mask); after it they write the results back among all columns. Everything between two layers
therefore keeps its shape: the final norm, the logits, and what a model adds to the hidden states on the way (DeepStack)
need no special handling. Dropped columns carry their last hidden state, which nothing reads.

Rows differ in length: a row's remaining columns are aligned to the right, and the leading columns of a shorter row hold
columns that it dropped, masked like pads.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.scope import States
from ..device import on_device, own_dtypes
from ..errors import KVCompressError
from ..scoring.returned import unchanged
from ..scoring.windows import pad_columns
from ..tokens.base import Attention, Tokens
from .attention import base_mask_format
from .tower_attention import TowerRecorder
from .video_frames import FrameRecorder


def prune(
    decoder: PreTrainedModel,
    base: str,
    cache: CompressedCache,
    tower: TowerRecorder | None,
    frames: FrameRecorder,
    inputs: dict[str, Any],
) -> list[RemovableHandle]:
    """Make the forward pass announced to `cache` drop vision tokens by its token method.

    Args:
        decoder: the text model with the decoder layers.
        base: the model's attention implementation before compression.
        tower, frames: the recorders of the vision side, for a method that uses it.
        inputs: the model's, with `input_ids` (batch, columns).

    Returns:
        The handles that undo this.
    """
    layers, method = getattr(decoder, "layers", None), cache.policy.method
    if len(cache.compressed_layers) != len(cache.layers):
        raise KVCompressError(
            f"method {method!r} needs a model whose layers all have full attention: {cache.config.model_type} has "
            "sliding windows or similar layers"
        )
    if layers is None or len(layers) != len(cache.layers):
        raise KVCompressError(f"method {method!r} finds no decoder layers in {type(decoder).__name__}")
    pruning = Pruning(base, cache)
    if not pruning.is_needed:
        return []
    check_labels(inputs.get("labels"), pruning.vision, method)
    watches = {"tower": [tower], "frames": [frames], "video": [tower, frames]}.get(cache.policy.tokens.sees, [])
    if None in watches:
        raise KVCompressError(f"method {method!r} works inside kvcompress.compress(...), not attach(...)")
    # Images are already encoded when the first decoder layer runs.
    pruning.look = lambda: {name: seen for watch in watches for name, seen in watch.take(inputs["input_ids"]).items()}
    return pruning.attach(layers)


def check_labels(labels: torch.Tensor | None, vision: torch.Tensor, method: str) -> None:
    """Raise KVCompressError if a label is to be predicted at a vision token: where it is dropped, its logits mean
    nothing. Both are (batch, columns)."""
    if labels is not None and (vision[:, :-1] & (labels[:, 1:] != -100).to(vision.device)).any():
        raise KVCompressError(
            f"labels= after a vision token do not go with method {method!r}, which may drop that token before it "
            "predicts them: set them to -100"
        )


class Pruning:
    """One prefill that becomes shorter from layer to layer.

    Attributes:
        source: LongTensor (batch, left), the prompt column of each remaining column.
        vision: bool (batch, left), True at vision tokens.
        padding: LongTensor (batch, 1), the number of leading columns that hold nothing; None if there are none.
        look: returns the vision side's states for the method, as fields of `Tokens`.
        stages: decoder layer -> vision tokens kept from there on, one number per row.
        vision_counts: for each row, the number of vision tokens in the prompt and after each choice so far.
    """

    def __init__(self, base: str, cache: CompressedCache):
        self.base, self.cache, self.method = base, cache, cache.policy.tokens
        self.whole = whole = cache.announced
        counts, num_layers = whole.vision_lengths, len(cache.layers)
        places, kept = self._places(num_layers), [cache.policy.budget(n) for n in counts]
        budgets = [self.method.budgets(k, n, num_layers) for k, n in zip(kept, counts, strict=True)]
        self.stages = dict(zip(places, map(list, zip(*budgets, strict=True)), strict=True))
        self.counts, self.vision_counts = counts, [[count] for count in counts]
        device = whole.vision.device
        self.source = torch.arange(whole.columns, device=device).expand(len(counts), -1)
        self.vision, self.padding = whole.vision, whole.padding
        self.rows = torch.arange(len(counts), device=device)[:, None]
        self.scores = self.prepared = self.hidden = None
        self.look: Callable[[], dict[str, Any]] = dict
        self.sight: dict[str, Any] = {}
        self.mask = None

    def _places(self, num_layers: int) -> list[int]:
        """Return the method's `layers`. Raises KVCompressError for those that the model, or what it sees, lacks."""
        found, first = self.method.layers(num_layers), int(self.method.sees == "attention")
        places = [*found] if isinstance(found, Iterable) and all(isinstance(each, Integral) for each in found) else []
        if not places or places != sorted(set(places)) or places[0] < first or places[-1] >= num_layers:
            raise KVCompressError(
                f"{type(self.method).__name__}.layers returned {found}: with sees={self.method.sees!r} they ascend, "
                f"from {first} to {num_layers - 1}"
            )
        return places

    @property
    def is_needed(self) -> bool:
        sets_budgets = self.method.sets_budgets and any(self.counts)
        return sets_budgets or any(budgets != self.counts for budgets in self.stages.values())

    def attach(self, layers: torch.nn.ModuleList) -> list[RemovableHandle]:
        handles = [layers[0].register_forward_pre_hook(self._prepare, with_kwargs=True)]
        first = min(self.stages)
        for index in range(first, len(layers)):
            handles.append(layers[index].register_forward_pre_hook(self._entering(index), with_kwargs=True))
            handles.append(layers[index].register_forward_hook(self._leave))
        for index in self.stages:
            if index and self.method.sees != "embeddings":
                handles.append(self.cache.layers[index - 1].listen(partial(self._listen, index)))
        return handles

    def _tokens(self, **known: Any) -> Tokens:
        so_far = {"prepared": self.prepared, "counts": self.vision_counts}
        prompt = {"num_layers": len(self.cache.layers), "row_seeds": self.whole.row_seeds}
        return Tokens(self.vision, self.padding, **so_far, **prompt, **self.sight, **known)

    def _asked(self, function: Callable[[Tokens], Any], tokens: Tokens) -> Any:
        """Return what a function of the method returns. Raises KVCompressError if it changes the tokens' states."""
        seen = tokens.attention
        states = (tokens.hidden, tokens.vision, *((seen.queries, seen.keys) if seen else ()))
        with unchanged(f"method {self.cache.policy.method!r}", *states):
            return function(tokens)

    def _prepare(self, layer: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._move_to(hidden.device)
        self.sight = self.look()
        with own_dtypes(hidden.device):
            tokens = self._tokens(hidden=hidden, budgets=self.stages[min(self.stages)])
            self.prepared = self._asked(self.method.prepare, tokens)

    def _listen(self, index: int, states: States, compress: Callable[[], None]) -> None:
        """Score the tokens while the layer before the choice at layer `index` attends."""
        self._move_to(states.keys.device)
        attention = Attention(states.queries, states.keys, states.scaling)
        self.scores = self._asked(self.method.score, self._tokens(attention=attention, budgets=self.stages[index]))
        compress()

    def _entering(self, index: int):
        def enter(layer: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            hidden, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
            self._move_to(hidden.device)
            if index in self.stages:
                hidden = self._choose(index, hidden)
                self.mask = self._mask(kwargs.get("attention_mask"))
            self.hidden = hidden
            per_column = {
                name: self._remaining(given[..., None])[..., 0]
                for name, given in kwargs.items()
                if (name == "position_ids" and given is not None) or _is_per_column(given, self.whole.columns)
            }
            kwargs = {**kwargs, **per_column}
            if (embeddings := kwargs.get("position_embeddings")) is not None:
                kwargs["position_embeddings"] = tuple(self._remaining(part) for part in embeddings)
            if "flash" in self.base:  # to it, gaps between position ids look like several packed sequences
                kwargs["position_ids"] = None
            kwargs["attention_mask"] = base_mask_format(self.base, self.mask, hidden.dtype)
            kwargs.pop("hidden_states", None)
            return (self._remaining(hidden), *rest), kwargs

        return enter

    def _leave(self, layer: torch.nn.Module, args: tuple, output: Any) -> Any:
        """Write a layer's result back among all columns."""
        left = output[0] if isinstance(output, tuple) else output
        self._move_to(left.device)
        hidden, self.hidden = self.hidden.to(left.device, copy=True), None
        hidden[self.rows, self.source] = left
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _move_to(self, device: torch.device) -> None:
        """Move what is known of the columns to a layer's device: layers may be on several (device_map="auto")."""
        for name in ("source", "vision", "padding", "rows", "prepared"):
            if (known := getattr(self, name)) is not None:
                setattr(self, name, known.to(device))

    def _remaining(self, states: torch.Tensor) -> torch.Tensor:
        """Return the remaining columns of states (..., batch or 1, columns, size)."""
        rows, source = self.rows.to(states.device), self.source.to(states.device)
        return states.expand(*states.shape[:-3], len(rows), -1, -1)[..., rows, source, :]

    def _choose(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Drop tokens before layer `index`; return the hidden states of all columns."""
        tokens = self._tokens(hidden=self._remaining(hidden), budgets=self.stages[index])
        with own_dtypes(hidden.device):
            scores, self.scores = self._asked(self.method.score, tokens) if self.scores is None else self.scores, None
            chosen, merged = self._asked(partial(self.method.checked_choice, scores), tokens)
        if merged is not tokens.hidden:
            hidden = hidden.clone()
            hidden[self.rows, self.source] = merged
        stays = tokens.real & (chosen | ~self.vision)
        kept = chosen.sum(1).tolist()
        self.vision_counts = [[*before, count] for before, count in zip(self.vision_counts, kept, strict=True)]
        lengths = [
            length - vision + budget
            for length, vision, budget in zip(self.whole.lengths, self.counts, kept, strict=True)
        ]
        left = max(lengths)
        order = stays.int().argsort(dim=1, stable=True)[:, -left:]  # a row's dropped tokens first
        used = stays.gather(1, order)
        self.source, self.vision = self.source.gather(1, order), (self.vision & stays).gather(1, order)
        if self.prepared is not None:
            self.prepared = self.prepared[self.rows, order]
        self.padding = None
        if min(lengths) < left:
            self.padding = left - on_device(lengths, order.device)[:, None]
        columns = torch.where(used, self.source, -1)
        self.cache.begin(replace(self.whole, source=columns, padding=self.padding), first_layer=index)
        return hidden

    def _mask(self, whole: torch.Tensor | dict | None) -> torch.Tensor | None:
        """Return bool (batch, 1, left, left), True = attend; None if `base` is causal by itself and nothing is padded.

        `whole` is the mask of all columns. A 4-D mask is used as it is (Molmo 2's vision tokens attend to each other in
        both directions); any other means causal attention."""
        left, device = self.source.shape[1], self.source.device
        if isinstance(whole, torch.Tensor) and whole.ndim == 4:
            visible = whole[:, 0, :, -self.whole.columns :]  # behind stored entries
            visible = visible if visible.dtype == torch.bool else visible == 0
            visible = visible.to(device).expand(len(self.rows), -1, -1)
            mask = visible[self.rows[..., None], self.source[..., None], self.source[:, None]][:, None]
        elif self.padding is None and self.base != "eager":
            return None
        else:
            mask = torch.ones(left, left, dtype=torch.bool, device=device).tril()[None, None]
        if self.padding is None:
            return mask
        itself = torch.eye(left, dtype=torch.bool, device=device)  # a pad query sees itself, so its softmax is defined
        return mask & ~pad_columns(self.padding, left)[:, :, None] | itself


def _is_per_column(given: object, columns: int) -> bool:
    """Whether an argument of a layer holds one value for each token, (batch or 1, columns)."""
    return isinstance(given, torch.Tensor) and given.ndim == 2 and given.shape[1] == columns
