"""`PrefixCache`: the model's states for common prefixes of prompts, computed once and kept in a radix tree.

The tree is in `cache.prefix_tree`; `resumed_prompt` continues a prompt after its prefix."""

import sys
import weakref
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.contents import Contents
from ..cache.prefix_tree import Columns, Path, PrefixTree
from ..errors import KVCompressError
from .context_first import KeptContexts, context_key
from .model import adapters_at_work
from .resumed_prompt import ResumedPrompt, given_by


class PrefixCache:
    """Keeps prompts' states for other prompts with the same prefix, such as several questions about one image or
    document.

    ```python
    prefixes = kvcompress.PrefixCache(gb=4)
    with kvcompress.compress(model, "snapkv", 0.2, prefix_cache=prefixes):
        for question in questions:  # each with the same image
            output = model.generate(**question, max_new_tokens=16)
    prefixes.reused_tokens
    ```

    It serves any number of methods, generations and models, one after the other; only prompts of the same model in the
    same state (adapters, attention implementation, dtype) share. Nothing is shared if a method changes the prefill
    (token methods, methods that read the prompt twice or use hidden states, `prefill_chunk=`), in models with sliding
    windows (but for the context of `scope="context-first"`), while gradients are computed, or if logits of more than
    the last tokens are requested.

    Attributes:
        room: size in bytes.
        prompt_tokens: real tokens of all prompts so far.
        reused_tokens: how many of them did not pass through the model again.
    """

    def __init__(self, gb: float, device: str | None = None):
        """Create an empty cache.

        Args:
            gb: size in gigabytes (2**30 bytes); 0 keeps nothing. The least recently used states are dropped first. A
                prompt that passes through the model needs memory of its own in addition.
            device: where the states are kept, such as "cpu" for a model on a GPU; None: on the model's device.

        Raises:
            KVCompressError: for a negative size.
        """
        if not gb >= 0:
            raise KVCompressError(f"gb={gb}: the size of a prefix cache in gigabytes is 0 or more")
        self.room = int(min(gb * 2**30, sys.maxsize))
        self._tree, self._contexts = PrefixTree(self.room, device), KeptContexts(self.room)
        self._models: weakref.WeakKeyDictionary[PreTrainedModel, object] = weakref.WeakKeyDictionary()
        self.prompt_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._tree.nbytes + self._contexts.nbytes

    @property
    def reused_tokens(self) -> int:
        return self._tree.reused_tokens

    def clear(self) -> None:
        """Drop everything; needed after a model's weights, or a method's file under the same name, have changed."""
        self._tree.clear()
        self._contexts.clear()
        self._tree.room = self.room

    def attach(
        self, prompt: ResumedPrompt, decoder: PreTrainedModel, attention: str, cache: CompressedCache, wanted: object
    ) -> list[ResumedPrompt]:
        """Like `ResumedPrompt.attach`, starting after a prefix that other prompts of this decoder have in common.

        `attention` is the decoder's attention implementation."""
        if not prompt.is_begun:
            self.prompt_tokens += sum(cache.announced.lengths)
        if not self._tree.room:
            return prompt.attach(decoder, cache, wanted)
        return prompt.attach(decoder, cache, wanted, self._tree, self._identity(decoder, attention))

    def read_context(
        self,
        decoder: PreTrainedModel,
        attention: str,
        cache: CompressedCache,
        inputs: dict,
        compress: Callable[[], None],
    ) -> None:
        """Fill an empty cache with what it keeps of the context announced to it, from an equal one or by `compress`.

        `inputs` are the decoder's arguments for the context. Its states serve other methods, as a prompt's do; the kept
        entries are much smaller, so they take precedence where both do not fit."""
        if not cache.is_empty or not self.room:
            compress()
            return
        tokens, identity = cache.announced, self._identity(decoder, attention)
        marks = [part for part in (tokens.protected, tokens.groups) if part is not None]  # the question's length counts
        given = []
        for row, length in enumerate(tokens.lengths):
            pads = tokens.columns - length
            given.append([*given_by(inputs, row, pads), *(part[row, pads:] for part in marks)])
        key = context_key(identity, cache, tokens.columns, given)
        if (known := self._contexts.find(key)) is not None:
            known.restore(cache)
            self._tree.reused_tokens += sum(tokens.lengths)
            return
        resumed = ResumedPrompt().attach(decoder, cache, 1, self._tree, identity)
        try:
            compress()
        finally:
            for prompt in resumed:
                prompt.remove()
        device = self._tree.device  # what is kept of contexts stays on the model's
        if device is None or torch.device(device) == cache.compressed_layers[0].device:
            self._contexts.add(key, Contents.of(cache))
        self._tree.shrink(self.room - self._contexts.nbytes)

    def _identity(self, decoder: PreTrainedModel, attention: str) -> tuple[object, ...]:
        """Return what prompts must have in common to share: the decoder in its present state."""
        model = self._models.setdefault(decoder, object())  # unlike an id, it is never reused
        return (model, attention, decoder.dtype, *adapters_at_work(decoder))

    def of_requests(self, decoder: PreTrainedModel, attention: str, rotated: bool) -> "RequestPrefixes | None":
        """Return the part for text requests in pages, None if it keeps nothing; `rotated` if it has their rotation."""
        return RequestPrefixes(self, decoder, attention, rotated) if self._tree.room else None


class RequestPrefixes:
    """Prefixes of text requests that a decoder gets as token ids, counted from position 0.

    The decoder's state is looked up for each request: a manager may outlast an adapter."""

    def __init__(self, cache: PrefixCache, decoder: PreTrainedModel, attention: str, rotated: bool):
        self._cache, self._tree, self._rotated = cache, cache._tree, rotated
        self._model = decoder, attention

    def find(self, prompt: list[int]) -> Path:
        """Find the longest known prefix; `PrefixTree.find`."""
        return self._tree.find(*self._key(prompt))

    def count_reused(self, tokens: int) -> None:
        """Count tokens of a prefix that a request starts with."""
        self._tree.reused_tokens += tokens

    def add(self, prompt: list[int], computed: Columns) -> None:
        """Add a prompt with the states of all its tokens."""
        self._cache.prompt_tokens += len(prompt)
        self._tree.add(*self._key(prompt), computed, 0)

    def _key(self, prompt: list[int]) -> tuple[object, Columns]:
        """Return who may share, and what identifies the tokens."""
        identity = (*self._cache._identity(*self._model), "pages", self._rotated)
        return identity, given_by({"input_ids": torch.tensor([prompt])}, 0, 0)
