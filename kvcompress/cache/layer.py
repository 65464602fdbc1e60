"""`CompressedLayer`: one layer of the cache, as seen by transformers and the attention function."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import CacheLayerMixin

from ..device import own_dtypes
from ..errors import KVCompressError
from ..scoring.rotary import Rotary
from .answering import Answering
from .choice import Choice
from .hiding import Hiding
from .joint_eviction import Evictions
from .memory import Memory
from .new_tokens import NewTokens
from .phases import EVERY, Decoding, LaterChunk, Phase, Prefill, Rereading, Waiting
from .resumed import Beginning, ResumedPrefill
from .scope import States
from .storage.base import Storage

# Called instead of compressing a prompt, with the inputs of the layer's attention; calls the second argument, which
# compresses.
Listener = Callable[[States, Callable[[], None]], None]


class LayerKeys(torch.Tensor):
    """Keys on their way from a `CompressedLayer` to our attention function, which uses `plain` instead.

    Any other operation on them raises, since an attention that knows nothing of compression would misread them.

    A model may also pass them to later layers without keys of their own (Gemma 3n and 4). These attend as this layer
    did, which may have been compressed since.

    Attributes:
        is_first_prompt, in_place: the layer's `is_first_prompt` and `decodes_in_place` in this pass.
        mask: the mask that the layer attended under, see `Phase.mask`; None if one of the two is True.
        is_used: whether the layer has attended to them.
    """

    plain: torch.Tensor
    kv_layer: CacheLayerMixin
    is_first_prompt: bool
    in_place: bool
    mask: torch.Tensor | None
    is_used: bool

    def use(self) -> None:
        """Mark them as attended to by their layer. Raises KVCompressError the second time."""
        if self.is_used:
            raise KVCompressError(
                f"a {type(self.kv_layer.module).__name__} attends twice with the same keys, but compression works for "
                "one attention per layer"
            )
        self.is_used = True

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        is_moved = func is torch.Tensor.to and isinstance(args[0], cls) and not kwargs
        if is_moved and args[1:] == (args[0].plain.device,):  # some models do this before a layer without keys
            return args[0]
        raise KVCompressError(
            "a layer's compressed keys reached something other than kvcompress's attention: the model computes with "
            "what it has cached (latent attention), or set_attn_implementation was called, or "
            "kvcompress.compress(...) left, in the middle of a forward pass"
        )


def wrap_keys(keys: torch.Tensor, layer: CacheLayerMixin) -> torch.Tensor:
    """Wrap keys for our attention function, which finds their layer as `kv_layer`."""
    if torch.compiler.is_compiling():  # a tensor subclass would break the graph
        keys = keys.view_as(keys)
    else:
        plain, keys = keys, keys.as_subclass(LayerKeys)
        keys.plain, keys.mask, keys.is_used = plain, None, False
        keys.is_first_prompt, keys.in_place = layer.is_first_prompt, layer.decodes_in_place
    keys.kv_layer = layer
    return keys


def nbytes_of(layers: Iterable[CacheLayerMixin]) -> int:
    """Return the bytes that cache layers of transformers' own hold, of any kind."""
    states = []
    for layer in layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            state = getattr(layer, name, None)
            states += state.values() if isinstance(state, dict) else [state]
    return sum(state.untyped_storage().nbytes() for state in states if state is not None)


