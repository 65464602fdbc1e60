"""A passage in prompts of random tokens, and a tokenizer that reads them."""

import torch

from tests.support.families import FIRST_TEXT

TOKENS = (97, 98, 99)  # of which random prompts have each now and then, but not all in a row
PASSAGE = "abc"


class OneLetterPerToken:
    """A tokenizer that only decodes: each id is the character of its number."""

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(map(chr, ids))


def with_passage(inputs: dict) -> dict:
    """Return inputs with the passage at another place of each row, in text; rows without a place are left alone."""
    ids, width = inputs["input_ids"].clone(), len(TOKENS)
    if ids.shape[1] < width:
        return inputs
    is_text = (ids >= FIRST_TEXT) & inputs["attention_mask"].bool()
    for row, places in enumerate(is_text.unfold(1, width, 1).all(-1)):
        if len(starts := places.nonzero()[:, 0]):
            start = int(starts[(7 * row + len(starts) // 2) % len(starts)])
            ids[row, start : start + width] = torch.tensor(TOKENS)
    return {**inputs, "input_ids": ids}


def passage_of(inputs: dict) -> torch.Tensor:
    """Return bool (batch, columns), True at the passage's tokens."""
    ids, width = inputs["input_ids"], len(TOKENS)
    starts = (ids.unfold(1, width, 1) == torch.tensor(TOKENS)).all(-1)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for offset in range(width):
        mask[:, offset : starts.shape[1] + offset] |= starts
    return mask
