"""Where the kept entries live: `CompressedCache`, a transformers cache, and its layers."""

import zlib
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .budget import Budget
from .clusters.base import KVCluster, Prompt, make_cluster, method_info
from .errors import KVCompressError
from .scoring import pad_columns
from .vision import vision_token_mask


@dataclass(frozen=True)
class Chunk:
    """The tokens of one forward pass that will be compressed: a prompt, or a second prompt on a filled cache.

    Attributes:
        lengths: real tokens of each row.
        padding: LongTensor (batch,) of left pad columns per row, or None where no row has any.
        vision: bool (batch, columns) at vision tokens, or None where only embeddings are known.
        row_seeds: a checksum of each row's real tokens.
    """

    lengths: list[int]
    padding: torch.Tensor | None
    vision: torch.Tensor | None
    row_seeds: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        batch: int,
        columns: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> "Chunk":
        """From the model's inputs: `input_ids` (batch, columns) or None, and the 2-D padding mask
        (batch, at least columns) or None. One synchronisation with the device."""
        mask = None if attention_mask is None else attention_mask[:, -columns:].bool()
        lengths = [columns] * batch if mask is None else mask.sum(1).tolist()
        padding = None
        if min(lengths) < columns:
            padding = columns - torch.tensor(lengths, device=mask.device)
            if not torch.equal(mask, ~pad_columns(padding, columns)):
                raise KVCompressError("the attention mask is not left-padded: set padding_side='left'")
        if input_ids is None:
            return cls(lengths, padding, None, (0,) * batch)
        rows = input_ids.cpu().numpy()
        seeds = tuple(zlib.crc32(row[columns - n :].tobytes()) for row, n in zip(rows, lengths, strict=True))
        return cls(lengths, padding, vision_token_mask(config, input_ids), seeds)


