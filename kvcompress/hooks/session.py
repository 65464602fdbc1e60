"""Connect compression to an unmodified transformers model, and disconnect it again.

It only replaces the text model's attention function (see attention.py) and the cache (see cache/). The model keeps its
own forward, nothing is stored on its modules, and leaving the context restores it."""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NoReturn
from weakref import WeakSet

import torch
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import ModelOutput

from ..cache.cache import CompressedCache, check_room
from ..cache_name import CACHE, NAMES, cache_in
from ..clusters.learned import check_learned_for
from ..errors import KVCompressError
from ..inflight.cache import SlotCache
from ..inflight.loop import InFlight, Limits, check_storage
from ..inflight.request import Request, names_length
from ..inflight.request_state import ConnectedModel
from ..policy.make import make_policy
from ..policy.passages import Decoder
from .answer_first import check_answers
from .attention import PREFIX, connected, register_attention, set_attention
from .chunked_prefill import feed_in_chunks
from .context_first import read_context_first
from .hidden_states import watch_hidden_states
from .last_token import check_outputs, last_token, record_last_position
from .model import check_heads, check_use_cache, check_whole_prompt, refuse_pages, text_decoder, unwrapped
from .model_identity import ModelReference
from .positions import rope_deltas, set_rope_deltas
from .prefix_cache import PrefixCache
from .replacement import Replacement, wrapped
from .resumed_prompt import ResumedPrompt, wanted_outputs
from .reused import check_given, check_replaced, check_reused
from .rotary import rotary_embeddings, watch_rotary
from .second_pass import SecondPass
from .threads import Threads
from .token_dropping import prune
from .tower_attention import TowerRecorder
from .video_frames import FrameRecorder


def compress(
    model: PreTrainedModel,
    method: str | None = None,
    ratio: float | None = None,
    budget: int | None = None,
    max_new_tokens: int | None = None,
    prefix_cache: PrefixCache | None = None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    **options: object,
) -> "Session":
    """Compress the KV cache of everything that `model` generates inside the returned context.

    ```python
    with kvcompress.compress(model, method="snapkv", ratio=0.2, window_size=32) as session:
        output = model.generate(**inputs)
    session.cache.kept_indices(0)
    ```

    Args:
        model: a transformers model whose attention goes through the attention interface.
        method: a name in `list_methods()`; None or "full" runs the same code without compressing.
        ratio: fraction of each prompt's KV entries that is kept, in (0, 1].
        budget: entries kept per layer and KV head, instead of `ratio`.
        max_new_tokens: new tokens to allocate room for in advance; see `CompressedCache`.
        prefix_cache: lets prompts with a common prefix share its prefill.
        tokenizer: the model's tokenizer or processor, which `protect_text=` needs.
        options: the method's own options and the engine's, see `kvcompress.policy.Engine`.

    Raises:
        KVCompressError: immediately, for an unknown method or option, a ratio out of range or an unsupported model.
    """
    policy = make_policy(method, ratio, budget, **options)
    check_room(policy, max_new_tokens)
    if not isinstance(prefix_cache, PrefixCache | None):
        raise KVCompressError(f"prefix_cache={prefix_cache!r} is not a PrefixCache, such as PrefixCache(gb=4)")
    if policy.passages:
        Decoder(tokenizer)([])  # raises at once without a tokenizer
    inner = unwrapped(model)
    decoder = text_decoder(inner)
    check_heads(inner, policy)
    check_learned_for(policy.cluster, decoder.config)
    check_answers(inner, policy)
    if policy.watches_rotary:
        rotary_embeddings(decoder)
    new_cache = {"method": method, "ratio": ratio, "budget": budget, **options}
    new_cache |= {"max_new_tokens": max_new_tokens, "tokenizer": tokenizer}
    if options.get("calibration") is not None:
        CompressedCache(inner.config, **new_cache)  # raises at once if the file is another model's
    tokens = policy.tokens
    tower = TowerRecorder(inner, tokens) if tokens is not None and tokens.watches_tower else None
    return Session(model, new_cache, tower, prefix_cache)


def attach(model: PreTrainedModel) -> "Session":
    """Return a session whose generations pass a `CompressedCache` of their own as `past_key_values`."""
    return Session(model, None)


