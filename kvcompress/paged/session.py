"""Connects compression to transformers' continuous batching, for the managers that a model creates inside a context."""

import copy
import inspect
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, PreTrainedModel

from ..cache.cache import say_once
from ..errors import KVCompressError
from ..hooks.attention import PREFIX, register, set_attention
from ..hooks.model import text_decoder, unwrapped
from ..hooks.prefix_cache import PrefixCache
from ..hooks.replacement import Replacement
from ..hooks.resumed_prompt import is_rotated_by_length
from ..hooks.rotary import rotary_embeddings, watch_rotary
from ..policy.conflicts import PAGES, check_conflicts
from ..policy.make import make_policy
from ..policy.policy import Policy
from .attention import paged_attention

PAGED_PREFIX = f"{PREFIX}paged_"

# Options of `ContinuousBatchingConfig` that compressed pages do not support: the value they must have, and why.
FIXED = {
    "use_async_batching": (False, "the next batch is planned after this one is compressed"),
    "use_cuda_graph": (False, "entries are chosen between the layers, outside of any graph"),
    "varlen_compile_config": (None, "entries are chosen between the layers, outside of any graph"),
    "decode_compile_config": (None, "entries are chosen between the layers, outside of any graph"),
    "default_compile_level": (0, "entries are chosen between the layers, outside of any graph"),
    "max_blocks_per_request": (0, "its kernel reads and writes pages by the number of tokens"),
    "cpu_offload_space": (0.0, "an admitted request keeps its pages to the end, so none is offloaded"),
}


def compress(
    model: PreTrainedModel,
    method: str,
    ratio: float | None = None,
    budget: int | None = None,
    prefix_cache: PrefixCache | None = None,
    **options: object,
) -> "PagedSession":
    """Compress all requests of the continuous batching managers that `model` creates inside the returned context.

    ```python
    with kvcompress.paged.compress(model, "keydiff", budget=128, decode_budget=128) as session:
        answers = model.generate_batch(prompts, generation_config)
    session.peak_pages
    ```

    It also works with `model.continuous_batching_context_manager` and `model.init_continuous_batching`. A request is
    compressed as it would be alone with `kvcompress.compress` and the same arguments.

    Args:
        model: a transformers model that generates text.
        method: a name in `list_methods()`, of a method that keeps equally many entries in each layer and KV head.
        ratio: fraction of each prompt's KV entries to keep, in (0, 1].
        budget: entries kept per layer and KV head, instead of `ratio`.
        prefix_cache: lets prompts with a common prefix share its prefill.
        options: the method's own options and the engine's, `decode_budget=` above all, see `kvcompress.policy.Engine`.

    Raises:
        KVCompressError: for a method or option that does not work in pages, and for a version of transformers with a
            different continuous batching.
    """
    policy = make_policy(method, ratio, budget, **options)
    check_conflicts(policy, PAGES)
    inner = unwrapped(model)
    if (inner.tp_size or 1) > 1:
        raise KVCompressError("compressed pages do not go with tensor parallel: KV heads are in other processes")
    decoder = text_decoder(inner)
    if policy.watches_rotary:
        rotary_embeddings(decoder)
    pages = _pages()
    kinds = pages.group_layers_by_attn_type(decoder.config)
    if pages.FULL_ATTENTION not in kinds:
        raise KVCompressError(
            f"all layers of {type(inner).__name__} have a sliding window: there is nothing to compress"
        )
    has_windows = set(kinds) != {pages.FULL_ATTENTION}
    if prefix_cache is not None and (has_windows or is_rotated_by_length(decoder)):
        reason = "has layers with a sliding window" if has_windows else "rotates tokens by the prompt's length"
        say_once(f"prefix_cache=: requests share no prefixes, because {type(inner).__name__} {reason}")
        prefix_cache = None
    return PagedSession(inner, decoder, policy, pages, prefix_cache)


def _pages() -> ModuleType:
    """Import the module for transformers' pages. Raises KVCompressError if transformers' classes have changed."""
    problem = (
        f"transformers {transformers.__version__} has another continuous batching than kvcompress.paged knows (5.24)"
    )
    try:
        from . import pages
    except ImportError as error:
        raise KVCompressError(f"{problem}: {error}") from error
    for function, parameters in pages.CONTRACT.items():
        if tuple(inspect.signature(function).parameters) != parameters:
            raise KVCompressError(f"{problem}: {function.__qualname__} has other parameters")
    return pages


