"""`SlotCache`: the compressed contents of many sequences, as the cache of one decode step over all of them."""

import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from ..cache.cache import CompressedCache
from ..cache.layer import CompressedLayer
from ..cache.other_layers import layer_names
from ..device import on_device, own_dtypes
from ..errors import KVCompressError
from ..scoring.rotary import Rotary
from .layer import DecodingLayer, SlidingSlotLayer, SlotLayer, Slots

Sizes = list[int]  # rows of a slot in each layer


class SlotCache(Cache):
    """A cache with a slot for each sequence; prompts are compressed in their own caches. Starts without slots, see
    `resize`.

    Attributes:
        policy: the policy of all sequences.
    """

    is_prompt = False

    def __init__(self, like: CompressedCache, is_fixed: bool = False):
        """`like` is the filled cache of any of the sequences; `is_fixed` says whether every step has the same
        shapes."""
        if getattr(like.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            raise KVCompressError(
                f"requests in flight need layers with their own keys: some of {like.config.model_type} attend to "
                "the keys of others"
            )
        self.policy, self.config, self._sizes = like.policy, like.config, [0] * len(like.layers)
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
            f"others ({layer_names([type(like)])})"
        )

    # -- slots

    @property
    def slots(self) -> int:
        return len(self._slots.seen)

    @property
    def held(self) -> dict[int, int]:
        """Number of tokens so far of the sequence in each slot in use."""
        return self._slots.held

    @property
    def sizes(self) -> Sizes:
        """Rows of each slot, by layer, which evictions may have made more."""
        return [max(rows, layer.rows) for rows, layer in zip(self._sizes, self.layers, strict=True)]

    def sizes_for(self, cache: CompressedCache, room: int) -> Sizes:
        """Return the slot size for a compressed prompt with `room` new tokens."""
        return [ours.rows_for(theirs, room) for ours, theirs in zip(self.layers, cache.layers, strict=True)]

    def nbytes_for(self, sizes: Sizes) -> int:
        """Return the bytes of a slot of this size."""
        return sum(layer.nbytes_for(size) for layer, size in zip(self.layers, sizes, strict=True))

    def resize(self, slots: int, sizes: Sizes) -> None:
        """Change the number and size of the slots.

        There must be one for each sequence; slots in use move to the front."""
        moves = {old: new for new, old in enumerate(self.held)}
        for layer, rows in zip(self.layers, sizes, strict=True):
            layer.resize(slots, rows, moves)
        self._sizes = sizes
        self._slots.held = {moves[slot]: seen for slot, seen in self.held.items()}
        self._slots.seen = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._slots.seen[: len(moves)] = torch.tensor(list(self.held.values()), dtype=torch.long)
        self._slots.active = torch.arange(slots, device=self._device) < len(moves)
        if moves and (rotary := self._slots.rotary) is not None:  # for an eviction that is tried again
            self._slots.rotary = rotary.rows(on_device(list(moves), rotary.cos.device))

    def fill(self, slot: int, cache: CompressedCache) -> None:
        """Move a compressed prompt into a slot. `sizes` must allow its new tokens."""
        seen = cache.seen_tokens
        for layer, theirs, rows in zip(self.layers, cache.layers, self.sizes, strict=True):
            layer.fill(slot, theirs, rows)
        self.held[slot] = seen
        self._slots.seen[slot], self._slots.active[slot] = seen, True

    def free(self, slot: int) -> None:
        """Drop the sequence in a slot."""
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
        """Finish a step, in which every slot in use got a token."""
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
        self._slots.rotary = None
        for layer in self.layers:
            layer.take_back()

    def evict(self) -> None:
        """Reduce the sequences that are due to the decode budget. Can be called again after it broke off.

        What a choice leaves of each head is copied to the host while the next layer chooses."""
        if self.policy.decode is None:
            return
        with own_dtypes(self._device):
            replace = None
            for choose in [each for layer in self.layers for each in layer.evictions()]:
                try:
                    chosen = choose()
                finally:  # a choice that was made is not made again
                    if replace is not None:
                        replace()
                replace = chosen
            if replace is not None:
                replace()

    # -- for the session

    def start(self, *announced: object) -> bool:
        """Announce a forward pass, which is never a prompt."""
        return False

    def rotate(self, rotary: Rotary) -> None:
        """Set the rotation of the step's queries, before the first layer."""
        self._slots.rotary = rotary

    def end(self) -> None:
        """End the forward pass."""