class CompressedLayer(CacheLayerMixin):
    """One layer's kept entries, at KV-head granularity, in a buffer with room for the tokens to come.

    A prompt pass has two steps. `update` only stages the new states and returns everything that is attended over;
    after the attention, `compress` lets the cluster choose and stores its choice. A decoded token is written in
    place behind the entries.

    Attributes:
        keys, values: (batch, kv_heads, stored, head_dim), views of the buffers.
        seen: tokens seen, per row and including pads: the true position of the next token.
        indices: LongTensor (batch, kv_heads, slots) with the column that each of the first slots holds, ascending, -1
            in an unused slot; None means column = slot. Slots behind them hold the columns from `indexed` on.
        visible: bool (batch, capacity), False at slots that hold nothing of their row; None where there is no such.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, layer_idx: int, num_layers: int, cluster: KVCluster, budget: Budget, room: int | None):
        super().__init__()
        self.layer_idx, self.num_layers = layer_idx, num_layers
        self.cluster, self.budget, self.room = cluster, budget, room
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = None
        self.key_buffer = self.value_buffer = None
        self.indices = self.visible = None
        self.staged: tuple[torch.Tensor, torch.Tensor] | None = None
        self.chunk: Chunk | None = None
        self.stored = self.seen = self.indexed = 0
        self.prompt_lengths: list[int] = []
        self.prompt_kept: torch.Tensor | None = None
        self.is_initialized = False

    # -- what transformers asks of a layer ------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.stored + query_length, self.seen - self.stored

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """New states (batch, kv_heads, new, head_dim) in; the keys and values to attend over out."""
        if self.staged is not None:
            raise KVCompressError(
                f"layer {self.layer_idx} was never compressed: the model's attention does not go through "
                "transformers' attention interface, or the model is not inside kvcompress.compress(...)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[2]
        if self.chunk is not None:
            self.staged = (key_states, value_states)
            if self.stored:
                key_states = torch.cat([self.keys, key_states], dim=2)
                value_states = torch.cat([self.values, value_states], dim=2)
        elif self.stored:
            self._append(key_states, value_states)
            key_states, value_states = self.keys, self.values
        else:
            raise KVCompressError(
                "a CompressedCache was given to a model that is not inside kvcompress.compress(...) or attach(...)"
            )
        # The attention function receives these very objects: this is how it finds its layer.
        key_states = key_states.view_as(key_states)
        key_states.kv_layer = self
        return key_states, value_states

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.stored:
            self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if not self.stored:
            return
        indices = indices.to(self.device)
        for name in ("key_buffer", "value_buffer", "indices", "visible", "prompt_kept"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, tensor[indices])
        self.prompt_lengths = [self.prompt_lengths[row] for row in indices.tolist()]
        self._set_views()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; only decoded ones can be."""
        removed = abs(tokens_to_remove)
        if removed > self.seen - self.indexed:
            raise KVCompressError(
                f"cannot crop {removed} tokens: only the {self.seen - self.indexed} decoded since the last prompt "
                "can be taken back, what was evicted is gone"
            )
        self.stored, self.seen = self.stored - removed, self.seen - removed
        self._set_views()

    # -- prompt pass ----------------------------------------------------------------------------------------------

    @property
    def is_prompt(self) -> bool:
        """True while the first prompt is staged: nothing is stored before it, so the model's own mask is right."""
        return self.staged is not None and not self.stored

    def compress(self, queries: torch.Tensor, scaling: float) -> None:
        """Store what the cluster keeps of the staged prompt. `queries`: (batch, heads, new, head_dim), rotated."""
        (keys, values), chunk = self.staged, self.chunk
        self.staged = self.chunk = None
        padding = None if chunk.padding is None else chunk.padding.to(keys.device)
        budgets = [self.budget(length) for length in chunk.lengths]
        first_column = self.seen - keys.shape[2]
        if budgets == chunk.lengths:  # nothing to drop: pads stay too, so that every shape is the full cache's
            visible = None
            if padding is not None:
                visible = ~pad_columns(padding, keys.shape[2])
            kept = torch.tensor(chunk.lengths, device=keys.device)
            indices = None
        else:
            prompt = Prompt(
                self.layer_idx, self.num_layers, chunk.lengths, budgets, scaling, padding,
                None if chunk.vision is None else chunk.vision.to(keys.device), chunk.row_seeds,
            )  # fmt: skip
            result = self.cluster.update_kv(queries, keys, values, prompt)
            keys, values, indices = result.keys, result.values, result.indices
            visible = indices[:, 0] >= 0 if min(budgets) < max(budgets) else None
            kept = (indices >= 0).sum(2).float().mean(1)
        self._store(keys, values, indices, visible, first_column)
        self.prompt_kept = kept if self.prompt_kept is None else self.prompt_kept + kept
        self.prompt_lengths = [
            a + b for a, b in zip(self.prompt_lengths or [0] * len(budgets), chunk.lengths, strict=True)
        ]

    def mask(self, query_length: int) -> torch.Tensor | None:
        """What `query_length` new queries may see of the stored entries and of themselves.

        Returns:
            bool (batch, 1, query_length, keys), True = attend; None where every query sees every key.
        """
        if self.staged is None:  # decode: the new token is stored already
            return None if self.visible is None else self.visible[:, None, None, : self.stored]
        batch = self.keys.shape[0]
        old = torch.ones(batch, self.stored, dtype=torch.bool, device=self.device)
        if self.visible is not None:
            old = self.visible[:, : self.stored]
        new = torch.ones(query_length, query_length, dtype=torch.bool, device=self.device).tril()
        new = new.expand(batch, 1, -1, -1)
        if self.chunk.padding is not None:
            # A pad query sees itself, so that its softmax is defined; nobody reads its output.
            itself = torch.eye(query_length, dtype=torch.bool, device=self.device)
            pads = pad_columns(self.chunk.padding.to(self.device), query_length)
            new = new & ~pads[:, None, None] | itself
        return torch.cat([old[:, None, None].expand(-1, 1, query_length, -1), new], dim=-1)

    # -- storage --------------------------------------------------------------------------------------------------

    def _store(self, keys, values, indices, visible, first_column: int) -> None:
        """Put a compressed chunk, whose columns start at `first_column`, behind what is stored."""
        if indices is not None or self.stored:
            if indices is None:
                indices = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
                if visible is not None:
                    indices = indices.masked_fill(~visible[:, None], -1)
            indices = torch.where(indices < 0, -1, indices + first_column)
            indices = torch.cat([self.columns(), indices], dim=2) if self.stored else indices
        old, new = self.stored, keys.shape[2]
        self._append(keys, values)
        if visible is not None:
            if self.visible is None:
                self.visible = torch.ones(keys.shape[0], self.key_buffer.shape[2], dtype=torch.bool, device=keys.device)
            self.visible[:, old : old + new] = visible
        self.indices = None if indices is None else indices.to(torch.int32)
        self.indexed = self.seen

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write states (batch, kv_heads, new, head_dim) behind the stored ones; grow where there is no room."""
        end = self.stored + keys.shape[2]
        if self.key_buffer is None or end > self.key_buffer.shape[2]:
            # Without a known answer length: an eighth more, so that a token costs a constant number of copies.
            first, room = self.key_buffer is None, max(32, end // 8)
            self._grow(end + (self.room if first and self.room is not None else room), keys, values)
        self.key_buffer[:, :, self.stored : end] = keys
        self.value_buffer[:, :, self.stored : end] = values
        self.stored = end
        self._set_views()

    def _grow(self, capacity: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        def larger(buffer, like):
            grown = like.new_empty(*like.shape[:2], capacity, like.shape[3])
            if buffer is not None:
                grown[:, :, : self.stored] = buffer[:, :, : self.stored]
            return grown

        self.key_buffer, self.value_buffer = larger(self.key_buffer, keys), larger(self.value_buffer, values)
        if self.visible is not None:
            grown = self.visible.new_ones(self.visible.shape[0], capacity)
            grown[:, : self.stored] = self.visible[:, : self.stored]
            self.visible = grown

    def _set_views(self) -> None:
        self.keys = self.key_buffer[:, :, : self.stored]
        self.values = self.value_buffer[:, :, : self.stored]

    def columns(self) -> torch.Tensor:
        """The column that each slot holds: LongTensor (batch, kv_heads, stored), -1 in an unused slot."""
        shape = self.keys.shape[:2]
        if self.indices is None:
            columns = torch.arange(self.stored, device=self.device).expand(*shape, -1)
        else:
            decoded = torch.arange(self.stored - self.indices.shape[2], device=self.device) + self.indexed
            columns = torch.cat([self.indices.long(), decoded.expand(*shape, -1)], dim=2)
        if self.visible is not None:
            columns = columns.masked_fill(~self.visible[:, None, : self.stored], -1)
        return columns

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, spare room and index included."""
        tensors = (self.key_buffer, self.value_buffer, self.indices, self.visible)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


