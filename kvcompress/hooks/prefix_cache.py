"""Prompts that begin alike: what the model computes of their common beginning is kept, and computed once.

Attention is causal, so that queries, keys and values of everything before the first token that differs are the same.
They wait in a radix tree (see `cache.prefix_tree`). A prompt's embeddings, with the images in them, and its positions
are made by the model itself; a hook on the way into the text decoder looks up how much of them it has seen before and
lets the rest pass. Each layer attends over all of it and hands the method the whole prompt's states, as a prefill
would: it keeps what it keeps without, whatever it looks at.
"""

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.layer import CompressedLayer, Listener
from ..cache.prefix_tree import Columns, Path, PrefixTree
from ..cache.resumed import Beginning
from ..cache.scope import States
from ..errors import KVCompressError
from ..scoring.rotary import Rotary
from .chunked_prefill import columns_of
from .model import adapters_at_work
from .rotary import watch_rotary

# Of these the angle of a token's rotation depends on how long its prompt is.
ROTATED_BY_LENGTH = ("dynamic", "longrope")


class PrefixCache:
    """Keeps prompts' states for other prompts that begin alike: several questions about one image, video or document.

    ```python
    prefixes = kvcompress.PrefixCache(gb=4)
    with kvcompress.compress(model, "snapkv", 0.2, prefix_cache=prefixes):
        for question in questions:  # each with the same image
            output = model.generate(**question, max_new_tokens=16)
    prefixes.reused_tokens
    ```

    It serves any number of methods, generations and models one after the other; only prompts of the same model in the
    same state (adapters, attention implementation, dtype) share. Where a method changes the prefill (token methods,
    methods that read the prompt twice or see hidden states, `prefill_chunk=`), and in models with sliding windows,
    nothing is shared; nor while gradients are computed, or where logits of more than the last tokens are asked for.

    Attributes:
        prompt_tokens: real tokens of all prompts so far.
        reused_tokens: those of them that did not pass through the model again.
    """

    def __init__(self, gb: float, device: str | None = None):
        """Hold nothing yet.

        Args:
            gb: gigabytes (2**30 bytes) to hold; 0 keeps nothing. A prompt that passes through the model needs memory of
                its own besides. What was used least recently leaves first.
            device: where it is held, such as "cpu" for a model on a GPU; None: where the model is.

        Raises:
            KVCompressError: for a negative size.
        """
        if not gb >= 0:
            raise KVCompressError(f"gb={gb}: the size of a prefix cache in gigabytes is 0 or more")
        self._tree = PrefixTree(int(min(gb * 2**30, sys.maxsize)), device)
        self._models: weakref.WeakKeyDictionary[PreTrainedModel, object] = weakref.WeakKeyDictionary()
        self.prompt_tokens = self.reused_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._tree.nbytes

    def clear(self) -> None:
        """Forget everything: after a model's weights were changed."""
        self._tree.clear()

    def attach(
        self, decoder: PreTrainedModel, attention: str, cache: CompressedCache, wanted: object
    ) -> list[RemovableHandle]:
        """Let the prefill that `cache` was told of go on behind what is known of its beginning.

        Args:
            decoder: the model's, which attends by the implementation `attention`.
            wanted: for how many of the last tokens logits are asked for, the model's `logits_to_keep`.

        Returns:
            What undoes it; nothing where nothing can be shared.
        """
        self.prompt_tokens += sum(cache.announced.lengths)
        is_few = isinstance(wanted, int) and wanted > 0
        if not self._tree.room or not is_few or not shares_beginnings(decoder, cache):
            return []
        model = self._models.setdefault(decoder, object())  # unlike an id, it is nobody else's afterwards
        identity = (model, attention, decoder.dtype, *adapters_at_work(decoder))
        return [_PromptOnItsWay(self, decoder, identity, cache, wanted)]


