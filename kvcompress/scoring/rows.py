"""Calling a method's `score` row by row without pads, so that its author need not handle padding."""

from collections.abc import Callable
from typing import TypeVar

import torch

from ..device import on_device
from ..errors import KVCompressError
from .layer_view import LayerView
from .returned import check_ranked, checked_scores, unchanged

Score = TypeVar("Score", bound=Callable[..., torch.Tensor])


def handles_padding(score: Score) -> Score:
    """Decorator for a `score` that handles left-padded rows itself and gets the whole batch, with `view.padding`.

    Without the mark, each row of a padded batch is passed on its own, so a plain mean over columns is correct. An
    overriding `score` must be marked again."""
    score.handles_padding = True
    return score


def scores_of(
    score: Callable[..., torch.Tensor],
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: LayerView,
) -> torch.Tensor:
    """Return the scores (batch, kv_heads, keys) of `KVCluster.score`, zero at pads that it did not see.

    While decoding, KV heads of a row may hold different numbers of entries. Then, for each such number, all heads are
    passed with their last entries, and only the scores of the heads with that number are used, since a head's score
    does not depend on others. Raises KVCompressError if it does (`mixes_heads`), and for what `checked_scores` refuses.
    """
    if view.padding is None or getattr(score, "handles_padding", False):
        return _asked(score, queries, keys, values, view)
    pads = view.padding.expand(-1, keys.shape[1])
    if view.settings.cluster is not None and view.settings.cluster.mixes_heads and bool((pads != pads[:, :1]).any()):
        raise KVCompressError(
            f"{type(view.settings.cluster).__name__} mixes KV heads, which here hold different numbers of entries: its "
            "score must handle pads and be marked with kvcompress.handles_padding"
        )
    query_pads = _query_pads(queries, len(keys))
    groups = {(first, skipped) for row, skipped in zip(pads.tolist(), query_pads, strict=True) for first in row}
    scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    skips = on_device(query_pads, keys.device)[:, None]
    for first, skipped in sorted(groups):
        if first == keys.shape[2]:
            continue
        wanted = (pads == first) & (skips == skipped)
        rows = wanted.any(1).nonzero()[:, 0]
        asking = queries
        if queries is not None:  # a prompt's queries have the keys' columns
            asking = queries[rows][:, :, skipped if view.is_decoding else first :]
        part = (asking, keys[rows][:, :, first:], values[rows][:, :, first:])
        found = _asked(score, *part, view.rows(rows, first, keys.shape[2]))
        scores[rows, :, first:] = torch.where(wanted[rows][..., None], found, scores[rows, :, first:])
    return scores


def _query_pads(queries: torch.Tensor | None, rows: int) -> list[int]:
    """Return how many of each row's remembered queries, the first ones, are pads (see `Choice.latest`)."""
    if queries is None or not bool((pads := queries[:, 0, :, 0].isnan()).any()):
        return [0] * rows
    return pads.sum(-1).tolist()


def _asked(
    score: Callable[..., torch.Tensor],
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: LayerView,
) -> torch.Tensor:
    """Return what `score` returns for these states, in fp32. Raises KVCompressError if it changes the states."""
    place = f"{type(view.settings.cluster).__name__}.score"
    with unchanged(place, queries, keys, values):
        scores = score(queries, keys, values, view)
    scores = checked_scores(scores, place, keys)
    check_ranked(scores, place, (queries, keys, values), view)
    return scores
