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
    ids = token_ids(path, tokenizer)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if begin and tokenizer("a").input_ids[:1] != begin:  # the tokenizer has one but does not add it
        begin = []
    rows = [torch.tensor([begin + piece]) for piece in cut(ids, max(length - len(begin), 1), number, seed)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]


def cut(ids: list[int], length: int, number: int, seed: int) -> list[list[int]]:
    """Cut token ids into pieces as `pieces` does a text, without beginnings."""
    starts = range(0, max(len(ids) - length + 1, 1), length)
    chosen = sorted(random.Random(seed).sample(starts, min(number, len(starts))))
    return [ids[start : start + length] for start in chosen]


def token_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text file, without special tokens. Raises KVCompressError as `pieces` does."""
    ids = tokenizer(read_text(path), add_special_tokens=False, verbose=False).input_ids
    if not ids:
        raise KVCompressError(f"--text {shown(str(path))} has no tokens")
    return ids


def read_text(path: Path) -> str:
    """Read a text file. Raises KVCompressError if it cannot be read, is not UTF-8 or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise KVCompressError(f"--text {shown(str(path))} cannot be read: {reason}") from None
    if not text.strip():
        raise KVCompressError(f"--text {shown(str(path))} is empty")
    return text
