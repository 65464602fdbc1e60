"""How methods and scores look, the same in every table, plot, page and leaderboard."""

from collections.abc import Mapping
from zlib import crc32

import pandas as pd

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


def short_names(frame: pd.DataFrame) -> tuple[list[str], str]:
    """Return each row's method with the options that not all rows of the method share; and the shared options in one
    text: `first_token=compressed; adakv, snapkv: window_size=8`."""
    shared = {
        method: [option for option in rows.iloc[0] if all(option in own for own in rows)]
        for method, rows in frame.groupby("method", sort=False)["options"]
    }
    names = [
        " ".join([row.method, *(option for option in row.options if option not in shared[row.method])])
        for row in frame.itertuples()
    ]
    methods_of: dict[str, list[str]] = {}
    for method, option in ((method, option) for method, own in shared.items() for option in own):
        methods_of.setdefault(option, []).append(method)
    options_of: dict[str, list[str]] = {}
    compressed = set(shared) - {"full"}
    for option, methods in methods_of.items():
        whose = "" if compressed and compressed.issubset(methods) else ", ".join(methods) + ": "
        options_of.setdefault(whose, []).append(option)
    return names, "; ".join(whose + " ".join(options_of[whose]) for whose in sorted(options_of))


def score_scale(frame: pd.DataFrame) -> int:
    """Return 100 for scores in [0, 1], which are shown in percent; 1 for sums, such as MME's, or scores out of 100."""
    return 1 if (frame["score"].astype(float) > 1).any() else 100
