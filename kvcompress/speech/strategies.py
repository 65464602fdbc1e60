"""Cache strategies: the KV caches of thinker and talker."""

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import (
    Cache,
    CompileConfig,
    DynamicCache,
    PreTrainedTokenizerBase,
    Qwen2_5OmniForConditionalGeneration,
    StaticCache,
)

from ..bench.contenders import MethodSpec, compile_config
from ..cache.cache import CompressedCache
from ..cache.layer import nbytes_of
from ..errors import KVCompressError
from ..hooks.session import attach
from ..methods import method_info
from ..tokens.base import TokenMethod
from . import answering
from .kinds import STRATEGIES, Kind
from .streaming import Window


def method_of(kind: Kind, given: argparse.Namespace) -> MethodSpec:
    """Return the method for a compressing strategy's thinker. Raises KVCompressError."""
    return decoding_within(given.decode_budget, _method_of(kind, given))


def _method_of(kind: Kind, given: argparse.Namespace) -> MethodSpec:
    info = method_info(given.method.split(":")[0])
    if issubclass(info.cls, TokenMethod):
        raise KVCompressError(f"method {info.name!r} drops tokens of the prompt, but the talker reads all of them")
    method = MethodSpec.parse(given.method, given.ratio)
    if kind.is_static:
        method = replace(method, options={**method.options, "cache_implementation": "static"})
    return method


def talker_method(given: argparse.Namespace) -> MethodSpec | None:
    """Return the method for the talker's cache, never a static one, which transformers' talker does not support."""
    if not given.compress_talker and given.talker_decode_budget is None:
        return None
    return decoding_within(given.talker_decode_budget, _method_of(Kind(compresses=True), given))


def decoding_within(budget: int | None, method: MethodSpec) -> MethodSpec:
    return method if budget is None else replace(method, options={**method.options, "decode_budget": budget})


class CacheStrategy:
    """One cache strategy on one model.

    Attributes:
        method: our method; None if transformers' own cache is used.
    """

    def __init__(
        self,
        name: str,
        model: Qwen2_5OmniForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        given: argparse.Namespace,
        longest: int,
    ):
        """`longest` is the most tokens of a prompt: transformers' static cache has one shape for all."""
        self.model, self.tokenizer, self.given = model, tokenizer, given
        self.kind = STRATEGIES[name]
        self.method = method_of(self.kind, given) if self.kind.compresses else None
        self._static: StaticCache | None = None
        if self.kind.is_static and not self.kind.compresses:
            self._static = StaticCache(model.thinker.config, max_cache_len=longest + given.text_tokens)

    def answer(
        self, inputs: dict[str, torch.Tensor], hear: Callable[[torch.Tensor], object] | None = None
    ) -> dict[str, Any]:
        """Return a row of numbers. The sound goes to `hear` block by block and is not kept."""
        model, given = self.model, self.given
        cache = self._cache()
        talker_cache = self._talker_cache() if model.has_talker else None
        with ExitStack() as stack:
            for part, its_cache in ((model.thinker, cache), (getattr(model, "talker", None), talker_cache)):
                if isinstance(its_cache, CompressedCache):
                    stack.enter_context(attach(part))
            answer = answering.answer(
                model,
                inputs,
                given.text_tokens,
                given.codec_tokens,
                given.exact,
                given.speaker,
                given.seed,
                cache,
                talker_cache,
                self._compile_config() if self.kind.is_static and given.compile else None,
                None if given.one_piece else Window(*given.window),
                self.kind.overlaps,
                hear or (lambda block: None),
            )
        row = asdict(replace(answer, waveform=None))
        del row["waveform"]
        row |= {
            "text": self.tokenizer.decode(answer.text, skip_special_tokens=True),
            "text_tokens": len(answer.text),
            "prompt_tokens": inputs["input_ids"].shape[1],
            "real_time_factor": answer.real_time_factor,
            "kv_bytes": _nbytes(cache),
            "talker_kv_bytes": None if talker_cache is None else _nbytes(talker_cache),
            "realised_ratio": None,
        }
        if isinstance(cache, CompressedCache):
            row["realised_ratio"] = statistics.mean(layer[0] for layer in cache.realised_ratios())
        return row

    def _compile_config(self) -> CompileConfig:
        config = compile_config(self.model.device)
        if self.model.has_talker:  # CUDA graphs would overwrite the hidden states that the talker reads later
            config.mode = "default"
        return config

    def _cache(self) -> Cache:
        config = self.model.thinker.config
        if self.method is not None:
            return self.method.cache(config, self.given.text_tokens + 1)
        if self._static is not None:
            self._static.reset()
            return self._static
        return DynamicCache(config=config)

    def _talker_cache(self) -> Cache:
        config = self.model.talker.config
        method = talker_method(self.given)
        if self.kind.compresses and method is not None:
            return method.cache(config, self.given.codec_tokens + 1)
        return DynamicCache(config=config)


def _nbytes(cache: Cache) -> int:
    return cache.nbytes if isinstance(cache, CompressedCache) else nbytes_of(cache.layers)
