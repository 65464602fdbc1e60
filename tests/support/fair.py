"""What `fair=` should choose, in plain Python, compared with each choice that a model makes."""

import contextlib
from collections.abc import Iterator
from fractions import Fraction

import torch

from kvcompress.clusters import base
from kvcompress.scoring.selection import top_indices


def fair_shares(sizes: list[int], room: int) -> list[int]:
    """`room` divided in proportion to `sizes`, by largest remainders, of equal ones to the first."""
    room, total = min(room, sum(sizes)), sum(sizes)
    quotas = [Fraction(room * size, total) if total else Fraction(0) for size in sizes]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda group: (shares[group] - quotas[group], group))
    for group in by_remainder[: room - sum(shares)]:
        shares[group] += 1
    return shares


def fair_choice(scores: list[float], groups: list[int], count: int, budget: int) -> list[int]:
    """The columns that one head keeps, ascending: what must stay, then the best of each group."""
    best_first = sorted(range(len(scores)), key=lambda column: (scores[column], column), reverse=True)
    stays = [column for column in best_first if scores[column] > torch.finfo(torch.float32).max / 2]
    members = [
        [column for column in best_first if groups[column] == each and column not in stays] for each in range(count)
    ]
    shares = fair_shares([len(each) for each in members], max(budget - len(stays), 0))
    best = [column for each, share in zip(members, shares, strict=True) for column in each[:share]]
    return sorted([*stays[:budget], *best])


@contextlib.contextmanager
def checked_choices() -> Iterator[list[int]]:
    """Compare every fair choice made inside with `fair_choice`; yields the budgets of those made."""
    original, made = base.fair_scores, []

    def checked(scores, groups, count, budgets, padding=None):
        found = original(scores, groups, count, budgets, padding)
        kept = top_indices(found, budgets, padding)
        pads = [0] * len(budgets) if padding is None else padding[:, 0].tolist()
        for row, (budget, first) in enumerate(zip(budgets, pads, strict=True)):
            for head in range(scores.shape[1]):
                expected = fair_choice(scores[row, head, first:].tolist(), groups[row, first:].tolist(), count, budget)
                assert [each - first for each in kept[row, head].tolist() if each >= 0] == expected, "shares are unfair"
        made.extend(budgets)
        return found

    base.fair_scores = checked
    try:
        yield made
    finally:
        base.fair_scores = original
