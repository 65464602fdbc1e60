"""A first prompt whose prefix is already computed: only the rest passes through the model, at once or in pieces.

Attention is causal, so a prefix has the same queries, keys and values whatever follows. The model itself computes a
prompt's embeddings, images included, and positions; a pre-forward hook on the text decoder then only passes on the next
columns. Each layer attends to all columns up to them, and after the last ones the method gets the whole prompt's
states, as in a prefill. It therefore keeps the same entries.

The prefix comes from other prompts (see `prefix_cache.PrefixCache`) and, if a prompt is read in pieces, from the passes
before, so it grows."""

from collections.abc import Callable
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache, say_once
from ..cache.layer import CompressedLayer, Listener
from ..cache.prefix_tree import Columns, Path, PrefixTree
from ..cache.resumed import Beginning
from ..cache.scope import States
from ..errors import KVCompressError
from ..policy.policy import Policy
from ..scoring.rotary import Rotary
from .chunked_prefill import before_pass, columns_of
from .rotary import watch_rotary

# Types of RoPE whose angles depend on the prompt's length.
ROTATED_BY_LENGTH = ("dynamic", "longrope")
# To resume a prompt copies the prefix and attends under a mask, which saves time only where the prefix is at least this
# share of the prompt: a chat template alone is not. A prompt in pieces pays for both anyway.
WORTH_RESUMING = 1 / 8


class ResumedPrompt:
    """One prompt on its way through a text decoder: call `attach` before each forward pass and `remove` after it.

    Attributes:
        is_through: whether the latest pass read the last of the prompt.
        nbytes: bytes of the states of its pieces so far.
    """

    def __init__(self, piece: int | None = None):
        """`piece` is the most tokens in one pass; None: everything after the prefix."""
        self._piece, self._tokens = piece, None
        self._kwargs: dict | None = None  # the text decoder's arguments, for the whole prompt
        self._known = 0  # columns of the batch in the prefix
        self._read: list[Columns] = []  # by pass: each layer's states, then their rotation
        self._states: dict[int, Columns] = {}
        self._rotation: Columns = []
        self.is_through, self.nbytes = True, 0

    @property
    def is_begun(self) -> bool:
        """Whether a pass has reached the decoder."""
        return self._kwargs is not None

    def attach(
        self,
        decoder: PreTrainedModel,
        cache: CompressedCache,
        wanted: object,
        tree: PrefixTree | None = None,
        identity: object = None,
    ) -> "list[ResumedPrompt]":
        """Let the prefill announced to `cache` start after the known prefix.

        Args:
            wanted: the model's `logits_to_keep`, the number of last tokens whose logits are requested; 1 for a prompt
                in pieces.
            tree: prefixes of other prompts; only prompts with the same `identity` share.

        Returns:
            The objects that undo this; none if the whole prompt passes through the model.
        """
        if self._piece is None and (tree is None or not isinstance(wanted, int) or wanted < 1):
            return []
        if (reason := why_whole(decoder, cache)) is not None:
            self._warn(cache, reason)
            return []
        self._cache, self._tree, self._identity = cache, tree, identity
        self._wanted = wanted if self._piece is None else 1
        self._handles = [before_pass(decoder, self._feed)]
        with suppress(KVCompressError):  # unknown rotation: methods that need it were rejected before
            self._handles += watch_rotary(decoder, self._rotate)
        return [self]

    def _feed(self, kwargs: dict) -> dict:
        """Return the decoder's arguments for the next columns, given those for the whole prompt."""
        self._handles[0].remove()
        if not self.is_begun and not self._begin(kwargs):
            return kwargs
        cache, tokens, known = self._cache, self._tokens, self._known
        stop = tokens.columns if self._piece is None else min(known + self._piece, tokens.columns)
        self.is_through, self._stop = stop == tokens.columns, stop
        if self._tree is not None or not self.is_through:
            self._handles += [layer.listen(self._listener(layer)) for layer in cache.layers]
        if not known and self.is_through:
            return kwargs
        cache.announced, cache.resumed_at = tokens, known
        so_far = tokens if self.is_through else tokens.columns_from(0, stop)
        for place, layer in enumerate(cache.layers):
            layer.resume(so_far, known, self._beginning(place))
        return columns_of(self._kwargs, known, stop, tokens.columns)

    def _begin(self, kwargs: dict) -> bool:
        """Look up the prompt's prefix. Returns False if the prompt cannot be cut."""
        tokens = self._cache.announced
        try:
            columns_of(kwargs, 0, tokens.columns, tokens.columns)
        except KVCompressError:
            reason = "the text decoder's arguments cannot be cut, such as a mask of image tokens that see each other"
            self._warn(self._cache, reason)
            return False
        self._tokens, self._kwargs = tokens, kwargs
        self._pads = [tokens.columns - length for length in tokens.lengths]
        if self._tree is not None:
            self._find()
        self._first = self._known
        return True

    def _warn(self, cache: CompressedCache, reason: str) -> None:
        """Warn, once per reason, if a prompt of several pieces is prefilled whole."""
        if self._piece is not None and cache.announced.columns > self._piece:
            say_once(f"prefill_tokens={self._piece}: prompts are prefilled whole, because {reason}")

    def _find(self) -> None:
        tokens = self._tokens
        self._given = [given_by(self._kwargs, row, pads) for row, pads in enumerate(self._pads)]
        self._paths: list[Path] = [self._tree.find(self._identity, given) for given in self._given]
        rest = max(length - path.tokens for length, path in zip(tokens.lengths, self._paths, strict=True))
        self._known = max(tokens.columns - max(rest, self._wanted), 0)
        if self._piece is None and self._known < WORTH_RESUMING * tokens.columns:
            self._known = 0
        self._tree.reused_tokens += sum(max(self._known - pads, 0) for pads in self._pads)

    def _beginning(self, place: int) -> Beginning:
        def beginning() -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
            queries = self._computed(3 * place) if self.is_through else None
            return queries, self._computed(3 * place + 1), self._computed(3 * place + 2)

        return beginning

    def _computed(self, part: int) -> torch.Tensor:
        """Return a part of the known columns' states, (batch, ..., columns, size); zeros at pads."""
        read = [each[part] for each in self._read]
        if not self._first:
            return torch.cat(read, dim=-2)
        found = self._found(part)  # on the tree's device
        return torch.cat([found.to(read[0].device), *read], dim=-2) if read else found

    def _found(self, part: int) -> torch.Tensor:
        """Return a part of the states that other prompts have computed."""
        size = next(path.computed(part, 0) for path in self._paths if len(path.nodes) > 1)
        rows = []
        for path, pads in zip(self._paths, self._pads, strict=True):
            tokens = max(self._first - pads, 0)
            row = path.computed(part, tokens) if tokens else size
            rows.append(torch.nn.functional.pad(row, (0, 0, self._first - tokens, 0)))
        return torch.stack(rows)

    def _rotate(self, rotary: Rotary) -> None:
        """Set the rotation of all columns, given that of the columns that pass through the model."""
        self._rotation = rotary.per_column()
        if not self._cache.policy.watches_rotary or not self.is_through:
            return
        if self._known:
            first = 3 * len(self._cache.layers)
            known = [self._computed(first + i).to(new.device) for i, new in enumerate(self._rotation)]
            whole = [torch.cat([old, new], dim=1) for old, new in zip(known, self._rotation, strict=True)]
            rotary = rotary.of_columns(whole)
        self._cache.rotate(rotary)

    def _listener(self, layer: CompressedLayer) -> Listener:
        def note(states: States, compress: Callable[[], None]) -> None:
            new = self._stop - self._known
            parts = [part[:, :, -new:] for part in (states.queries, states.keys, states.values)]
            if self._known or not self.is_through:  # views of longer tensors, or needed after this pass
                parts = [part.clone() for part in parts]
            self._states[layer.layer_idx] = parts
            if self.is_through:
                compress()
            else:
                layer.restore(layer.memory)  # nothing is stored

        return note

    def remove(self) -> None:
        """Finish a pass: its states become part of the prefix if all layers have seen it. Calling this again does
        nothing."""
        for handle in self._handles:
            handle.remove()
        states, self._states = self._states, {}
        if len(states) == len(self._cache.layers):
            parts = [part for layer in self._cache.layers for part in states[layer.layer_idx]]
            self._read.append(parts + self._rotation)
            self.nbytes += sum(part.nbytes for part in parts)
            self._known = self._stop
            if self.is_through:
                self._remember()
        if self.is_through:
            self._read, self._kwargs = [], None

    def _remember(self) -> None:
        """Add the prompt to the tree, for other prompts."""
        computed = [torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0] for parts in zip(*self._read, strict=True)]
        for row, (given, pads) in enumerate(zip(self._given, self._pads, strict=True)):
            first = max(pads - self._first, 0)  # the row's own columns among those computed
            own = [part[row, ..., first:, :] for part in computed]
            self._tree.add(self._identity, given, own, self._first + first - pads)


