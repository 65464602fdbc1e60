"""Connect compression to a transformers model that nobody has edited, and disconnect it again.

Two replacements are enough: the text model's attention function (see attention.py) and the cache (see cache/).
The model keeps its own forward; nothing is stored on its modules; leaving the context restores it.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel

from ..cache.cache import CompressedCache
from ..errors import KVCompressError
from ..policy.policy import make_policy
from .attention import PREFIX, register_attention
from .chunked_prefill import feed_in_chunks
from .model import attention_config, check_heads, text_decoder, writing_part
from .rotary import rotary_embeddings, watch_rotary
from .second_reading import DecoderInputs, read_again
from .token_dropping import prune
from .video_frames import FrameRecorder
from .vision_tower import TowerRecorder


def compress(
    model: PreTrainedModel,
    method: str | None = None,
    ratio: float | None = None,
    budget: int | None = None,
    max_new_tokens: int | None = None,
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
        method: a name of `list_methods()`; None or "full" compresses nothing, on the same path.
        ratio: fraction of each prompt's KV entries that is kept, in (0, 1].
        budget: in place of `ratio`, the entries kept per layer and KV head.
        max_new_tokens: tokens to come that get room at once; see `CompressedCache`.
        options: the method's own options and the engine's, see `kvcompress.policy.Engine`.

    Raises:
        KVCompressError: at once, for an unknown method or option, a ratio out of range or an unsupported model.
    """
    policy = make_policy(method, ratio, budget, **options)
    check_heads(model, attention_config(model), policy)
    if policy.cluster.unrotated_queries:
        rotary_embeddings(text_decoder(model))
    new_cache = {
        "method": method,
        "ratio": ratio,
        "budget": budget,
        "max_new_tokens": max_new_tokens,
        **options,
    }
    tokens = policy.tokens
    tower = TowerRecorder(model, tokens.tower_layer) if tokens is not None and tokens.sees == "tower" else None
    return Session(model, new_cache, tower)


def attach(model: PreTrainedModel) -> "Session":
    """Only connect: for generations that bring their own `CompressedCache` as `past_key_values`."""
    return Session(model, None)


class Session:
    """A model with compression connected, as a context manager; any number of generations.

    Attributes:
        cache: the `CompressedCache` of the latest generation, None before the first.
    """

    def __init__(self, model: PreTrainedModel, new_cache: dict[str, Any] | None, tower: TowerRecorder | None = None):
        model = writing_part(model)
        self.model, self.cache = model, None
        self._config = attention_config(model)
        self._tower, self._frames = tower, FrameRecorder(model)
        self._new_cache = new_cache
        self._forward_names = list(inspect.signature(model.forward).parameters)

    def __enter__(self) -> "Session":
        base = self._config._attn_implementation
        if base.startswith(PREFIX):
            raise KVCompressError("this model is already being compressed: leave the other context first")
        self._base = base
        self._config._attn_implementation = register_attention(base)
        self._hooks = [
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        self._hooks += self._frames.attach()
        if self._tower is not None:
            self._hooks += self._tower.attach()
        self._of_pass: list[RemovableHandle] = []
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_pass()
        for hook in self._hooks:
            hook.remove()
        self._config._attn_implementation = self._base

    def _before_forward(self, model: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Give a new generation its cache and tell the cache what is coming."""
        kwargs = dict(zip(self._forward_names, args, strict=False)) | kwargs
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        batch, columns = (embeds if ids is None else ids).shape[:2]
        cache = self._cache_for(kwargs, model)
        mask = kwargs.get("attention_mask")
        grid = kwargs.get("video_grid_thw")
        if grid is None and columns > 1:
            grid = self._frames.grid(ids)
        self._is_prompt = cache.start(batch, columns, ids, mask, grid)
        self._end_pass()
        if self._is_prompt and cache.policy.tokens is not None:
            self._of_pass = prune(text_decoder(model), self._base, cache, self._tower, self._frames, ids)
        if cache.policy.cluster.unrotated_queries and (self._is_prompt or cache.policy.decode is not None):
            self._of_pass += watch_rotary(text_decoder(model), cache.rotate)
        if cache.policy.cluster.second_pass and self._is_prompt:
            note = text_decoder(model).register_forward_pre_hook(self._note_decoder_inputs, with_kwargs=True)
            self._of_pass.append(note)
        if cache.policy.engine.prefill_chunk is not None and self._is_prompt:
            self._of_pass += feed_in_chunks(text_decoder(model), cache)
        kwargs["past_key_values"] = self.cache = cache
        return (), kwargs

    def _note_decoder_inputs(self, decoder: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        self._decoder_inputs = DecoderInputs.of(decoder, kwargs)

    def _end_pass(self) -> None:
        """Remove the hooks of one pass."""
        for hook in self._of_pass:
            hook.remove()
        self._of_pass = []

    def _after_forward(self, model: PreTrainedModel, args: tuple, kwargs: dict, output: Any) -> Any:
        """Finish a prompt. For `first_token="compressed"`: feed its last token again, on what was kept."""
        cache = kwargs["past_key_values"]
        self._end_pass()
        if not self._is_prompt:
            return None
        if cache.policy.cluster.second_pass:
            read_again(text_decoder(model), self._decoder_inputs, cache)
            del self._decoder_inputs
        cache.finish()
        if cache.policy.engine.first_token == "full":
            return None
        cache.forget_last()
        last = {"past_key_values": cache, "attention_mask": kwargs.get("attention_mask"), "use_cache": True}
        for name in ("input_ids", "inputs_embeds"):
            if kwargs.get(name) is not None:
                last[name] = kwargs[name][:, -1:]
        if kwargs.get("position_ids") is not None:
            last["position_ids"] = kwargs["position_ids"][..., -1:]
        return model(**last, return_dict=kwargs.get("return_dict"))

    @contextmanager
    def reuse(self) -> Iterator[CompressedCache]:
        """Ask several questions about one compressed prompt: each `with session.reuse() as cache:` starts from what
        the cache held when it was entered, and leaves it as it was.

        ```python
        model(**context)                      # a prefill: compressed and stored
        for question in questions:            # input_ids and attention_mask of context and question together
            with session.reuse() as cache:
                answer = model.generate(**question, past_key_values=cache)
        ```
        """
        if self.cache is None:
            raise KVCompressError("there is nothing to reuse yet: run the model on the context first")
        with self.cache.reuse() as cache:
            yield cache

    def _cache_for(self, kwargs: dict, model: PreTrainedModel) -> CompressedCache:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, CompressedCache):
            check_heads(model, self._config, cache.policy)
            return cache
        use_cache = kwargs.get("use_cache")
        if use_cache is False or (use_cache is None and not self._config.use_cache):
            raise KVCompressError("use_cache is off: without a KV cache there is nothing to compress")
        if self._new_cache is None:
            raise KVCompressError("attach(...) compresses nothing by itself: give past_key_values=CompressedCache(...)")
        # `generate` brings an empty DynamicCache of its own; the model returns ours in its place.
        if cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length()):
            raise KVCompressError(
                f"past_key_values is a {type(cache).__name__} with {cache.get_seq_length()} tokens: inside "
                "compress(...) it must be a CompressedCache or absent"
            )
        return CompressedCache(model.config, **self._new_cache)
