"""Where passages of a prompt's text are among its tokens."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import KVCompressError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def token_spans(
    tokenizer: "PreTrainedTokenizerBase | ProcessorMixin", input_ids: Sequence[int] | torch.Tensor, *passages: str
) -> str:
    """Return the tokens of passages of a prompt, as `protect=` and `fair=` take them.

    ```python
    inputs = processor(text=prompt, images=image, return_tensors="pt")
    kept = kvcompress.token_spans(processor, inputs["input_ids"], "Answer in one word.")  # such as tokens:410-415
    kvcompress.compress(model, "snapkv", 0.2, protect=kept)
    ```

    A token that holds a passage's first or last characters and others besides belongs to it.

    Args:
        tokenizer: the prompt's tokenizer or processor.
        input_ids: token ids of one prompt without pads, (tokens,) or (1, tokens).
        passages: characters of the prompt, each as it stands there.

    Raises:
        KVCompressError: for more than one prompt, no passage, or one that the prompt does not have exactly once.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise KVCompressError(f"token_spans takes one prompt, (tokens,) or (1, tokens), not {tuple(ids.shape)}")
    if not passages:
        raise KVCompressError("token_spans needs a passage of the prompt")
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return "+".join(_span(decode, ids.tolist(), passage) for passage in passages)


def _span(decode: Callable[[list[int]], str], ids: list[int], passage: str) -> str:
    """Find the shortest tokens whose text has the passage; whether more tokens have it only ever changes once."""
    times = decode(ids).count(passage) if passage else 0
    if times != 1:
        raise KVCompressError(f"the prompt has {passage!r} {times} times, not once: no tokens can be named by it")
    stop = _first(len(ids), lambda stop: passage in decode(ids[:stop]))
    start = stop - _first(stop, lambda length: passage in decode(ids[stop - length : stop]))
    return f"tokens:{start}-{stop}"


def _first(most: int, holds: Callable[[int], bool]) -> int:
    """Return the least number of 1 to `most` from which on `holds` is true."""
    return 1 + bisect_left(range(1, most), True, key=holds)