class CompressedLayer(CacheLayerMixin):
    """One layer: the cluster chooses entries of each prompt, which are stored, and decoded tokens are appended.

    A pass has two steps. `update` takes the new states and returns everything to attend to; after the attention,
    `after_attention` compresses and stores. Both depend on the layer's phase, see phases.py.

    Attributes:
        scaling, module: the factor of q·k and the attention module of the latest prompt's pass.
    """

    is_sliding = False

    def __init__(self, choice: Choice, room: int | None, evictions: Evictions, hiding: Hiding | None = None):
        """`room` is the number of new tokens to allocate room for; all layers of the cache share `evictions` and
        `hiding`."""
        super().__init__()
        self.choice, self._room, self._evictions, self.hiding = choice, room, evictions, hiding
        self.layer_idx, self.policy = choice.layer_idx, choice.policy
        self._listeners: OrderedDict[int, Listener] = OrderedDict()
        self.scaling: float | None = None
        self.module: torch.nn.Module | None = None
        self.reset()

    def __getstate__(self) -> dict[str, object]:
        """Leave the model's module out of copies and pickles."""
        return {**vars(self), "module": None}

    def reset(self) -> None:
        self.keys = self.values = None  # transformers' names; the entries are in `storage`
        self.is_initialized = False
        self._rotary: Rotary | None = None
        self._features: torch.Tensor | None = None
        self.restore(Memory(self.policy, self._room))

    # -- contents

    @property
    def storage(self) -> Storage | None:
        """The stored entries, None before the first prompt."""
        return self.memory.storage

    @property
    def seen(self) -> int:
        """Number of tokens seen, per row and including pads: the true position of the next token."""
        return int(self.get_seq_length())

    @property
    def waiting(self) -> Waiting | None:
        """The prompt whose choice waits for the other layers."""
        return self._phase if isinstance(self._phase, Waiting) else None

    def kept_columns(self) -> torch.Tensor:
        """Return the stored columns of the sequence, see `Storage.columns`."""
        if self.storage is None:
            raise KVCompressError(f"layer {self.layer_idx} has not seen a prompt yet")
        return self.storage.columns(self.seen)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    # -- phases

    def begin(self, tokens: NewTokens, all_whole: bool = True) -> None:
        """Prepare for a forward pass over `tokens`, which will be compressed; `all_whole` as in `Prefill`."""
        is_later_chunk = self.policy.engine.prefill_chunk is not None and self.storage is not None
        kind = LaterChunk if is_later_chunk else Prefill
        self._phase: Phase = kind(self.choice, self.memory, tokens, self._decoding, all_whole)

    def resume(self, tokens: NewTokens, known: int, beginning: Beginning) -> None:
        """Like `begin`, for a first prompt whose first `known` columns do not pass through the model."""
        self._phase = ResumedPrefill(self.choice, self.memory, tokens, self._decoding, known, beginning)

    def read_again(self, columns: torch.Tensor, missing: torch.Tensor, sinks: int) -> None:
        """Prepare for reading columns of the waiting prompt again; arguments as in `Rereading`."""
        self._phase = Rereading(self.waiting, columns, missing, sinks)

    def begin_answer(self) -> Answering:
        """Prepare for an answer to the waiting prompt, and return its phase."""
        self._phase = Answering(self.waiting)
        return self._phase

    def end_answer(self) -> None:
        """Finish the answer."""
        self._phase = self._phase.finish()

    def finish(self, budgets: list[list[int]]) -> None:
        """Make the choice that waited for all layers. `budgets` holds the evictable entries to keep, [layer][row]."""
        self._phase = self.waiting.finish(budgets)

    def rotate(self, rotary: Rotary) -> None:
        """Set the rotation of the pass's queries, for a method that undoes it."""
        self._rotary = rotary

    def set_features(self, features: torch.Tensor) -> None:
        """Set what replaces the pass's queries, (batch, heads, new, size), for a method that reads hidden states."""
        self._features = features

    def listen(self, listener: Listener) -> RemovableHandle:
        """Call `listener` at each prompt, around the listeners already registered, until the returned handle is
        removed."""
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = listener
        return handle

    # -- transformers' interface of a layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self.values = key_states.new_empty(0)  # Llama 3.2 Vision asks every layer for its size
        self.is_initialized = True

    @property
    def is_compileable(self) -> bool:
        """Whether every decode step is the same graph; `generate` then compiles it on a GPU."""
        return self.policy.engine.cache_implementation == "static" and self.hiding is None

    def get_seq_length(self) -> int | torch.Tensor:
        """Return the number of tokens seen; with static shapes a tensor () on the device, so that no step waits for
        it."""
        length = self._phase.length
        return length.squeeze() if isinstance(length, torch.Tensor) else length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.memory.has_fixed_shapes:  # only used for the padding of a second prompt
            return query_length, 0 if query_length == 1 else self.seen
        return self.memory.stored + query_length, self.seen - self.memory.stored

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Take new states (batch, kv_heads, new, head_dim); return the keys and values to attend to."""
        keys, values = self._phase.update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return wrap_keys(keys, self), values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.storage is not None:
            rows = torch.arange(len(self.memory.log.lengths))
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.storage is not None:
            self.memory.select(indices.to(self.device))

    def fork(self) -> Memory:
        """Continue from a copy of the current contents; return the original, for `restore`."""
        before = self.memory
        self.restore(before.fork())
        return before

    def restore(self, memory: Memory) -> None:
        """Replace the contents."""
        self._evictions.forget()
        self.memory = memory
        self._decoding = self._phase = Decoding(self.choice, memory, self.hiding, self._evictions)

    def state(self) -> dict[str, object]:
        """Return the contents for saving to a file."""
        return {"dtype": self.dtype, "memory": self.memory.state()}

    def restore_state(self, state: dict[str, object], device: torch.device) -> None:
        """Restore a saved `state` on this device."""
        nothing = torch.empty(0, dtype=state["dtype"], device=device)
        self.lazy_initialization(nothing, nothing)
        self.restore(Memory.of_state(self.policy, self._room, state["memory"]))

    # -- for the attention function

    @property
    def is_first_prompt(self) -> bool:
        """Whether a prompt is being processed on an empty cache, so that the model's own mask is right."""
        return self._phase.is_first_prompt

    @property
    def is_whole(self) -> bool:
        """Whether nothing was dropped so far."""
        return self.memory.is_whole

    @property
    def wants_sums(self) -> bool:
        """Whether this pass needs the column sums of its attention."""
        return self._phase.wants_sums

    @property
    def decodes_in_place(self) -> bool:
        """Whether this is a decode step over entries that can be attended to in place."""
        return self._phase is self._decoding and self.storage.decodes_in_place and self._decoding.hidden is None

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether this is a decode step that is the same graph each time."""
        return self._phase is self._decoding and self.storage.has_fixed_shapes

    def mask(self, query_length: int, rows: slice = EVERY) -> torch.Tensor | None:
        """See `Phase.mask`."""
        return self._phase.mask(query_length, rows)

    def after_attention(self, queries: torch.Tensor, scaling: float, module: torch.nn.Module) -> None:
        """Compress a staged prompt; while decoding, evict when it is due.

        `queries` are (batch, heads, new, head_dim), and `module` is the model's attention module."""
        rotary, self._rotary = self._rotary, None
        if self._phase is not self._decoding or self._decoding.has_work:
            self._work_on(queries, scaling, module, rotary)

    @torch.no_grad()
    def _work_on(self, queries: torch.Tensor, scaling: float, module: torch.nn.Module, rotary: Rotary | None) -> None:
        if rotary is not None:  # it is on the first layer's device
            rotary = rotary.to(queries.device)
        states = States(queries, scaling, module, rotary)
        if self._phase.staged is not None:
            keys, values = self._phase.staged
            states = replace(states, queries=self._phase.all_queries(queries), keys=keys, values=values)
            self.memory.record_query_power(states.queries, keys.shape[1], self._phase.tokens)
            self.scaling, self.module = scaling, module
        scored = states
        if self.policy.cluster.reads_hidden and (self._phase is not self._decoding or self.policy.hooks_steps):
            scored = replace(states, queries=self.choice.known_features(self._features))
            self._features = None

        def compress() -> None:
            self._phase = self._phase.after_attention(scored)

        if states.keys is not None:
            for listener in self._listeners.values():
                compress = partial(listener, states, compress)
        with own_dtypes(queries.device):
            compress()
