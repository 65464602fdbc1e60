"""Connect compression to transformers' continuous batching, for the managers that a model makes meanwhile."""

import copy
import inspect
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

import transformers
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, ContinuousBatchingConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..errors import KVCompressError
from ..hooks.attention import PREFIX
from ..hooks.model import text_decoder, unwrapped
from ..hooks.replacement import Replacement
from ..hooks.rotary import rotary_embeddings, watch_rotary
from ..policy.policy import Policy, make_policy
from ..scoring.selection import ADAPTIVE
from .attention import paged_attention

PAGED_PREFIX = f"{PREFIX}paged_"

# Options of `ContinuousBatchingConfig` that are not for compressed pages: what they must be, and why.
FIXED = {
    "use_async_batching": (False, "the next batch is planned once this one is compressed"),
    "use_cuda_graph": (False, "what is evicted is decided between the layers, outside of any graph"),
    "varlen_compile_config": (None, "what is evicted is decided between the layers, outside of any graph"),
    "decode_compile_config": (None, "what is evicted is decided between the layers, outside of any graph"),
    "default_compile_level": (0, "what is evicted is decided between the layers, outside of any graph"),
    "max_blocks_per_request": (0, "its kernel reads and writes pages by the number of tokens"),
    "cpu_offload_space": (0.0, "an admitted request has its pages to the end, so none is offloaded"),
}


def compress(
    model: PreTrainedModel,
    method: str,
    ratio: float | None = None,
    budget: int | None = None,
    **options: object,
) -> "PagedSession":
    """Compress all requests of the continuous batching managers that `model` makes inside the returned context.

    ```python
    with kvcompress.paged.compress(model, "keydiff", budget=128, decode_budget=128) as session:
        answers = model.generate_batch(prompts, generation_config)
    session.peak_pages
    ```

    So do `model.continuous_batching_context_manager` and `model.init_continuous_batching`. A request is compressed as
    it is alone with `kvcompress.compress` and the same arguments.

    Args:
        model: a transformers model that writes text.
        method: a name of `list_methods()`, of those that keep as much in each layer and KV head.
        ratio: fraction of each prompt's KV entries that is kept, in (0, 1].
        budget: in place of `ratio`, the entries kept per layer and KV head.
        options: the method's own options and the engine's, `decode_budget=` first of all, see
            `kvcompress.policy.Engine`.

    Raises:
        KVCompressError: for what cannot live in pages, and for a transformers whose continuous batching is another
            one.
    """
    if "prefix_cache" in options:
        raise KVCompressError(
            "compressed pages do not go with prefix_cache=: the scheduler feeds every token of a prompt to the model"
        )
    policy = make_policy(method, ratio, budget, **options)
    check_policy(policy)
    inner = unwrapped(model)
    if (inner.tp_size or 1) > 1:
        raise KVCompressError("compressed pages do not go with tensor parallel: KV heads are in other processes")
    decoder = text_decoder(inner)
    if policy.watches_rotary:
        rotary_embeddings(decoder)
    pages = _pages()
    if pages.FULL_ATTENTION not in pages.group_layers_by_attn_type(decoder.config):
        raise KVCompressError(
            f"all layers of {type(inner).__name__} have a sliding window: there is nothing to compress"
        )
    return PagedSession(inner, decoder, policy, pages)


def check_policy(policy: Policy) -> None:
    """Raises KVCompressError for what cannot live in pages, with the reason."""
    engine = policy.engine
    equal = "all layers and KV heads share a request's page table, so each keeps as much"
    conflicts = {
        "method 'full': it compresses nothing": policy.method == "full",
        f"method {policy.method!r}: it drops vision tokens, and requests are text": policy.tokens is not None,
        f"head_budget={policy.head_budget!r}: {equal}": policy.head_budget in ADAPTIVE,
        f"layer_budget={policy.chosen('layer_budget')!r}: {equal}": policy.chosen("layer_budget") != "uniform",
        f"method {policy.method!r}: a prompt is read once": policy.cluster.second_pass,
        f"method {policy.method!r}: it reads hidden states": policy.cluster.reads_hidden,
        "positions='cache': keys stay as they are rotated": policy.moves_keys,
        "scope='context': a request does not say where its question begins": engine.scope != "prompt",
        "ratio_of='vision': requests are text": engine.ratio_of != "prompt",
        "first_token='compressed': the scheduler feeds no token twice": engine.first_token != "full",
        "prefill_chunk=: the scheduler cuts prompts itself": engine.prefill_chunk is not None,
        f"cache_implementation={engine.cache_implementation!r}: pages are the storage": (
            engine.cache_implementation != "dynamic"
        ),
    }
    for conflict, is_there in conflicts.items():
        if is_there:
            raise KVCompressError(f"compressed pages do not go with {conflict}")


