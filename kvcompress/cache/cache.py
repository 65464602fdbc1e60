"""`CompressedCache`: a transformers cache that compresses each prompt as it is stored."""

import copy
import logging
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..clusters.calibrated import check_calibrated_for
from ..clusters.learned import check_learned_for
from ..device import on_device, own_dtypes
from ..errors import KVCompressError
from ..hooks.model import unwrapped
from ..hooks.model_identity import ModelReference
from ..policy.make import make_policy
from ..policy.passages import Decoder
from ..policy.policy import Policy
from ..scoring.rotary import Rotary
from ..scoring.vision import vision_token_ids
from . import saved
from .choice import Choice
from .hiding import Hiding
from .joint_eviction import Evictions
from .layer import CompressedLayer, nbytes_of
from .new_tokens import NewTokens, check_past
from .other_layers import check_other_layers, layer_names
from .phases import Waiting
from .protected import check_together
from .scope import evictable
from .storage.static import StaticStorage

WITHOUT_KEYS = getattr(cache_utils, "DummyLayer", ())  # for a layer that attends to another layer's keys


@cache
def say_once(message: str) -> None:
    """Log a warning once per message."""
    logging.getLogger("kvcompress").warning(message)


def check_room(policy: Policy, max_new_tokens: object) -> None:
    """Raise KVCompressError unless `max_new_tokens` is a number of tokens, or None if the storage allows it."""
    kind = policy.engine.cache_implementation
    if max_new_tokens is None:
        if "static" in kind:
            raise KVCompressError(f"cache_implementation={kind!r} needs max_new_tokens=, the room in its fixed shapes")
        return
    if not isinstance(max_new_tokens, numbers.Integral) or isinstance(max_new_tokens, bool) or max_new_tokens < 0:
        raise KVCompressError(f"max_new_tokens={max_new_tokens!r} is not an integer of at least 0, a number of tokens")