def wanted_outputs(kwargs: dict) -> object:
    """Return `logits_to_keep` of a forward pass: of how many last tokens outputs are requested, None for all tokens."""
    of_all = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
    return None if of_all else kwargs.get("logits_to_keep")


def why_whole(decoder: PreTrainedModel, cache: CompressedCache) -> str | None:
    """Return why a prompt has to pass through the model as a whole; None if it can start after a prefix.

    For that, each token's states may depend only on the tokens before it, and all must be attended to here."""
    policy = cache.policy
    if reason := why_never(policy):
        return reason
    if policy.engine.scope == "context-first" and cache.announced.context != cache.announced.lengths:
        return "scope='context-first' has two parts of its own"
    if not all(isinstance(layer, CompressedLayer) for layer in cache.layers):
        return "the model has layers without full attention (sliding windows and the like) or without keys of their own"
    if is_rotated_by_length(decoder):
        return "the model rotates tokens by the prompt's length (dynamic NTK, LongRoPE)"
    if not cache.is_empty:
        return "the cache is not empty"
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return "gradients are computed, or the pass is compiled"
    return None


def why_never(policy: Policy) -> str | None:
    """Return why no prompt under a policy can start after a prefix, whatever the model; None if some can."""
    if policy.tokens is not None:
        return f"method {policy.method!r} drops tokens"
    if policy.cluster.second_pass:
        return f"method {policy.method!r} reads the prompt twice"
    if policy.cluster.reads_hidden:
        return f"method {policy.method!r} reads hidden states"
    if policy.engine.prefill_chunk is not None:
        return "prefill_chunk= has chunks of its own"
    return None


def is_rotated_by_length(decoder: PreTrainedModel) -> bool:
    return any(getattr(module, "rope_type", None) in ROTATED_BY_LENGTH for module in decoder.modules())


def given_by(kwargs: dict, row: int, pads: int) -> Columns:
    """Return what identifies a row's real tokens, each (tokens, size), from the text decoder's arguments."""
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
        vision = kwargs["visual_pos_masks"]  # packed: one row of features per True
        first = int(vision[:row].sum())
        for features in kwargs["deepstack_visual_embeds"]:
            part = features.new_zeros(vision.shape[1], features.shape[1])
            mine = vision[row].to(features.device)
            part[mine] = features[first : first + int(mine.sum())]
            parts.append(part)
    return [part[pads:] for part in parts]