class _PromptOnItsWay:
    """One prompt's forward pass; `remove` ends it, and remembers the prompt if all layers have seen it."""

    def __init__(
        self, prefixes: PrefixCache, decoder: PreTrainedModel, identity: object, cache: CompressedCache, wanted: int
    ):
        self._prefixes, self._tree, self._identity = prefixes, prefixes._tree, identity
        self._cache, self._tokens, self._wanted = cache, cache.announced, wanted
        self._pads = [self._tokens.columns - length for length in self._tokens.lengths]
        self._paths: list[Path] = []
        self._known = 0  # of the batch's columns
        self._given: list[Columns] = []
        self._states: dict[int, Columns] = {}  # of each layer, what was not known
        self._rotary: Rotary | None = None
        self._handles = [decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True)]
        self._handles += self._watch(decoder, cache)

    def _watch(self, decoder: PreTrainedModel, cache: CompressedCache) -> list[RemovableHandle]:
        try:
            return watch_rotary(decoder, self._rotate)
        except KVCompressError:  # not known: then no method that asks for it gets here
            return []

    def _before_decoder(self, decoder: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._handles[0].remove()
        tokens = self._tokens
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
        try:
            columns_of(kwargs, 0, tokens.columns, tokens.columns)
        except KVCompressError:  # some argument cannot be cut
            return None
        self._given = [_given(kwargs, row, pads) for row, pads in enumerate(self._pads)]
        self._paths = [self._tree.find(self._identity, given) for given in self._given]
        rest = max(length - path.tokens for length, path in zip(tokens.lengths, self._paths, strict=True))
        self._known = max(tokens.columns - max(rest, self._wanted), 0)
        for layer in self._cache.layers:
            self._handles.append(layer.listen(self._listener(layer)))
        if not self._known:
            return None
        self._prefixes.reused_tokens += sum(max(self._known - pads, 0) for pads in self._pads)
        self._cache.resumed_at = self._known
        for place, layer in enumerate(self._cache.layers):
            layer.resume(tokens, self._known, self._beginning(place))
        return (), columns_of(kwargs, self._known, tokens.columns, tokens.columns)

    def _beginning(self, place: int) -> Beginning:
        return lambda: (self._computed(3 * place), self._computed(3 * place + 1), self._computed(3 * place + 2))

    def _computed(self, part: int) -> torch.Tensor:
        """Of the columns that are known, (batch, ..., columns, size); zeros in pads."""
        size = next(path.computed(part, 0) for path in self._paths if len(path.nodes) > 1)
        rows = []
        for path, pads in zip(self._paths, self._pads, strict=True):
            tokens = max(self._known - pads, 0)
            row = path.computed(part, tokens) if tokens else size
            rows.append(torch.nn.functional.pad(row, (0, 0, self._known - tokens, 0)))
        return torch.stack(rows)

    def _rotate(self, rotary: Rotary) -> None:
        """The model rotates the columns that pass through it: say how all are rotated."""
        if self._known:
            first = 3 * len(self._cache.layers)
            names = ["cos", "sin", "positions", *(["least"] if rotary.least is not None else [])]
            parts = {}
            for i, name in enumerate(names):
                new = getattr(rotary, name)
                known = self._computed(first + i).to(new.device)
                known = known if new.ndim == 3 else known[..., 0]
                parts[name] = torch.cat([known, new], dim=1)
            rotary = replace(rotary, **parts)
        self._rotary = rotary
        if self._cache.policy.watches_rotary:
            self._cache.rotate(rotary)

    def _listener(self, layer: CompressedLayer) -> Listener:
        def note(states: States, compress: Callable[[], None]) -> None:
            parts = (states.queries, states.keys, states.values)
            self._states[layer.layer_idx] = [part[:, :, self._known :].clone() for part in parts]
            compress()

        return note

    def remove(self) -> None:
        """Doing it again does nothing."""
        for handle in self._handles:
            handle.remove()
        states, self._states = self._states, {}
        if len(states) < len(self._cache.layers):
            return
        computed = [part for layer in self._cache.layers for part in states[layer.layer_idx]]
        if (rotary := self._rotary) is not None:
            parts = (rotary.cos, rotary.sin, rotary.positions, rotary.least)
            parts = [part[:, self._known :] for part in parts if part is not None]
            computed += [part if part.ndim == 3 else part[..., None] for part in parts]
        for row, (given, pads) in enumerate(zip(self._given, self._pads, strict=True)):
            first = max(pads - self._known, 0)  # of what passed through, the row's own
            own = [part[row, ..., first:, :] for part in computed]
            self._tree.add(self._identity, given, own, self._known + first - pads)


def shares_beginnings(decoder: PreTrainedModel, cache: CompressedCache) -> bool:
    """Whether a first prompt's states depend on nothing but the tokens before it, and all are attended to here."""
    if not all(isinstance(layer, CompressedLayer) for layer in cache.layers) or torch.is_grad_enabled():
        return False
    if not cache.is_empty or torch.compiler.is_compiling():
        return False
    if any(getattr(module, "rope_type", None) in ROTATED_BY_LENGTH for module in decoder.modules()):
        return False
    policy = cache.policy
    changes = policy.tokens is not None or policy.cluster.second_pass or policy.cluster.reads_hidden
    return not changes and policy.engine.prefill_chunk is None


def _given(kwargs: dict, row: int, pads: int) -> Columns:
    """What tells a row's real tokens from others, each (tokens, size), from the arguments of the text decoder."""
    parts, positions = [], kwargs.get("position_ids")
    for name in ("inputs_embeds", "per_layer_inputs"):
        if kwargs.get(name) is not None:
            parts.append(kwargs[name][row].flatten(1))
    if kwargs.get("input_ids") is not None:
        parts.append(kwargs["input_ids"][row][:, None])
    if positions is None:  # the decoder counts columns
        positions = torch.arange(parts[0].shape[0], device=parts[0].device)[None]
    rows = positions.shape[-2]
    parts.append(positions[..., row % rows, :].reshape(-1, parts[0].shape[0]).T)
    if kwargs.get("deepstack_visual_embeds") is not None:
        vision = kwargs["visual_pos_masks"]  # packed: one line per True, row by row
        first = int(vision[:row].sum())
        for features in kwargs["deepstack_visual_embeds"]:
            part = features.new_zeros(vision.shape[1], features.shape[1])
            mine = vision[row].to(features.device)
            part[mine] = features[first : first + int(mine.sum())]
            parts.append(part)
    return [part[pads:] for part in parts]
