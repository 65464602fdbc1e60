"""Which method, at which ratio, loses next to nothing: chosen on one half of the questions, tested on the other."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..cells.results import exact
from ..report.against import MARGIN, signed
from ..report.metrics import Numbers
from ..report.significance import cluster_codes, paired_test

NOT_CHOSEN = ("full", "hindsight", "blind")  # compresses nothing, knows the answer, sees nothing
FEWEST_METHODS = 3  # among which there is something to choose
FEWEST_QUESTIONS = 20  # in each half
BEST = 8  # methods of the plot


def may_be_chosen(variant: str) -> bool:
    """Return whether a method, written with its options, is none of `NOT_CHOSEN`."""
    return variant.partition(" ")[0] not in NOT_CHOSEN


@dataclass(frozen=True)
class Choice:
    """The smallest ratio at which a method loses less than `MARGIN` points. At each ratio, from the largest down, the
    method that is best on the first half of the questions is tested on the second, until one loses more. If that is the
    first, `is_enough` is False.

    Attributes:
        difference, low, high: from the full cache on the second half, with the 95 % interval, in points.
        questions: in the second half.
        methods: among how many it was chosen.
    """

    method: str
    ratio: float
    difference: float
    low: float
    high: float
    questions: int
    methods: int

    @property
    def is_enough(self) -> bool:
        return self.difference > -MARGIN

    def __str__(self) -> str:
        found = f"{self.method} at {exact(self.ratio)}: {signed(self.difference)} points"
        found += f" [{signed(self.low)}, {signed(self.high)}]"
        return found if self.is_enough else f"none: the best of {self.methods} methods loses more, {found}"

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "text": str(self), "is_enough": self.is_enough}


def choose(
    scores: Mapping[tuple[str, float], Numbers], full: Numbers, clusters: Sequence | None = None
) -> Choice | None:
    """Choose among methods; None if there are fewer than `FEWEST_METHODS`, or `FEWEST_QUESTIONS` in a half.

    Args:
        scores: (method, ratio) -> scores of the questions, (questions,). `NOT_CHOSEN` are passed over.
        full: the scores with the full cache, (questions,).
        clusters: what each question belongs to, (questions,); a cluster is never divided. Default: each question is one
            of its own.
    """
    tried = {key: np.asarray(own, float) for key, own in scores.items() if may_be_chosen(key[0])}
    methods = {method for method, _ in tried}
    codes = cluster_codes(clusters, len(full))
    first, full = codes % 2 == 0, np.asarray(full, float)
    every = np.concatenate([full, *tried.values()])
    scale = 100 if every.min() >= 0 and every.max() <= 1 else 1
    if len(methods) < FEWEST_METHODS or min(first.sum(), (~first).sum()) < FEWEST_QUESTIONS:
        return None
    # Of methods that are equal at a ratio, the one that is best over all ratios.
    overall = {name: np.mean([own[first].mean() for key, own in tried.items() if key[0] == name]) for name in methods}
    chosen = None
    for ratio in sorted({ratio for _, ratio in tried}, reverse=True):
        at_ratio = (key for key in tried if key[1] == ratio)
        method = max(at_ratio, key=lambda key: (tried[key][first].mean(), overall[key[0]], key))[0]
        found = paired_test(tried[method, ratio][~first], full[~first], codes[~first])
        points = (scale * value for value in (found.difference, found.low, found.high))
        tested = Choice(method, ratio, *points, found.questions, len(methods))
        if not tested.is_enough:
            return chosen or tested
        chosen = tested
    return chosen


def best_methods(scores: Mapping[tuple[str, float], Numbers]) -> list[str]:
    """Return the `BEST` methods by the mean over the ratios that all have (if there is none, over each one's own),
    best first, then `hindsight` if it is there. `scores`: as for `choose`, without the full cache."""
    frame = pd.Series({key: float(np.mean(own)) for key, own in scores.items()}).unstack()
    common = frame.dropna(axis="columns")
    means = (frame if common.empty else common).mean(axis="columns").sort_values(ascending=False, kind="stable")
    chosen = list(filter(may_be_chosen, means.index))
    return [*chosen[:BEST], *(name for name in means.index if name.partition(" ")[0] == "hindsight")]
