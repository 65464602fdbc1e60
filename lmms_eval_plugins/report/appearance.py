"""A method's colour is the same in every plot, page and leaderboard, whatever stands beside it there."""

from collections.abc import Mapping
from zlib import crc32

# Six of Okabe and Ito, which colour-blind people tell apart, and four more. Black is the full cache.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f00", "#a6611a", "#5a7d9a")
MARKERS = "os^Dv<>pXP*hd"  # matplotlib's names
# Methods that are often in one plot have colours of their own.
OFTEN_TOGETHER = (
    "snapkv", "streamingllm", "adakv", "random", "h2o", "pyramidkv", "tova", "knorm", "vl-cache", "expected-attention",
)  # fmt: skip


def colour(method: str) -> str:
    """The method's colour as #rrggbb; by its name, so that one of your own has always the same, too."""
    place = OFTEN_TOGETHER.index(method) if method in OFTEN_TOGETHER else crc32(method.encode())
    return COLOURS[place % len(COLOURS)]


def markers(methods: Mapping[str, str]) -> dict[str, str]:
    """A marker for each series of a plot, so that no two share colour and marker (up to 13 series of one colour).

    Args:
        methods: the series' name -> its method.
    """
    found: dict[str, str] = {}
    of_colour: dict[str, int] = {}
    for series, method in methods.items():
        place = of_colour.get(colour(method), 0)
        of_colour[colour(method)] = place + 1
        found[series] = MARKERS[place % len(MARKERS)]
    return found
