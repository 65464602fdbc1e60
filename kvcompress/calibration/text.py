"""Prompts from a text: pieces of equal length, drawn at random."""

import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import KVCompressError, shown


def pieces(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, number: int, seed: int
) -> list[dict[str, torch.Tensor]]:
    """Cut a text file into pieces of `length` tokens and draw `number` of them, or all if there are fewer, in order.

    Each piece begins as the tokenizer begins a text. A shorter rest at the end is dropped, unless it is the whole text.
    Raises KVCompressError for a file that is not text or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise KVCompressError(f"--text {shown(str(path))} cannot be read: {reason}") from None
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not ids:
        raise KVCompressError(f"--text {shown(str(path))} is empty")
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if begin and tokenizer("a").input_ids[:1] != begin:  # the tokenizer has one but does not add it
        begin = []
    room = max(length - len(begin), 1)
    starts = range(0, max(len(ids) - room + 1, 1), room)
    chosen = sorted(random.Random(seed).sample(starts, min(number, len(starts))))
    rows = [torch.tensor([begin + ids[start : start + room]]) for start in chosen]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