class Session:
    """Context manager for a model with compression connected, for any number of generations.

    Attributes:
        model: the part of the model that generates text, without wrappers.
        cache: the `CompressedCache` of the latest generation, None before the first.
        is_entered: whether compression is connected.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        new_cache: dict[str, Any] | None,
        tower: TowerRecorder | None = None,
        prefix_cache: PrefixCache | None = None,
    ):
        self.model, self.cache = unwrapped(model), None
        self._decoder = text_decoder(self.model)
        self._config = self._decoder.config
        self._tower, self._frames = tower, FrameRecorder(self.model)
        self._prefixes = PrefixCache(gb=0) if prefix_cache is None else prefix_cache
        self.is_entered, self._new_cache = False, new_cache
        self._reference = ModelReference(self.model)
        self._forward_names = list(inspect.signature(self.model.forward).parameters)
        self._cache_name = next((name for name in NAMES if name in self._forward_names), CACHE)
        self._threads = Threads()
        # A model with its own image positions has one offset for all threads: their `generate` takes turns.
        self._has_offset = hasattr(self.model.base_model, "rope_deltas")
        self._turns = threading.RLock() if self._has_offset else nullcontext()
        self._pass_hooks: list[RemovableHandle | ResumedPrompt] = []
        self._pieces: ResumedPrompt | None = None  # the prompt that is being prefilled in pieces
        self._replaced: WeakSet[DynamicCache] = WeakSet()  # caches that were given, and stay empty
        self._undo = ExitStack()  # undone on leaving the context

    def __enter__(self) -> "Session":
        base = self._config._attn_implementation
        if base.startswith(PREFIX) or id(self._config) in connected:
            raise KVCompressError("this model is already being compressed: leave the other context first")
        with ExitStack() as undo:
            self._connect(base)
            undo.callback(self._disconnect)
            connected[id(self._config)] = self._threads.has_this
            undo.callback(connected.pop, id(self._config))
            before = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            undo.callback(before.remove)
            after = self.model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
            undo.callback(after.remove)
            if hasattr(self.model, "prepare_inputs_for_generation"):
                undo.callback(wrapped(self.model, "prepare_inputs_for_generation", self._prepare_inputs).remove)
            if hasattr(self.model, "generate"):
                undo.callback(wrapped(self.model, "generate", self._generate).remove)
            if hasattr(self.model, "init_continuous_batching"):
                undo.callback(Replacement(self.model, "init_continuous_batching", refuse_pages).remove)
            for watch in (self._frames, self._tower):
                for hook in watch.attach() if watch is not None else ():
                    undo.callback(hook.remove)
            undo.callback(self._end_pass)
            self._undo = undo.pop_all()
        self.is_entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the model. Calling this again does nothing."""
        self.is_entered = False
        self._undo.close()

    def __reduce__(self) -> NoReturn:
        """Raise KVCompressError: a copy of the model would stay compressed when this context is left."""
        raise KVCompressError("inside compress(...) or attach(...) a model cannot be copied or pickled: leave it first")

    def _connect(self, base: str) -> None:
        """Replace the attention implementation `base` by its compressed form."""
        self._base, self._name = base, register_attention(base)
        set_attention(self._config, self._name)

    def _disconnect(self) -> None:
        if self._config._attn_implementation == self._name:
            set_attention(self._config, self._base)

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = inspect.signature(generate).parameters
        check_whole_prompt(self.model, dict(zip(names, args, strict=False)) | kwargs)
        was_inside = self._threads.has_this()
        try:
            with self._turns:
                self._continue_positions(cache_in(kwargs))  # `generate` counts positions before the first forward pass
                return self._threads.generate(generate, *args, **kwargs)
        finally:
            if not was_inside:  # Ctrl-C ends a pass without its hooks
                self._threads.leave(self._end_pass)

    def _prepare_inputs(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check the room of static shapes before each step of `generate`: a compiled step cannot."""
        cache, tokens = cache_in(kwargs), kwargs.get("attention_mask")
        tokens = kwargs.get("position_ids") if tokens is None else tokens  # `generate` drops a mask without pads
        is_step = isinstance(cache, CompressedCache) and not kwargs.get("is_first_iteration")
        if is_step and isinstance(tokens, torch.Tensor):
            cache.compressed_layers[0].memory.check_room(tokens.shape[-1])
        return prepare(*args, **kwargs)

    def _continue_positions(self, cache: object) -> None:
        """Let the model continue positions after the tokens in the cache, not after its latest prompt."""
        if isinstance(cache, CompressedCache) and not torch.compiler.is_compiling():
            set_rope_deltas(self.model, None if cache.is_empty else cache.rope_deltas)

    def _before_forward(self, model: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Give a new generation its cache, and announce the forward pass to the cache."""
        kwargs = dict(zip(self._forward_names, args, strict=False)) | kwargs
        if self._config._attn_implementation != self._name:  # by set_attn_implementation
            self._connect(self._config._attn_implementation)
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        batch, columns = (embeds if ids is None else ids).shape[:2]
        cache = self._cache_for(kwargs)
        if kwargs.get("position_ids") is None:
            self._continue_positions(cache)
        check_answers(self.model, cache.policy, kwargs.get("return_dict"))
        check_outputs(cache.policy, kwargs, columns)
        mask, grid = kwargs.get("attention_mask"), kwargs.get("video_grid_thw")
        if grid is None and columns > 1:
            grid = self._frames.grid(ids)
        is_prompt, policy = cache.start(batch, columns, ids, mask, grid), cache.policy
        hooks_steps = policy.hooks_steps and (policy.decode is not None or isinstance(cache, CompressedCache))
        if not torch.compiler.is_compiling():
            is_hooked = policy.hooks_prompts or self._prefixes.room > 0 or self._pieces is not None or self._has_offset
            self._threads.enter((is_prompt and is_hooked) or hooks_steps)
        self._end_pass()  # of an interrupted pass
        if is_prompt and policy.tokens is not None:
            self._pass_hooks = prune(self._decoder, self._base, cache, self._tower, self._frames, kwargs)
        if policy.watches_rotary and (is_prompt or hooks_steps):
            self._pass_hooks += watch_rotary(self._decoder, cache.rotate)
        if policy.cluster.reads_hidden and (is_prompt or hooks_steps):
            self._pass_hooks += watch_hidden_states(self._decoder, cache)
        if is_prompt:
            self._hook_prompt(cache, wanted_outputs(kwargs))
            cache.filled_by = self._reference
        kwargs = {name: value for name, value in kwargs.items() if name not in NAMES} | {self._cache_name: cache}
        if isinstance(cache, CompressedCache):
            self.cache = self._threads.answers_cache(cache)
        return (), kwargs

    def _hook_prompt(self, cache: CompressedCache, wanted: object) -> None:
        """Register the hooks by which a prompt is fed in parts or its inputs are recorded."""
        policy, decoder = cache.policy, self._decoder
        if policy.feeds_last_again:
            self._pass_hooks.append(record_last_position(decoder, cache))
        if policy.cluster.second_pass:
            self._pass_hooks.append(SecondPass.watch(decoder, cache))
        if policy.engine.prefill_chunk is not None:
            self._pass_hooks += feed_in_chunks(decoder, cache)
        if policy.engine.scope == "context-first":
            read = partial(self._prefixes.read_context, decoder, self._base, cache)
            self._pass_hooks += read_context_first(decoder, cache, read, partial(self._choose, cache))
        self._pass_hooks += self._prefixes.attach(self._pieces or ResumedPrompt(), decoder, self._base, cache, wanted)

    def _choose(self, cache: CompressedCache, output: Any = None) -> None:
        """Make the choices that wait for the whole prompt, given the model's output, or for its context."""
        second, cache.second_pass = cache.second_pass, None
        if second is not None and cache.policy.cluster.second_pass:
            second.run(self.model, self._decoder, None if output is None else output.logits, cache)
        cache.finish()

    def _prefill(self, pieces: ResumedPrompt | None, inputs: Mapping[str, Any]) -> ModelOutput:
        """Run the model's forward pass over a prompt, or over the next of its `pieces`."""
        self._pieces = pieces
        try:
            return self.model(**inputs, return_dict=True)
        finally:
            self._pieces = None

    def _end_pass(self) -> None:
        """Remove the hooks of one pass."""
        while self._pass_hooks:
            self._pass_hooks.pop(0).remove()

    def _after_forward(self, model: PreTrainedModel, args: tuple, kwargs: dict, output: Any) -> Any:
        """Finish after the forward pass; `output` is None if it raised."""
        try:
            return None if output is None else self._finish(cache_in(kwargs), kwargs, output)
        finally:
            if not torch.compiler.is_compiling():
                self._threads.leave(self._end_pass)

    def _finish(self, cache: CompressedCache, kwargs: dict, output: Any) -> Any:
        """Finish a prompt. With `first_token="compressed"`, feed its last token again on the compressed cache."""
        self._end_pass()
        if self._pieces is not None and not self._pieces.is_through:
            cache.end()
            return None
        if cache.is_prompt:
            cache.rope_deltas = rope_deltas(self.model)
            self._choose(cache, output)
        feeds_again = cache.is_prompt and cache.policy.feeds_last_again
        if feeds_again:
            cache.forget_last()
        cache.end()  # only now: until then, a cache that is left here is broken
        if not feeds_again:
            return None
        return self.model(**last_token(cache, kwargs), **{self._cache_name: cache})

    @contextmanager
    def reuse(self, cache: CompressedCache | None = None) -> Iterator[CompressedCache]:
        """Reuse one compressed prompt for several questions.

        Each `with session.reuse() as cache:` starts from the cache's contents on entry and restores them afterwards.

        `cache`: a cache other than the latest generation's, such as one of several contexts, or a loaded one. Raises
        KVCompressError if it belongs to another model, method or options.

        ```python
        model(**context)                      # a prefill: compressed and stored
        for question in questions:            # input_ids and attention_mask of context and question together
            with session.reuse() as cache:
                answer = model.generate(**question, past_key_values=cache)
        ```
        """
        if cache is not None:
            check_reused(cache, self.model, self._new_cache)
        elif (cache := self.cache) is None:
            raise KVCompressError("there is nothing to reuse yet: run the model on the context first")
        with cache.reuse():
            yield cache

    def generate_many(
        self,
        requests: Iterable[Request | Mapping[str, torch.Tensor]],
        slots: int | None = None,
        kv_gb: float | None = None,
        static: bool = False,
        on_oom: Literal["halve", "raise"] = "halve",
        prefill_tokens: int | None = None,
        after_prompt: Callable[[int, CompressedCache], None] | None = None,
        **options: Any,
    ) -> InFlight:
        """Answer many requests, `slots` of them at a time; each answer comes as soon as it is done.

        ```python
        with kvcompress.compress(model, "snapkv", budget=128) as session:
            for answer in session.generate_many(map(processor, prompts), slots=16, max_new_tokens=256):
                print(answer.index, tokenizer.decode(answer.tokens))
        ```

        Each prompt is prefilled and compressed alone. All sequences decode together, and a free slot takes the next
        request; after each prompt, the running sequences decode one step. A request gets the same tokens as it would
        alone. If a request fails, its `Answer` holds the error.

        Args:
            requests: model inputs with a batch of one, or `Request`s, with options of their own. Each is fetched when
                a slot is free; an iterator that had none is polled again while requests run, so it may be a queue.
            slots: the most sequences that decode together.
            kv_gb: gigabytes (2**30 bytes) for all slots, which sets their number; `slots` is then an upper limit.
            static: whether every decode step has the same shapes and is one graph, which is compiled where `generate`
                would compile it (on CUDA); implied by `cache_implementation="static"`.
            prefill_tokens: the most prompt tokens to prefill between two decode steps; None: a whole prompt. One that
                cannot be split (`resumed_prompt.why_whole`) is prefilled whole, with a warning.
            on_oom: "halve" the slots when memory runs out and restart the newest requests, or "raise".
            after_prompt: called with a request's index and its filled cache, before it gets a slot.
            options: options of `generate`: `max_new_tokens` (by default the session's), `do_sample`, `stop_strings`
                (with `tokenizer`), ...

        Raises:
            KVCompressError: for a wrong argument, or an engine option that requests in flight do not support.
        """
        if self._new_cache is None:
            raise KVCompressError("attach(...) compresses nothing by itself: requests in flight need compress(...)")
        check_storage(kind := self._new_cache.get("cache_implementation", "dynamic"))
        # A prompt is compressed in its own cache, without room for new tokens, and then moves into its slot.
        new_cache = {**self._new_cache, "cache_implementation": "dynamic", "max_new_tokens": 0}
        if self._new_cache["max_new_tokens"] is not None and not names_length(options):
            options["max_new_tokens"] = self._new_cache["max_new_tokens"]
        make_cache = partial(CompressedCache, self.model.config, **new_cache)
        return InFlight(
            ConnectedModel(self.model, lambda: self.is_entered, make_cache, self._prefill),
            requests,
            Limits(slots, kv_gb, on_oom, prefill_tokens),
            static or kind == "static",
            after_prompt,
            options,
        )

    def _cache_for(self, kwargs: dict) -> CompressedCache | SlotCache:
        cache = cache_in(kwargs)
        if isinstance(cache, SlotCache):
            return cache
        check_use_cache(kwargs, self._config)
        if isinstance(cache, CompressedCache):
            check_given(cache, self.model)
            return cache
        if self._new_cache is None:
            raise KVCompressError("attach(...) compresses nothing by itself: pass past_key_values=CompressedCache(...)")
        ours = CompressedCache(self.model.config, **self._new_cache)  # first: it refuses a model without attention
        if cache is not None:
            check_replaced(cache, self._replaced)
        return ours