class CompressedCache(DynamicCache):
    """A transformers cache that compresses each prompt as it is stored.

    Pass it to `generate` as `past_key_values` (`cache` since transformers 5.24) inside `kvcompress.compress(...)` or
    `kvcompress.attach(...)`, or let `compress` create one per generation. Layers without full attention, such as those
    with sliding windows, keep transformers' own storage.

    Args:
        config: the model's config.
        method: name of a registered method; None is `full`.
        ratio: fraction of the prompt's entries to keep, see `Budget`; not needed for `full`.
        budget: number of entries to keep, instead of `ratio`.
        max_new_tokens: new tokens to allocate room for in advance; by default, full buffers grow by an eighth.
        tokenizer: the model's tokenizer or processor, which `protect_text=` needs; it is not saved.
        options: the method's options and the engine's, see `kvcompress.policy.Engine`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: str | None = None,
        ratio: float | None = None,
        budget: int | None = None,
        max_new_tokens: int | None = None,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        **options: object,
    ):
        self.policy = make_policy(method, ratio, budget, **options)
        check_room(self.policy, max_new_tokens)
        self.asked = {"method": method, "ratio": ratio, "budget": budget, "max_new_tokens": max_new_tokens, **options}
        if self.policy.engine.ratio_of == "vision" and not vision_token_ids(config):
            what = f"method {method!r}" if self.policy.tokens else "ratio_of='vision'"
            raise KVCompressError(
                f"{what} chooses among image and video tokens: the config of a {config.model_type} model names none"
            )
        super().__init__(config=config)
        self.config, self._decode = config, Decoder(tokenizer)
        self.announced: NewTokens | None = None  # tokens of the latest prefill
        self._stage: str | None = None  # of the current forward pass: "announced", then "begun"
        self.is_prompt = False  # whether the latest forward pass is a prompt
        self.filled_by = ModelReference()  # the model
        self.rope_deltas: torch.Tensor | None = None  # position offset of its prompts, in a model with M-RoPE
        self.second_pass = None  # the `SecondPass` of the prompt that is passing through the model
        self.last_position: torch.Tensor | None = None  # of that prompt's last token, if it was passed to the decoder
        self.resumed_at = 0  # columns of the first prompt that were not recomputed
        check_learned_for(self.policy.cluster, config)
        self.compressed_layers = self._compress_layers(max_new_tokens)
        check_calibrated_for(self.policy.cluster, config, len(self.compressed_layers))

    def _compress_layers(self, max_new_tokens: int | None) -> list[CompressedLayer]:
        """Replace the layers with full attention, and return the new ones.

        Raises KVCompressError if there are none, or if others do not work beside them."""
        config, tokens = self.config, self.policy.tokens
        # transformers' cache does not distinguish these layers, which hold an image's keys (Llama 3.2 Vision).
        cross_attention = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
        full_attention = [
            layer_idx
            for layer_idx, layer in enumerate(self.layers)
            if type(layer) is DynamicLayer and layer_idx not in cross_attention
        ]
        first_hidden = None if tokens is None else tokens.hides_from(len(self.layers))
        hiding = None if first_hidden is None else Hiding(tokens, first_hidden)
        compressed, evictions = len(full_attention), Evictions()
        for place, layer_idx in enumerate(full_attention):
            choice = Choice(self.policy, layer_idx, place, compressed)
            self.layers[layer_idx] = CompressedLayer(choice, max_new_tokens, evictions, hiding)
        others = [layer for layer in self.layers if not isinstance(layer, (CompressedLayer, WITHOUT_KEYS))]
        kinds = {type(layer) for layer in others}
        if not compressed:
            raise KVCompressError(
                f"a {config.model_type} model has no layer with full attention alone ({layer_names(kinds)}): nothing "
                "to compress"
            )
        if others:
            say_once(
                f"{config.model_type}: {len(others)} of {len(others) + compressed} layers have no full "
                "attention (sliding windows and the like); they keep transformers' own cache, uncompressed"
            )
            check_other_layers(kinds, self.policy, config.model_type)
        return [self.layers[layer_idx] for layer_idx in full_attention]

    def start(
        self,
        batch: int,
        columns: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        video_grid_thw: torch.Tensor | None = None,
    ) -> bool:
        """Announce a forward pass over (batch, columns) tokens, which lasts until `end`.

        Returns True for a prompt, which will be compressed. A single token on a filled cache is a decode step, which is
        only stored."""
        memory, is_first = self.compressed_layers[0].memory, self.is_empty
        if self.is_broken:
            raise KVCompressError(
                "an earlier forward pass on this CompressedCache broke off, so its layers may hold different tokens: "
                "create a new one, or reset() it"
            )
        if not batch or not columns:
            more = "" if is_first else f"; a prompt must be longer than the {self.seen_tokens} tokens before it"
            raise KVCompressError(f"there is no token to process: input_ids have the shape ({batch}, {columns})" + more)
        if not is_first and batch != len(memory.log.lengths):
            raise KVCompressError(f"the CompressedCache holds {len(memory.log.lengths)} rows, the input has {batch}")
        if columns == 1 and not is_first:
            if self._stage is not None:  # an announced prompt never came
                for layer in self.compressed_layers:
                    layer.restore(layer.memory)
            self._stage, self.is_prompt = "announced", False
            return False
        if not is_first:
            check_past(attention_mask, columns, memory.seen, memory.log.lengths_at(memory.seen))
        tokens = NewTokens.of(
            self.config, self.policy, is_first, batch, columns, input_ids, attention_mask, video_grid_thw, self._decode
        )
        if not is_first:
            lengths = [a + b for a, b in zip(memory.log.lengths_at(memory.seen), tokens.lengths, strict=True)]
            check_together(self.policy, memory.log.protected, tokens.lasting, lengths)
        if self.policy.engine.prefill_chunk is not None or self.compressed_layers[0].hiding is not None:
            tokens = tokens.following(memory.log.vision, memory.seen)
        self.begin(tokens)
        self._stage, self.is_prompt = "announced", True
        return True

    def begin(self, tokens: NewTokens, first_layer: int = 0) -> None:
        """Announce the tokens of the current pass to the layers from `first_layer` on."""
        self.announced = tokens
        all_whole = all(layer.is_whole for layer in self.compressed_layers)
        for layer in self.compressed_layers:
            if layer.layer_idx >= first_layer:
                layer.begin(tokens, all_whole)

    def rotate(self, rotary: Rotary) -> None:
        """Set the rotation of the pass's queries, before its first layer, for methods that undo it."""
        for layer in self.compressed_layers:
            layer.rotate(rotary)

    def finish(self) -> None:
        """Finish a prompt: if the choices wait for all layers, make them now."""
        waiting = [layer.waiting for layer in self.compressed_layers]
        if waiting[0] is not None:  # then all layers wait
            with own_dtypes(waiting[0].candidates.keys.device):
                self._choose(waiting)
        self._count_together()

    def _choose(self, waiting: list[Waiting]) -> None:
        for prompt in waiting:
            if prompt.scores is None:
                prompt.assess()
        rule, measured = self.policy.layer_budget, None
        if rule.is_measured:
            # Layers may be on several devices (device_map="auto").
            device = waiting[0].measured.device
            measured = torch.stack([prompt.measured.to(device) for prompt in waiting]).cpu()
        budgets = rule.budgets(evictable(waiting[0].candidates.view), measured)
        for layer in self.compressed_layers:
            layer.finish(budgets)

    def _count_together(self) -> None:
        """Share one counter of appended tokens per device among all layers with fixed shapes."""
        first: dict[torch.device, StaticStorage] = {}
        for layer in self.compressed_layers:
            if isinstance(layer.storage, StaticStorage):
                layer.storage.count_with(first.setdefault(layer.device, layer.storage))

    def end(self) -> None:
        """End the announced forward pass. Raises KVCompressError if it did not use the cache."""
        stage, self._stage = self._stage, None
        if stage == "announced":
            raise KVCompressError(
                "the forward pass made no use of its KV cache, so nothing was compressed (gradient checkpointing "
                "does this in train mode)"
            )

    def reset(self) -> None:
        super().reset()
        self._stage = self.rope_deltas = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select_deltas(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select_deltas(indices)
        super().batch_select_indices(indices)

    def _select_deltas(self, rows: torch.Tensor) -> None:
        if (deltas := self.rope_deltas) is not None:  # of a prompt each, which may have become several rows since
            of_each = len(self.compressed_layers[0].memory.log.lengths) // len(deltas)
            self.rope_deltas = deltas.repeat_interleave(of_each, dim=0)[rows.to(deltas.device)]

    def crop(self, tokens_to_remove: int) -> None:
        raise KVCompressError(
            "tokens cannot be taken back out of a compressed cache, so assisted decoding (assistant_model, "
            "prompt_lookup_num_tokens) does not work with it"
        )

    def activate_past_recording(self) -> None:
        self.crop(0)

    def __iter__(self) -> Iterator[tuple]:
        raise KVCompressError(
            "a CompressedCache does not list every token's keys and values; kept_indices(layer_idx) lists the kept ones"
        )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if self._stage is None:
            raise KVCompressError(
                "a CompressedCache works only where the model itself is called inside kvcompress.compress(...) or "
                "attach(...): any other code would misread its contents"
            )
        self._stage = "begun"
        following = self.layers[(layer_idx + 1) % len(self.layers)]
        if isinstance(following, CompressedLayer) and following.storage is not None:
            following.storage.prefetch()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def save(self, path: str | Path) -> None:
        """Write the cache to a file, completely or not at all: safetensors with JSON metadata, no pickle.

        The loaded cache continues bit for bit like this one.

        Raises:
            KVCompressError: if the cache is empty, its model is gone, or the file cannot be written.
        """
        if self.is_empty or self.is_broken:
            what = "its last forward pass broke off" if self.is_broken else "it has not seen a prompt yet"
            raise KVCompressError(f"there is nothing to save in this CompressedCache: {what}")
        if (model := self.filled_by()) is None:
            raise KVCompressError(
                "this CompressedCache does not know its model, which is gone or was never called with it"
            )
        layers = [layer.state() if isinstance(layer, CompressedLayer) else dict(vars(layer)) for layer in self.layers]
        saved.write(path, model, self.policy, {"asked": self.asked, "rope_deltas": self.rope_deltas, "layers": layers})

    @classmethod
    def load(cls, path: str | Path, model: torch.nn.Module) -> "CompressedCache":
        """Load a cache that `save` has written, for the same model.

        Pass it to `Session.reuse`, or to `generate` as `past_key_values`. It has the saved cache's method and options.

        Raises:
            KVCompressError: for a damaged or foreign file, another model (architecture, dtype, adapters or weights),
                another transformers version, or a method or option that does not exist here.
        """
        model = unwrapped(model)
        with saved.read(path, model) as content:
            cache = cls(model.config, **content.value("asked"))
            content.check(cache.policy)
            for layer, (state, device) in zip(cache.layers, content.layers(), strict=True):
                if isinstance(layer, CompressedLayer):
                    layer.restore_state(state, device)
                else:
                    vars(layer).update(state)
            cache.rope_deltas, cache.filled_by = content.value("rope_deltas"), ModelReference(model)
        return cache

    def forget_last(self) -> None:
        """Drop the prompt's last token, so that it can be fed again on the compressed cache."""
        for layer in self.compressed_layers:
            layer.memory.forget_last()
        self._count_together()

    @contextmanager
    def reuse(self) -> Iterator["CompressedCache"]:
        """Context manager: generations inside start from the current contents, which are restored afterwards."""
        held, stage = [layer.fork() for layer in self.compressed_layers], self._stage
        self._count_together()
        rope_deltas = self.rope_deltas
        try:
            with self.other_layers_unchanged():
                yield self
        finally:
            for layer, memory in zip(self.compressed_layers, held, strict=True):
                layer.restore(memory)
            self._stage, self.rope_deltas = stage, rope_deltas

    @contextmanager
    def other_layers_unchanged(self) -> Iterator[None]:
        """Context manager that restores the layers with transformers' own storage."""
        others = copy.deepcopy(self.other_layers)
        try:
            yield
        finally:
            for layer_idx, layer in others.items():
                self.layers[layer_idx] = layer

    @property
    def other_layers(self) -> dict[int, CacheLayerMixin]:
        """The layers with transformers' own storage, by their index."""
        return {i: layer for i, layer in enumerate(self.layers) if not isinstance(layer, CompressedLayer)}

    @property
    def is_empty(self) -> bool:
        """Whether no prompt has been stored yet."""
        return self.compressed_layers[0].storage is None

    @property
    def is_broken(self) -> bool:
        """Whether a forward pass broke off, so that layers may hold different tokens."""
        return self._stage == "begun"

    @property
    def seen_tokens(self) -> int:
        """Number of tokens seen, kept or not, pads included."""
        return self.compressed_layers[0].seen

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values, their index and other layers' states, spare room included."""
        return sum(layer.nbytes for layer in self.compressed_layers) + nbytes_of(self.other_layers.values())

    @property
    def room_nbytes(self) -> int:
        """The part of `nbytes` that is reserved for new tokens."""
        return sum(layer.storage.room_nbytes for layer in self.compressed_layers if layer.storage is not None)

    def kept_indices(self, layer_idx: int) -> list[list[torch.Tensor]]:
        """Return the sequence columns stored in layer `layer_idx`: `[row][kv_head]` -> LongTensor, ascending.

        Columns count from the left of the padded batch; pads are never listed. Decoded tokens follow the prompt."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            raise KVCompressError(f"layer {layer_idx} is not compressed: it is a {type(layer).__name__}")
        return [[head[head >= 0].cpu() for head in row] for row in layer.kept_columns()]

    def answer_scores(self, layer_idx: int) -> torch.Tensor | None:
        """Return how much the answer needs each column of the latest prompt: (batch, kv_heads, columns) in fp32.

        Only for a method that lets the model answer first (`hindsight`); otherwise None."""
        layer = self.layers[layer_idx]
        return layer.memory.answer_scores if isinstance(layer, CompressedLayer) else None

    def realised_ratios(self) -> list[list[float]]:
        """Return the fraction of each row's real prompt tokens that was kept: `[compressed layer][row]`.

        It is averaged over KV heads, and NaN for a row of pads only."""
        if self.is_empty:
            raise KVCompressError("this CompressedCache has not seen a prompt yet")
        logs = [layer.memory.log for layer in self.compressed_layers]
        return [(log.kept.double() / on_device(log.lengths, log.kept.device)).tolist() for log in logs]
