"""`protect=`: tokens of a prompt that no eviction may drop, counted inside the budget; and `fair=`: spans of it that
keep equal shares.

A setting is a sum of parts, such as `system+last:8`:

- `prompt`: all that is kept of the prompt, while an answer is evicted.
- `system`: the tokens before the first image or video; `question`: those after the last; `text`: all others but images
  and videos.
- `first:N`, `last:N`: N tokens of the prompt; `tokens:A-B`: those from A up to, but not including, B.

Positions count a row's own tokens, without pads. `system`, `first` and `tokens` are of the first prompt in a cache.
`fair=` takes `first`, `last` and `tokens` alone, apart from each other, and all of them are of the first prompt.
"""

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from ..errors import KVCompressError

NAMED = ("prompt", "system", "question", "text")
OF_FIRST_PROMPT = ("system", "first", "tokens")
SPANS = "first:N, last:N or tokens:A-B, joined by +"
FORMS = f"prompt, system, question, text, {SPANS}"


@dataclass(frozen=True)
class Spans:
    """A parsed setting.

    Attributes:
        parts: (name, first, stop) each; the numbers are zero where a part has none.
    """

    parts: tuple[tuple[str, int, int], ...]

    @classmethod
    @cache
    def parse(cls, setting: str) -> "Spans":
        """Raises KVCompressError for anything but `FORMS`."""
        return cls(tuple(_parsed(part) for part in setting.split("+")))

    @classmethod
    @cache
    def parse_apart(cls, setting: str) -> "Spans":
        """Raises KVCompressError for anything but `SPANS`, and for spans that share tokens in any prompt."""
        spans = cls(tuple(_parsed_span(part, "fair", SPANS) for part in setting.split("+")))
        ranges = sorted((first, stop) for name, first, stop in spans.parts if name != "last")
        counts = [name for name, _, _ in spans.parts].count("last")
        if counts > 1 or any(one[1] > other[0] for one, other in pairwise(ranges)):
            raise KVCompressError(f"fair={setting!r} names tokens twice")
        return spans

    @property
    def whole_prompt(self) -> bool:
        """Whether everything that was kept of a prompt stays while its answer is evicted."""
        return any(name == "prompt" for name, _, _ in self.parts)

    @property
    def asks_vision(self) -> bool:
        """Whether the places of images and videos matter."""
        return any(name in NAMED[1:] for name, _, _ in self.parts)

    def mask(self, lengths: list[int], vision: torch.Tensor | None, columns: int, is_first: bool) -> torch.Tensor:
        """Return bool (batch, columns), on the host, True at the tokens of all parts but `prompt`.

        Args:
            lengths: real tokens of each row, aligned to the right of `columns`.
            vision: bool (batch, columns), True at image and video tokens; None if they are unknown.
            is_first: whether this is the first prompt in its cache.

        Raises:
            KVCompressError: if a part needs image or video tokens that are unknown or that a row lacks, or a span is
                not in a prompt.
        """
        if self.asks_vision and vision is None:
            raise KVCompressError("protect=system, question and text need input_ids to find images and videos")
        mask = torch.zeros(len(lengths), columns, dtype=torch.bool)
        for row, length in enumerate(lengths):
            for name, first, stop in self.parts:
                if name != "prompt" and (is_first or name not in OF_FIRST_PROMPT):
                    seen = None if vision is None else vision[row, columns - length :]
                    mask[row, columns - length :] |= _tokens(name, first, stop, length, seen, row)
        return mask

    def groups(self, lengths: list[int], columns: int) -> torch.Tensor:
        """Return LongTensor (batch, columns), on the host: 1 at the tokens of the first part, 2 at those of the second
        and so on, 0 at all others.

        Args:
            lengths: as in `mask`.

        Raises:
            KVCompressError: if a span is not in a prompt, or two share a token.
        """
        groups = torch.zeros(len(lengths), columns, dtype=torch.long)
        for row, length in enumerate(lengths):
            own = groups[row, columns - length :]
            for number, (name, first, stop) in enumerate(self.parts, 1):
                span = _span(name, first, stop, length, row, "fair")
                if bool(own[span].any()):
                    raise KVCompressError(
                        f"fair=: {name} shares tokens with another span in row {row}, whose prompt has {length} tokens"
                    )
                own[span] = number
        return groups


def _parsed(part: str) -> tuple[str, int, int]:
    if part in NAMED:
        return part, 0, 0
    return _parsed_span(part, "protect", FORMS)


def _parsed_span(part: str, option: str, forms: str) -> tuple[str, int, int]:
    if found := re.fullmatch(r"(first|last):(\d+)", part):
        return found[1], 0, int(found[2])
    found = re.fullmatch(r"tokens:(\d+)-(\d+)", part)
    if found is None or int(found[1]) >= int(found[2]):
        raise KVCompressError(f"{option}={part!r} names no tokens: allowed are {forms}")
    return "tokens", int(found[1]), int(found[2])


def _tokens(name: str, first: int, stop: int, length: int, vision: torch.Tensor | None, row: int) -> torch.Tensor:
    """Return bool (length,), True at the tokens of one part in one row."""
    if name == "text":
        return ~vision
    if name in ("system", "question"):
        found = vision.nonzero()
        if not len(found):
            raise KVCompressError(
                f"protect={name!r}: row {row} has no image or video token that says where it is; give first:N, last:N "
                "or tokens:A-B"
            )
        places = torch.arange(length)
        return places < found[0] if name == "system" else places > found[-1]
    inside = torch.zeros(length, dtype=torch.bool)
    inside[_span(name, first, stop, length, row, "protect")] = True
    return inside


def _span(name: str, first: int, stop: int, length: int, row: int, option: str) -> slice:
    """Return the tokens of `first`, `last` or `tokens` in one row."""
    if stop > length:
        wanted = f"tokens:{first}-{stop}" if name == "tokens" else f"{name}:{stop}"
        raise KVCompressError(f"{option}={wanted!r} is not in the prompt of row {row}, which has {length} tokens")
    return slice(length - stop, length) if name == "last" else slice(first, stop)