def _pages() -> ModuleType:
    """The module that knows transformers' pages. Raises KVCompressError where they are others."""
    problem = (
        f"transformers {transformers.__version__} has another continuous batching than kvcompress.paged knows (5.23)"
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
    """A model whose continuous batching is compressed, as a context manager; any number of managers, one at a time.

    Attributes:
        model: without wrappers.
        policy: what was asked for.
    """

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel, policy: Policy, pages: ModuleType):
        self.model, self.policy = model, policy
        self._decoder, self._config, self._pages = decoder, decoder.config, pages
        self._evictions: list[Any] = []
        self._managers: list[Any] = []
        self._hooks: list[RemovableHandle] = []
        self._undo = ExitStack()  # what leaving the context does

    @property
    def peak_pages(self) -> int:
        """Most pages per layer that requests had at once, in the latest manager; 0 before the first step."""
        return self._evictions[-1].peak_pages if self._evictions else 0

    @property
    def pages_in_use(self) -> int:
        """Pages per layer that requests have now, in the latest manager."""
        return self._evictions[-1].pages.pages_in_use if self._evictions else 0

    def __enter__(self) -> "PagedSession":
        self._base = self._config._attn_implementation
        if self._base.startswith(PREFIX) or "init_continuous_batching" in vars(self.model):
            raise KVCompressError("this model is already being compressed: leave the other context first")
        if getattr(self.model, "_cached_continuous_batching_manager", None) is not None:
            raise KVCompressError(
                "the model has a manager from before: call destroy_cached_continuous_batching_manager() first"
            )
        self._undo.callback(self._disconnect)
        self._undo.callback(self._unhook)
        self._undo.callback(self.model.destroy_cached_continuous_batching_manager)
        self._undo.callback(self._stop)
        self._undo.callback(Replacement(self.model, "init_continuous_batching", self._manager).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the model as it was, its managers ended. Doing it again does nothing."""
        self._undo.close()

    def _stop(self) -> None:
        for manager in self._managers:
            if manager.is_running():
                manager.stop(block=True, hard_stop=True)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _manager(
        self,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Any:
        """In the place of the model's own `init_continuous_batching`."""
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
        """Raises KVCompressError where nothing bounds what a request will hold."""
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
        """In the place of the manager's own `_create_batch_processor`, in whatever thread it is called."""
        processor = create()
        cache = processor.cache
        if not isinstance(cache, self._pages.CompressedPagedCache):
            from .eviction import Eviction

            eviction = Eviction(self.policy, self.model.config)
            eviction.pages = self._pages.adopt(cache, processor.inputs_and_outputs, eviction)
            self._evictions.append(eviction)
            if self.policy.watches_rotary:
                self._hooks += watch_rotary(self._decoder, eviction.rotate)
        self._connect()
        return processor

    def _connect(self) -> None:
        """Let the compressed pages hear of each layer's attention."""
        base = self._config._attn_implementation
        if base.startswith(PAGED_PREFIX):
            return
        name = PAGED_PREFIX + base
        AttentionInterface.register(name, partial(paged_attention, base))
        if base in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
        self._config._attn_implementation = name

    def _disconnect(self) -> None:
        if self._config._attn_implementation.startswith(PAGED_PREFIX):
            self._config._attn_implementation = self._base


def _fixed(given: ContinuousBatchingConfig | None) -> ContinuousBatchingConfig:
    """The config with what compressed pages need. Raises KVCompressError where the user asked for something else."""
    config, default = copy.copy(given or ContinuousBatchingConfig()), ContinuousBatchingConfig()
    for name, (value, reason) in FIXED.items():
        asked = getattr(config, name)
        if asked != getattr(default, name) and asked and asked != (False, False):
            raise KVCompressError(f"compressed pages do not go with {name}={asked!r}: {reason}")
        setattr(config, name, value)
    config.allow_block_sharing = False  # an evicted prefix is not that of another request
    if config.safety_margin is None:
        config.safety_margin = 0.0  # free pages for those that run are not needed: they have theirs
    return config
