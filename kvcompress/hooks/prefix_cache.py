"""Prompts that begin alike: what the model computes of their common beginning is kept in a radix tree (see
`cache.prefix_tree`), and computed once. How a prompt goes on behind it: see `resumed_prompt`."""

import sys
import weakref

from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.prefix_tree import PrefixTree
from ..errors import KVCompressError
from .model import adapters_at_work
from .resumed_prompt import ResumedPrompt


class PrefixCache:
    """Keeps prompts' states for other prompts that begin alike: several questions about one image, video or document.

    ```python
    prefixes = kvcompress.PrefixCache(gb=4)
    with kvcompress.compress(model, "snapkv", 0.2, prefix_cache=prefixes):
        for question in questions:  # each with the same image
            output = model.generate(**question, max_new_tokens=16)
    prefixes.reused_tokens
    ```

    It serves any number of methods, generations and models one after the other; only prompts of the same model in the
    same state (adapters, attention implementation, dtype) share. Where a method changes the prefill (token methods,
    methods that read the prompt twice or see hidden states, `prefill_chunk=`), and in models with sliding windows,
    nothing is shared; nor while gradients are computed, or where logits of more than the last tokens are asked for.

    Attributes:
        prompt_tokens: real tokens of all prompts so far.
        reused_tokens: those of them that did not pass through the model again.
    """

    def __init__(self, gb: float, device: str | None = None):
        """Hold nothing yet.

        Args:
            gb: gigabytes (2**30 bytes) to hold; 0 keeps nothing. A prompt that passes through the model needs memory of
                its own besides. What was used least recently leaves first.
            device: where it is held, such as "cpu" for a model on a GPU; None: where the model is.

        Raises:
            KVCompressError: for a negative size.
        """
        if not gb >= 0:
            raise KVCompressError(f"gb={gb}: the size of a prefix cache in gigabytes is 0 or more")
        self._tree = PrefixTree(int(min(gb * 2**30, sys.maxsize)), device)
        self._models: weakref.WeakKeyDictionary[PreTrainedModel, object] = weakref.WeakKeyDictionary()
        self.prompt_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._tree.nbytes

    @property
    def reused_tokens(self) -> int:
        return self._tree.reused_tokens

    def clear(self) -> None:
        """Forget everything: after a model's weights were changed."""
        self._tree.clear()

    def attach(
        self, prompt: ResumedPrompt, decoder: PreTrainedModel, attention: str, cache: CompressedCache, wanted: object
    ) -> list[ResumedPrompt]:
        """As `ResumedPrompt.attach`, behind what other prompts of this decoder began with, which attends by the
        implementation `attention`."""
        if not prompt.is_begun:
            self.prompt_tokens += sum(cache.announced.lengths)
        if not self._tree.room:
            return prompt.attach(decoder, cache, wanted)
        model = self._models.setdefault(decoder, object())  # unlike an id, it is nobody else's afterwards
        identity = (model, attention, decoder.dtype, *adapters_at_work(decoder))
        return prompt.attach(decoder, cache, wanted, self._tree, identity)