class CompressedCache(DynamicCache):
    """A transformers cache that compresses each prompt as it is stored.

    Give it to `generate` as `past_key_values` inside `kvcompress.compress(...)` or `kvcompress.attach(...)`, or let
    `compress` make one per generation. Sliding-window and other special layers keep transformers' own storage.

    Args:
        config: the model's config.
        method: name of a registered method; None is `full`.
        ratio, budget: what is kept, see `Budget`; neither is needed for `full`.
        max_new_tokens: tokens to come that get room at once; without it, room grows by an eighth when it is used up.
        options: the method's options.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: str | None = None,
        ratio: float | None = None,
        budget: int | None = None,
        max_new_tokens: int | None = None,
        **options: object,
    ):
        cluster, limit = make_cluster(method, **options), method_budget(method, ratio, budget)
        super().__init__(config=config)
        self.config = config
        for layer_idx, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[layer_idx] = CompressedLayer(layer_idx, len(self.layers), cluster, limit, max_new_tokens)
        if not self.compressed_layers:
            raise KVCompressError(f"a {config.model_type} model has no layer with full attention: nothing to compress")

    def start(
        self, batch: int, columns: int, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> None:
        """Announce a forward pass over (batch, columns) tokens. A prompt will be compressed; one more token on a
        filled cache is a decode step, which is only written down."""
        if columns == 1 and self.seen_tokens:
            return
        chunk = Chunk.of(self.config, batch, columns, input_ids, attention_mask)
        for layer in self.compressed_layers:
            layer.chunk, layer.staged = chunk, None

    @property
    def compressed_layers(self) -> list[CompressedLayer]:
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def seen_tokens(self) -> int:
        """Tokens seen, kept or not, pads included."""
        return self.get_seq_length()

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for keys, values and their index, spare room included."""
        return sum(
            layer.nbytes
            if isinstance(layer, CompressedLayer)
            else sum(t.untyped_storage().nbytes() for t in (layer.keys, layer.values) if t is not None)
            for layer in self.layers
        )

    def kept_indices(self, layer_idx: int) -> list[list[torch.Tensor]]:
        """The columns of the sequence whose keys layer `layer_idx` stores: [row][kv_head] -> LongTensor, ascending.

        Columns count from the left of the padded batch, pads included (a pad is never listed); decoded tokens have
        the columns behind the prompt.
        """
        layer = self.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            raise KVCompressError(f"layer {layer_idx} is not compressed: it is a {type(layer).__name__}")
        if not layer.stored:
            raise KVCompressError(f"layer {layer_idx} has not seen a prompt yet")
        return [[head[head >= 0].cpu() for head in row] for row in layer.columns()]

    def realised_ratios(self) -> list[list[float]]:
        """Fraction of each row's real prompt tokens that was kept, mean over KV heads: [compressed layer][row]."""
        return [
            [kept / length for kept, length in zip(layer.prompt_kept.tolist(), layer.prompt_lengths, strict=True)]
            for layer in self.compressed_layers
        ]


def method_budget(method: str | None, ratio: float | None, budget: int | None) -> Budget:
    """The budget of a method. `full` keeps all, so it takes no other; every other method needs one."""
    name = method_info(method).name
    if name != "full":
        if ratio is None and budget is None:
            raise KVCompressError(f"method {name!r} needs ratio= (fraction kept, in (0, 1]) or budget= (entries kept)")
        return Budget(ratio, budget)
    if budget is not None or ratio not in (None, 1):
        raise KVCompressError(f"method 'full' compresses nothing: ratio={ratio}, budget={budget} cannot be honoured")
    return Budget(ratio=1.0)
