"""Colours and markers of methods, the same in every plot, page and leaderboard."""

from collections.abc import Mapping
from zlib import crc32

# Six colours of Okabe and Ito, which colour-blind people can tell apart, and four more. The full cache is black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f00", "#a6611a", "#5a7d9a")
MARKERS = "os^Dv<>pXP*hd"  # matplotlib's names
# Methods that often share a plot have distinct colours.
OFTEN_TOGETHER = (
    "snapkv", "streamingllm", "adakv", "random", "h2o", "pyramidkv", "tova", "knorm", "vl-cache", "expected-attention",
)  # fmt: skip


def colour(method: str) -> str:
    """Return a method's colour as #rrggbb. It depends only on the name, so a user's own method has a stable one too."""
    place = OFTEN_TOGETHER.index(method) if method in OFTEN_TOGETHER else crc32(method.encode())
    return COLOURS[place % len(COLOURS)]


def markers(methods: Mapping[str, str]) -> dict[str, str]:
    """Choose a marker for each series so that no two share colour and marker (up to 13 series of one colour).

    Args:
        methods: name of a series -> its method.
    """
    found: dict[str, str] = {}
    of_colour: dict[str, int] = {}
    for series, method in methods.items():
        place = of_colour.get(colour(method), 0)
        of_colour[colour(method)] = place + 1
        found[series] = MARKERS[place % len(MARKERS)]
    return found
