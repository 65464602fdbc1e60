"""What a method is given of a layer, `Prompt`, and what it gives back, `Kept`."""

import zlib
from dataclasses import dataclass

import torch

from ..kernels.compact import compact
from .rotary import Rotary


@dataclass(frozen=True)
class Prompt:
    """What a cluster may know of what it compresses, in one layer: a prompt, or while decoding the stored entries.

    Attributes:
        layer_idx: place of the layer among those that are compressed.
        num_layers: how many layers are compressed.
        lengths: real tokens of each row (while decoding: its entries, of the KV head that has most).
        budgets: entries to keep per KV head, one number per row; with adaptive heads their mean.
        scaling: factor of q·k before the softmax.
        padding: LongTensor (batch, 1 or kv_heads) of leading columns that hold nothing, or None where there are none.
        vision: bool (batch, columns), True at image and video tokens, or None where they are unknown. In a later chunk
            of a prompt (batch, kv_heads, columns), as KV heads then hold different entries; `vision_by_head` is both.
        vision_rank: in a later chunk, LongTensor (batch, kv_heads, columns): the vision tokens of the row before each.
        frame_tokens: vision tokens per frame of each row's video, 0 where unknown; empty where no tokens are known.
        protected: bool (batch, columns), True at what must stay, such as text where only vision tokens are evicted.
        protected_lengths: how many columns of each row that is; empty where nothing is protected.
        row_seeds: one integer per row, a checksum of its tokens: randomness that follows the row, not the batch.
        module: the model's attention module, for what a score needs of its weights (`o_proj`).
        rotary: how the prompt's columns are rotated (while decoding: the latest), for a cluster that asks for it.
        window: how many of the last queries the method scores with (`KVCluster.query_window`).
        cluster: the `KVCluster` that scores, for a layer budget that takes options of its method.
        head_budget, safeguard, pyramid_beta, merge, merge_modality: see `kvcompress.policy.Engine`; None is the
            cluster's own choice.
        columns: while decoding, and in a later chunk, LongTensor (batch, kv_heads, entries): the column of the sequence
            that each entry comes from; None in a prompt, where it is its place.
        seen: likewise, the columns of the sequence so far.
        tokens: likewise, the real tokens of each row so far, evicted ones included.
        accumulated: for a cluster that accumulates, while decoding is to evict: what `observe` has added up for each
            column so far, (batch, kv_heads, columns).
        likeness: the `Kept.likeness` of the eviction before this one, None at the first.
        read_again: for a cluster with a second pass: what each column received in it, (batch, kv_heads, columns).
    """

    layer_idx: int
    num_layers: int
    lengths: list[int]
    budgets: list[int]
    scaling: float
    padding: torch.Tensor | None = None
    vision: torch.Tensor | None = None
    vision_rank: torch.Tensor | None = None
    frame_tokens: tuple[int, ...] = ()
    protected: torch.Tensor | None = None
    protected_lengths: tuple[int, ...] = ()
    row_seeds: tuple[int, ...] = ()
    module: torch.nn.Module | None = None
    rotary: Rotary | None = None
    window: int = 0
    cluster: object = None
    head_budget: str | None = None
    safeguard: float = 0.2
    pyramid_beta: float = 20.0
    merge: str | None = None
    merge_modality: str = "any"
    columns: torch.Tensor | None = None
    seen: int | None = None
    tokens: tuple[int, ...] = ()
    accumulated: torch.Tensor | None = None
    likeness: torch.Tensor | None = None
    read_again: torch.Tensor | None = None

    @property
    def vision_by_head(self) -> torch.Tensor | None:
        """`vision` as (batch, 1 or kv_heads, columns)."""
        return self.vision[:, None] if self.vision is not None and self.vision.ndim == 2 else self.vision


@dataclass(frozen=True)
class Kept:
    """What lives on: keys and values (batch, kv_heads, kept, head_dim), and the columns of the input that they come
    from, LongTensor (batch, kv_heads, kept), ascending; -1 marks the unused leading slots of a row or head that
    keeps fewer. `memory` (batch, kv_heads, kept): what a cluster that accumulates remembers of each. `likeness`
    (batch, kv_heads): from which on evicted entries were merged, where merging has such a threshold."""

    keys: torch.Tensor
    values: torch.Tensor
    indices: torch.Tensor
    memory: torch.Tensor | None = None
    likeness: torch.Tensor | None = None


def gather(keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, memory: torch.Tensor | None = None) -> Kept:
    """The entries at `indices`, as in `Kept.indices`; what stands in unused slots does not matter."""
    memory = None if memory is None else memory.gather(2, indices.clamp(min=0))
    return Kept(*compact(keys, values, indices), indices, memory)


def uniform_noise(prompt: Prompt, kv_heads: int, columns: int, seed: int | str) -> torch.Tensor:
    """Numbers drawn evenly from [0, 1), (batch, kv_heads, columns), zero at pads. The draw follows the seed, the layer
    and the row's own tokens: it is the same alone, in any batch and on any device, and another one at each eviction."""
    noise = torch.zeros(len(prompt.lengths), kv_heads, columns)
    for row, length in enumerate(prompt.lengths):
        tokens = prompt.tokens[row] if prompt.tokens else length
        key = f"{seed} {prompt.layer_idx} {prompt.row_seeds[row]} {tokens}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        noise[row, :, columns - length :] = torch.rand(kv_heads, length, generator=generator)
    return noise
