"""`SlotCache`: what many sequences hold after their prompts, as the cache of one decode step over all of them."""

import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from ..cache.cache import LAYER_NAMES, CompressedCache
from ..cache.layer import CompressedLayer
from ..errors import KVCompressError
from ..scoring.rotary import Rotary
from .layer import DecodingLayer, SlotLayer, Slots
from .sliding import SlidingSlotLayer

Sizes = list[int]  # rows of a slot, in each layer


class SlotCache(Cache):
    """Slots for sequences whose prompts were compressed alone. Begins with none: see `resize`.

    Attributes:
        policy: of all sequences.
        sizes: of every slot.
    """

    is_prompt = False

    def __init__(self, like: CompressedCache, is_fixed: bool = False):
        """`like`: the filled cache of any of the sequences; `is_fixed`: whether every step has the same shapes."""
        if getattr(like.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            raise KVCompressError(
                f"requests in flight need layers with keys of their own: some of {like.config.model_type} attend to "
                "those of others"
            )
        self.policy, self.config, self.sizes = like.policy, like.config, [0] * len(like.layers)
        self._device = like.compressed_layers[0].device
        nothing = torch.zeros(0, dtype=torch.long, device=self._device)
        self._slots = Slots(nothing, nothing.bool(), torch.zeros(1, dtype=torch.long, device=self._device))
        super().__init__(
            layers=[self._layer(layer_idx, layer, is_fixed) for layer_idx, layer in enumerate(like.layers)]
        )

    def _layer(self, layer_idx: int, like: object, is_fixed: bool) -> DecodingLayer:
        if isinstance(like, CompressedLayer):
            return SlotLayer(like, self._slots, is_fixed)
        if type(like) is DynamicSlidingWindowLayer:
            return SlidingSlotLayer(like, layer_idx, self._slots)
        raise KVCompressError(
            f"requests in flight need layers with full attention or sliding windows: {self.config.model_type} has "
            f"others ({LAYER_NAMES.get(type(like), type(like).__name__)})"
        )

    # -- slots

    @property
    def slots(self) -> int:
        return len(self._slots.seen)

    @property
    def held(self) -> dict[int, int]:
        """Tokens so far of the sequence in each slot in use."""
        return self._slots.held

    def sizes_for(self, cache: CompressedCache, room: int) -> Sizes:
        """What a slot needs for a compressed prompt with `room` tokens to come."""
        return [ours.rows_for(theirs, room) for ours, theirs in zip(self.layers, cache.layers, strict=True)]

    def nbytes_for(self, sizes: Sizes) -> int:
        """Bytes of a slot of that size."""
        return sum(layer.nbytes_for(size) for layer, size in zip(self.layers, sizes, strict=True))

    def resize(self, slots: int, sizes: Sizes) -> None:
        """Have so many slots of that size. There must be one for each sequence; those in use come first then."""
        moves = {old: new for new, old in enumerate(self.held)}
        for layer, rows in zip(self.layers, sizes, strict=True):
            layer.resize(slots, rows, moves)
        self.sizes = sizes
        self._slots.held = {moves[slot]: seen for slot, seen in self.held.items()}
        self._slots.seen = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._slots.seen[: len(moves)] = torch.tensor(list(self.held.values()), dtype=torch.long)
        self._slots.active = torch.arange(slots, device=self._device) < len(moves)

    def fill(self, slot: int, cache: CompressedCache, room: int) -> None:
        """Take over a compressed prompt, with `room` tokens to come, of which there are enough in `sizes`."""
        seen = cache.seen_tokens
        for layer, theirs, rows in zip(self.layers, cache.layers, self.sizes, strict=True):
            layer.fill(slot, theirs, rows, room)
        self.held[slot] = seen
        self._slots.seen[slot], self._slots.active[slot] = seen, True

    def free(self, slot: int) -> None:
        """Forget the sequence in a slot."""
        del self.held[slot]
        self._slots.active[slot] = False
        for layer in self.layers:
            layer.free(slot)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, free slots included."""
        return sum(layer.nbytes for layer in self.layers)

    # -- a decode step

    def end_step(self) -> None:
        """A token was fed to every slot in use."""
        slots, window = self._slots, self.policy.query_window
        slots.seen += slots.active
        slots.steps += 1
        slots.cursor.fill_(slots.steps % window if window else 0)
        for slot in self.held:
            self.held[slot] += 1
        for layer in self.layers:
            layer.count()

    def take_back(self) -> None:
        """Undo a step that broke off."""
        for layer in self.layers:
            layer.take_back()

    def evict(self) -> None:
        """Bring the sequences whose turn it is back to the decode budget. May be called again where it broke off."""
        if self.policy.decode is not None:
            for layer in self.layers:
                layer.evict()

    # -- what a session asks of a cache

    def start(self, *announced: object) -> bool:
        """A forward pass begins; it is no prompt."""
        return False

    def rotate(self, rotary: Rotary) -> None:
        """Say how the step rotates its queries, before the first layer."""
        self._slots.rotary = rotary

    def end(self) -> None:
        """The forward pass is over."""
