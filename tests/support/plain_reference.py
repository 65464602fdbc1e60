"""Layers to score, and utilities for plain references of methods: float64, loops, one row at a time."""

import math

import torch
from hypothesis import strategies as st

import kvcompress

SCALING = 0.25


@st.composite
def layers(draw: st.DrawFn) -> tuple:
    """Draw queries, keys and values of a left-padded batch, and its view."""
    kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 2), (2, 3), (1, 4)]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    columns = max(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    queries = torch.randn(len(lengths), kv_heads * groups, columns, 8, generator=generator) * 2
    keys, values = (torch.randn(len(lengths), kv_heads, columns, 8, generator=generator) for _ in range(2))
    budget = kvcompress.Budget(draw(st.sampled_from([0.05, 0.2, 0.5, 0.8])))
    padding = torch.tensor([[columns - length] for length in lengths])
    prompt = kvcompress.Prompt(
        place=0,
        num_layers=2,
        lengths=lengths,
        budgets=[budget(length) for length in lengths],
        scaling=SCALING,
        padding=padding if padding.any() else None,
        row_seeds=tuple(range(len(lengths))),
    )
    return queries, keys, values, prompt


def check(cluster: kvcompress.KVCluster, layer: tuple, reference) -> None:
    """Check a method against `reference(queries, keys, values, budget)`, which returns the kept columns of a row.

    It gets one row's real tokens in one KV head with its query heads."""
    queries, keys, values, prompt = layer
    kept = cluster.update_kv(queries, keys, values, prompt)
    groups = queries.shape[1] // keys.shape[1]
    for row, (length, budget) in enumerate(zip(prompt.lengths, prompt.budgets, strict=True)):
        first = keys.shape[2] - length
        for head in range(keys.shape[1]):
            q, k, v = queries[row, head * groups : (head + 1) * groups], keys[row, head], values[row, head]
            expected = sorted(reference(q[:, first:].double(), k[first:].double(), v[first:].double(), budget))
            slots = kept.indices[row, head]
            used = slots >= 0
            assert (slots[used] - first).tolist() == expected
            assert slots.tolist() == sorted(slots.tolist()), "unused slots come first, columns ascend"
            assert torch.equal(kept.keys[row, head][used], k[slots[used]])
            assert torch.equal(kept.values[row, head][used], v[slots[used]])


def best(scores: list[float], budget: int, sinks: int = 0) -> list[int]:
    """Return the columns of the highest scores; the later of two equal ones.

    Among columns that must stay, the last one has priority, then the sinks from the first on."""

    def place(column: int) -> tuple[float, int]:
        if scores[column] == math.inf and column < len(scores) - 1 and column < sinks:
            return math.inf, len(scores) + sinks - column
        return scores[column], 2 * len(scores) + sinks if column == len(scores) - 1 else column

    return sorted(range(len(scores)), key=place)[-budget:]


def snapkv_scores(q, k, window: int, kernel: int, pooling: str) -> list[float]:
    """Return SnapKV's score of every key of one KV head, from full rows of attention; +inf in the window."""
    length = len(k)
    w = min(window, length)
    prefix, half = length - w, kernel // 2
    votes = torch.zeros(prefix, dtype=torch.float64)
    for head in range(len(q)):
        for query in range(length - w, length):
            weights = torch.softmax(k[: query + 1] @ q[head, query] * SCALING, 0)
            votes += weights[:prefix] / w / len(q)
    scores = torch.zeros(prefix, dtype=torch.float64)
    for column in range(prefix):
        around = [votes[j] if 0 <= j < prefix else 0.0 for j in range(column - half, column + half + 1)]
        scores[column] = sum(around) / kernel if pooling == "avg" else max(around)
    # The library scores in fp32: values equal there must be equal here.
    return [*scores.float().tolist(), *[float("inf")] * w]


def merged_by_hand(keys, values, kept: list[int], merge: str, kind: list[bool] | None) -> tuple:
    """Merge in one head; return the kept entries after merging.

    Keys and values are (tokens, head_dim), of all real tokens."""
    groups = {column: [(1.0, keys[column], values[column])] for column in kept}
    likest = {}
    for column in set(range(len(keys))) - set(kept):
        alike = {
            c: float(torch.nn.functional.cosine_similarity(keys[column], keys[c], dim=0))
            for c in kept
            if kind is None or kind[c] == kind[column]
        }
        if alike:
            # The later of two equally similar ones, regardless of rounding.
            target = max(c for c in alike if alike[c] >= max(alike.values()) - 1e-6)
            likest[column] = target, alike[target]
    mean = sum(likeness for _, likeness in likest.values()) / max(len(likest), 1)
    for column, (target, likeness) in likest.items():
        if merge.startswith("d2o") and likeness < mean - 1e-6:
            continue
        count = math.exp(likeness) / math.e if merge == "d2o-paper" else 1.0
        parts = {
            "average": lambda gone, stays: gone,
            "d2o-paper": lambda gone, stays: gone,
            "pivot": lambda gone, stays: (gone + stays) / 2,
            "d2o": lambda gone, stays, likeness=likeness: gone * likeness,
        }
        key, value = (parts[merge](x[column], x[target]) for x in (keys, values))
        groups[target].append((count, key, value))

    def mean_of(group, part: int):
        return sum(entry[0] * entry[part] for entry in group) / sum(entry[0] for entry in group)

    return tuple(torch.stack([mean_of(groups[column], part) for column in kept]) for part in (1, 2))
