"""Where passages of a prompt's text are among its tokens: `protect_text=` and `token_spans`."""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
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
    decode, own = Decoder(tokenizer), ids.tolist()
    spans = [_span(decode, own, passage, "the prompt") for passage in passages]
    return "+".join(f"tokens:{start}-{stop}" for start, stop in spans)


class Decoder:
    """Decodes token ids to all of their text. Copies share the tokenizer, which is large; a pickle has none."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | ProcessorMixin | None"):
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, object]) -> "Decoder":
        return self

    def __reduce__(self) -> tuple:
        return Decoder, (None,)

    def __call__(self, ids: list[int]) -> str:
        """Raises KVCompressError if there is no tokenizer."""
        if not hasattr(self._tokenizer, "decode"):
            kind = type(self._tokenizer).__name__
            raise KVCompressError(f"protect_text= needs tokenizer=, the model's tokenizer or processor, not a {kind}")
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def parse_passages(setting: str) -> tuple[str, ...]:
    """Return the passages of `protect_text=`: a text is one, a JSON list of texts is several."""
    try:
        found = json.loads(setting)
    except (ValueError, RecursionError):
        return (setting,)
    return tuple(found) if isinstance(found, list) and all(isinstance(each, str) for each in found) else (setting,)


def as_setting(value: object) -> object:
    """Return passages as the one text, of one line, that results name them by; leave other values to their check."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # a command line reads 192 as a number
    passages = parse_passages(value) if isinstance(value, str) else value
    if not isinstance(passages, list | tuple) or not all(isinstance(each, str) for each in passages):
        return value
    if not all(passages) or not passages:
        raise ValueError("Input should have characters of the prompt")
    is_plain = len(passages) == 1 and passages[0].isprintable() and parse_passages(passages[0]) == (*passages,)
    return passages[0] if is_plain else json.dumps(passages, ensure_ascii=False)


def passage_mask(
    decode: Decoder, passages: tuple[str, ...], ids: torch.Tensor | None, lengths: list[int]
) -> torch.Tensor:
    """Return bool (batch, columns), True at the tokens of all passages in each row.

    Args:
        ids: token ids (batch, columns), on the host; None if they are unknown.
        lengths: real tokens of each row, aligned to the right.

    Raises:
        KVCompressError: if there are no ids, no tokenizer, or a row does not have a passage exactly once.
    """
    if ids is None:
        raise KVCompressError("protect_text= needs input_ids to find its passages")
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        begin = ids.shape[1] - length
        own = ids[row, begin:].tolist()
        for passage in passages:
            start, stop = _span(decode, own, passage, f"protect_text=: the prompt of row {row}")
            mask[row, begin + start : begin + stop] = True
    return mask


def _span(decode: Decoder, ids: list[int], passage: str, prompt: str) -> tuple[int, int]:
    """Find the shortest tokens whose text has the passage; whether more tokens have it only ever changes once."""
    text = decode(ids)
    times = text.count(passage) if passage else 0
    if times != 1:
        at = text.lower().find(passage.lower())
        other = f", but {text[at : at + len(passage)]!r}" if passage and not times and at >= 0 else ""
        raise KVCompressError(f"{prompt} has {passage!r} {times} times, not once{other}: no tokens can be named by it")
    stop = _first(len(ids), lambda stop: passage in decode(ids[:stop]))
    start = stop - _first(stop, lambda length: passage in decode(ids[stop - length : stop]))
    return start, stop


def _first(most: int, holds: Callable[[int], bool]) -> int:
    """Return the least number of 1 to `most` from which on `holds` is true."""
    return 1 + bisect_left(range(1, most), True, key=holds)