class PagedSession:
    """Context manager for a model with compressed continuous batching; for any number of managers, one at a time.

    Attributes:
        model: the model without wrappers.
        policy: the requested policy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: PreTrainedModel,
        policy: Policy,
        pages: ModuleType,
        prefix_cache: PrefixCache | None,
    ):
        self.model, self.policy, self._prefix_cache = model, policy, prefix_cache
        self._decoder, self._config, self._pages = decoder, decoder.config, pages
        self._compressor: Any = None  # that of the latest manager
        self._managers: list[Any] = []
        self._hooks = ExitStack()
        self._undo = ExitStack()  # undone on leaving the context

    @property
    def peak_pages(self) -> int:
        """The most pages per layer that requests had at once in the latest manager; 0 before the first step."""
        return 0 if self._compressor is None else self._compressor.peak_pages

    @property
    def pages_in_use(self) -> int:
        """Pages per layer that requests have now in the latest manager; 0 once it has stopped."""
        pages = None if self._compressor is None else self._compressor.pages
        return 0 if pages is None else pages.pages_in_use

    @property
    def requests(self) -> set[str]:
        """The names of the requests that have pages now in the latest manager."""
        pages = None if self._compressor is None else self._compressor.pages
        return set() if pages is None else set(pages.block_table)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pages that requests have now in the latest manager, in all layers."""
        cache = None if self._compressor is None else self._compressor.cache
        return 0 if cache is None else cache.bytes_in_use

    def check_room(self, prompt: int, new: int) -> None:
        """Raise KVCompressError if the latest manager's pages cannot hold a request of so many tokens of a prompt and
        an answer, even alone. It must have begun."""
        self._compressor.check_room(prompt, new)

    def __enter__(self) -> "PagedSession":
        self._base = self._config._attn_implementation
        if self._base.startswith(PREFIX) or "init_continuous_batching" in vars(self.model):
            raise KVCompressError("this model is already being compressed: leave the other context first")
        if getattr(self.model, "_cached_continuous_batching_manager", None) is not None:
            raise KVCompressError(
                "the model has a manager from before: call destroy_cached_continuous_batching_manager() first"
            )
        self._undo.callback(self._disconnect)
        self._undo.enter_context(self._hooks)
        self._undo.callback(self.model.destroy_cached_continuous_batching_manager)
        self._undo.callback(self._stop)
        self._undo.callback(Replacement(self.model, "init_continuous_batching", self._manager).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the model and stop its managers. Calling this again does nothing."""
        self._undo.close()

    def _stop(self) -> None:
        for manager in self._managers:
            if manager.is_running():
                manager.stop(block=True, hard_stop=True)

    def _manager(
        self,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Any:
        """Replaces the model's own `init_continuous_batching`."""
        if any(manager.is_running() for manager in self._managers):
            raise KVCompressError("a manager of this context is still running: stop it before the next one")
        cached = getattr(self.model, "_cached_continuous_batching_manager", None)
        self._check_bound(generation_config, workload_hints)
        self._disconnect()
        manager = type(self.model).init_continuous_batching(
            self.model, generation_config, _fixed(continuous_batching_config), workload_hints
        )
        if cached is None:
            manager._create_batch_processor = partial(self._processor, manager._create_batch_processor)
            self._managers.append(manager)
        return manager

    def _check_bound(self, generation_config: Any, workload_hints: Any) -> None:
        """Raise KVCompressError if nothing bounds the entries of a request."""
        config = self.model.generation_config if generation_config is None else generation_config
        limits = (
            self.policy.engine.decode_budget,
            config.max_new_tokens,
            getattr(workload_hints, "max_generated_length", None),
        )
        if not any(limits):
            raise KVCompressError(
                "nothing bounds the pages of a request: give decode_budget=, or max_new_tokens in the generation config"
            )

    def _processor(self, create: Any) -> Any:
        """Replaces the manager's own `_create_batch_processor`, in any thread."""
        processor = create()
        cache = processor.cache
        if not isinstance(cache, self._pages.CompressedPagedCache):
            from .compressor import PagedCompressor

            prefixes = self._prefix_cache
            if prefixes is not None:
                prefixes = prefixes.of_requests(self._decoder, self._base, self.policy.watches_rotary)
            compressor = PagedCompressor(self.policy, self.model.config, prefixes)
            self._pages.adopt(cache, processor.inputs_and_outputs, processor.scheduler, compressor)
            self._compressor = compressor
            self._hooks.close()  # of the manager before
            if self.policy.watches_rotary:
                for hook in watch_rotary(self._decoder, compressor.rotate):
                    self._hooks.callback(hook.remove)
        self._connect()
        return processor

    def _connect(self) -> None:
        """Report each layer's attention to the compressed pages."""
        base = self._config._attn_implementation
        if base.startswith(PAGED_PREFIX):
            return
        name = PAGED_PREFIX + base
        register(name, partial(paged_attention, base), base)
        set_attention(self._config, name)

    def _disconnect(self) -> None:
        if self._config._attn_implementation.startswith(PAGED_PREFIX):
            set_attention(self._config, self._base)


def _fixed(given: ContinuousBatchingConfig | None) -> ContinuousBatchingConfig:
    """Return the config with the values that compressed pages need.

    Raises KVCompressError if the user asked for others."""
    config, default = copy.copy(given or ContinuousBatchingConfig()), ContinuousBatchingConfig()
    for name, (value, reason) in FIXED.items():
        asked = getattr(config, name)
        if asked != getattr(default, name) and asked and asked != (False, False):
            raise KVCompressError(f"compressed pages do not go with {name}={asked!r}: {reason}")
        setattr(config, name, value)
    config.allow_block_sharing = False  # requests with the same prefix keep different entries of it
    if config.safety_margin is None:
        config.safety_margin = 0.0  # running requests already have their pages
    return config
