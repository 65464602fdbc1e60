"""A method's `score` of each row without its pads, so that whoever writes one need not know of them."""

from collections.abc import Callable
from typing import TypeVar

import torch

from ..device import on_device
from ..errors import KVCompressError
from .layer_view import LayerView

Score = TypeVar("Score", bound=Callable[..., torch.Tensor])


def handles_padding(score: Score) -> Score:
    """Marks a `score` that is right for left-padded rows by itself: it is given the whole batch at once, with
    `view.padding`. Without the mark each row is handed over alone where the batch is padded, and a plain mean over
    columns is right. A class that overrides a marked `score` decides anew."""
    score.handles_padding = True
    return score


def scores_of(
    score: Callable[..., torch.Tensor],
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: LayerView,
) -> torch.Tensor:
    """The scores (batch, kv_heads, keys) of `KVCluster.score`, arguments as there; zero at pads that it was not shown.

    Where KV heads of a row hold different numbers of entries, while decoding, all heads are handed over from the first
    entry of one on, and of the scores those of that one are taken: a head's score is its own. Raises KVCompressError
    where it is not (`mixes_heads`) and for a result of another shape.
    """
    if view.padding is None or getattr(score, "handles_padding", False):
        return _checked(score(queries, keys, values, view), keys, view)
    pads = view.padding.expand(-1, keys.shape[1])
    if view.settings.cluster is not None and view.settings.cluster.mixes_heads and bool((pads != pads[:, :1]).any()):
        raise KVCompressError(
            f"{type(view.settings.cluster).__name__} mixes KV heads, which here hold different numbers of entries: its "
            "score must be written for pads, and say so (kvcompress.handles_padding)"
        )
    unheard = _unheard(queries, len(keys))
    groups = {(first, mute) for row, mute in zip(pads.tolist(), unheard, strict=True) for first in row}
    scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    mutes = on_device(unheard, keys.device)[:, None]
    for first, mute in sorted(groups):
        if first == keys.shape[2]:
            continue
        wanted = (pads == first) & (mutes == mute)
        rows = wanted.any(1).nonzero()[:, 0]
        asking = queries
        if queries is not None:  # a prompt's stand in the keys' columns
            asking = queries[rows][:, :, mute if view.is_decoding else first :]
        part = (asking, keys[rows][:, :, first:], values[rows][:, :, first:])
        found = _checked(score(*part, view.rows(rows, first, keys.shape[2])), part[1], view)
        scores[rows, :, first:] = torch.where(wanted[rows][..., None], found.float(), scores[rows, :, first:])
    return scores


def _unheard(queries: torch.Tensor | None, rows: int) -> list[int]:
    """How many of the remembered queries of each row, the first ones, stand for pads (see `Choice.latest`)."""
    if queries is None or not bool((pads := queries[:, 0, :, 0].isnan()).any()):
        return [0] * rows
    return pads.sum(-1).tolist()


def _checked(scores: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
    if scores.shape != keys.shape[:3]:
        raise KVCompressError(
            f"{type(view.settings.cluster).__name__}.score returned {tuple(scores.shape)} for keys "
            f"{tuple(keys.shape)}: it must be (batch, kv_heads, keys), {tuple(keys.shape[:3])}"
        )
    return scores
