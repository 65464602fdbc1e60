"""Merging evicted entries into kept ones, instead of dropping them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from ..errors import KVCompressError
from .layer_view import Kept, LayerView, uniform_noise
from .returned import check_kept, unchanged
from .windows import pad_columns

BLOCK = 256  # evicted entries compared with all kept ones at once
FOLLOWERS = 32  # entries that share an evicted one's value with `cam`, if the method has no option for it

# Takes the evicted entries, the kept entries that they are merged into, and the cosine of their keys. Returns what each
# evicted entry contributes, (batch, kv_heads, keys, head_dim), and its weight in the mean, (batch, kv_heads, keys, 1),
# in which the kept entry has weight 1.
Share = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Takes the arguments of `merge_evicted` but for `merge`, and returns what it returns.
Merge = Callable[[Kept, torch.Tensor, torch.Tensor, torch.Tensor, LayerView], Kept]


def merge_evicted(
    kept: Kept, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView, merge: str
) -> Kept:
    """Merge the evicted entries of keys and values (batch, kv_heads, keys, head_dim) into those of `kept`.

    `merge` is a name in `MERGES`; scores (batch, kv_heads, keys) are the method's. With `merge_modality="same"` an
    entry is merged only into its own kind, vision or text, and dropped if none is kept. Raises KVCompressError if the
    function returns no `Kept` of these keys.
    """
    place = f"merge {merge!r}"
    with unchanged(place, keys, values, scores):
        merged = MERGES[merge](kept, keys, values, scores, view)
    check_kept(merged, place, keys, values, view)
    if merged.indices.shape != kept.indices.shape:
        raise KVCompressError(
            f"{place} returned {merged.indices.shape[2]} entries per head of {kept.indices.shape[2]}: it merges into "
            "those that are kept, and drops none"
        )
    return merged


def register_merge(name: str) -> Callable[[Merge], Merge]:
    """Decorator that registers a function as `merge=name`. The name must not be taken."""
    if not isinstance(name, str):
        raise KVCompressError('register_merge takes the name of the merge: @register_merge("faint")')

    def register(merge: Merge) -> Merge:
        known = MERGES.get(name)
        places = {(each.__module__, getattr(each, "__qualname__", None)) for each in (known, merge) if each}
        if name == "none" or len(places) > 1:
            raise KVCompressError(f"merge {name!r} is already registered")
        MERGES[name] = merge
        return merge

    return register


def into_most_similar(
    kept: Kept,
    keys: torch.Tensor,
    values: torch.Tensor,
    scores: torch.Tensor,
    view: LayerView,
    share: Share,
    renewal: float | None = None,
    above_mean: bool = False,
    first_into: bool = False,
) -> Kept:
    """Merge every evicted entry, key and value, into the kept entry of its row and KV head with the most similar key.

    Args:
        share: what each evicted entry contributes to the mean, and its weight.
        renewal: merge only entries whose cosine reaches a threshold (D2O). It starts as the mean over the entries
            evicted together, then becomes a moving average in which each eviction's mean has the weight `renewal`.
        above_mean: merge only the entries of `_above_mean`.
        first_into: merge as many entries as `_above_mean` has, but the first evicted ones, into the entries that those
            of `_above_mean` would go into (MEDA).
    """
    similarity, target = _most_similar(kept, keys, view)
    evicted = _evicted(kept, keys, view) & similarity.isfinite()
    merged = evicted & _above_mean(similarity, evicted) if above_mean or first_into else evicted
    if first_into:
        first, likest = ((~some).int().argsort(dim=-1, stable=True) for some in (evicted, merged))
        target = target.scatter(2, first, target.gather(2, likest))
        merged = merged.scatter(2, first, merged.gather(2, likest))
    if renewal is not None:
        mean = similarity.masked_fill(~merged, 0.0).sum(-1) / merged.sum(-1)
        before = mean if view.merge_threshold is None else view.merge_threshold
        before = torch.where(before.isnan(), mean, before)
        threshold = torch.where(merged.any(-1), torch.lerp(before, mean, renewal), before)
        kept = replace(kept, merge_threshold=threshold)
        merged &= similarity >= threshold[..., None] - 1e-6  # rounding must not drop an entry at the mean
    target, similarity, merged = (x.unsqueeze(-1) for x in (target, similarity, merged))
    new = []
    for old, states in ((kept.keys, keys), (kept.values, values)):
        rows = target.expand_as(states)
        part, weight = share(states.float(), old.float().gather(2, rows), similarity)
        weight = weight.masked_fill(~merged, 0.0)
        total = torch.ones_like(old[..., :1], dtype=torch.float32).scatter_add_(2, target, weight)
        sums = old.float().scatter_add(2, rows, (part * weight).masked_fill(~merged, 0.0))
        new.append((sums / total).to(old.dtype))
    return replace(kept, keys=new[0], values=new[1])


def average(evicted: torch.Tensor, kept: torch.Tensor, similarity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the kept entry the mean of itself and the entries merged into it.

    LOOK-M's averaged merging, https://arxiv.org/abs/2406.18139, section 3.3."""
    return evicted, torch.ones_like(similarity)


def pivot(evicted: torch.Tensor, kept: torch.Tensor, similarity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `average`, but every entry is first averaged with the kept one (LOOK-M, pivotal merging)."""
    return (evicted + kept) / 2, torch.ones_like(similarity)


def weighted(evicted: torch.Tensor, kept: torch.Tensor, similarity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `average`, with every entry multiplied by its cosine similarity.

    LOOK-M's weighted merging; also in D2O's code (AIoT-MLSys-Lab/D2O, modeling_llama3_7b_13b_d2o.py,
    `D2O_LayerKVCache`). `MERGES` says which entries are merged."""
    return evicted * similarity, torch.ones_like(similarity)


def exponential(
    evicted: torch.Tensor, kept: torch.Tensor, similarity: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh every entry by exp(cosine) in the mean, the kept one by exp(1).

    D2O's token merging, https://arxiv.org/abs/2406.13035."""
    return evicted, (similarity - 1).exp()


def _above_mean(similarity: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
    """Return the evicted entries that are at least as similar to a kept one as the mean: bool (batch, kv_heads, keys).

    The n-th evicted entries of a row's heads, which may be different tokens, are judged together by their mean, as in
    SUSTechBruce/LOOK-M, modify_llama.py:801."""
    place = (merged.cumsum(-1) - 1).clamp(min=0).flatten(1)
    sums, count = (
        torch.zeros_like(similarity[:, 0]).scatter_add(1, place, x.masked_fill(~merged, 0.0).flatten(1))
        for x in (similarity, torch.ones_like(similarity))
    )
    mean = sums.sum(1, keepdim=True) / count.sum(1, keepdim=True)
    return (sums / count >= mean - 1e-6).gather(1, place).view_as(merged)  # rounding must not drop an entry at the mean


def into_followers(kept: Kept, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView) -> Kept:
    """Add an evicted entry's value in equal parts to the values of the `followers` entries after it; keys stay.

    This happens with a probability of the entry's score over the mean of theirs, at most 1 (CaM, ICML 2024,
    https://proceedings.mlr.press/v235/zhang24n.html, section 4; zyxxmu/cam, kv_cache_cam.py, `slicev`). The draw
    depends on the row, as in `random`.

    CaM evicts one entry at a time. If several are evicted together, each is added to the entries after it as they were
    before; the parts that go to evicted entries are lost, which bounds what a kept entry receives.

    Scores should be attention, as h2o's are. Protected entries (+inf) do not count in the mean; if no other entry
    follows, nothing is merged.
    """
    columns, followers = keys.shape[2], getattr(view.settings.cluster, "followers", FOLLOWERS)
    first = torch.arange(1, columns + 1, device=keys.device)  # the first column after each
    last = (first + followers).clamp(max=columns)
    known = scores.isfinite() & view.real_columns(keys)

    def of_followers(x: torch.Tensor) -> torch.Tensor:
        upto = F.pad(x.double().cumsum(-1), (1, 0))
        return upto[..., last] - upto[..., first]

    mean = of_followers(scores.masked_fill(~known, 0.0)) / of_followers(known)
    chance = (scores / mean).nan_to_num(0.0)
    merged = uniform_noise(view, keys, "cam") < chance
    merged &= _evicted(kept, keys, view)
    at = kept.indices.clamp(min=0).unsqueeze(-1).expand_as(kept.values)
    added = torch.zeros_like(kept.values, dtype=torch.float32)
    for kind_of_column, kind_of_slot in _kinds(kept, keys, view):
        part = (values.float() / followers).masked_fill(~(merged & kind_of_column).unsqueeze(-1), 0.0)
        upto = F.pad(part.cumsum(2), (0, 0, 1, 0))
        added += (upto.gather(2, at) - upto.gather(2, (at - followers).clamp(min=0))) * kind_of_slot.unsqueeze(-1)
    return replace(kept, values=(kept.values.float() + added).to(values.dtype))


def _evicted(kept: Kept, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Return bool (batch, kv_heads, keys), True at real columns that are not kept."""
    columns = keys.shape[2]
    mask = torch.ones(*kept.indices.shape[:2], columns + 1, dtype=torch.bool, device=keys.device)
    mask = mask.scatter_(-1, kept.indices.masked_fill(kept.indices < 0, columns), False)[..., :columns]
    return mask if view.padding is None else mask & ~pad_columns(view.padding, columns)


def _kinds(kept: Kept, keys: torch.Tensor, view: LayerView) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the columns (batch, kv_heads, keys) and slots (batch, kv_heads, kept) of each kind to merge within."""
    if view.settings.merge_modality == "any" or view.vision is None:
        return [tuple(torch.ones(x.shape[:3], dtype=torch.bool, device=x.device) for x in (keys, kept.keys))]
    columns = view.vision_by_head.expand(keys.shape[:3])
    slots = columns.gather(2, kept.indices.clamp(min=0))
    return [(columns, slots), (~columns, ~slots)]


def _most_similar(kept: Kept, keys: torch.Tensor, view: LayerView) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the most similar kept key of the same kind for each column.

    Returns its cosine, -inf if there is none, and its slot, both (batch, kv_heads, keys)."""
    directions, kept_directions = (F.normalize(x.float(), dim=-1) for x in (keys, kept.keys))
    kinds, used, found = _kinds(kept, keys, view), kept.indices >= 0, []
    place = torch.arange(kept.keys.shape[2], dtype=torch.int32, device=keys.device)
    for block in torch.arange(keys.shape[2], device=keys.device).split(BLOCK):
        alike = directions[:, :, block] @ kept_directions.transpose(2, 3)
        usable = used[:, :, None]
        if len(kinds) > 1:
            usable = usable & torch.stack([own[:, :, block, None] & slots[:, :, None] for own, slots in kinds]).any(0)
        similarity = alike.masked_fill_(~usable, -torch.inf).amax(-1)
        # Two kept copies of a token are equally similar: the later one wins, rounding must not decide.
        equal = alike >= similarity[..., None] - 1e-6
        found.append((similarity, torch.where(equal, place, 0).amax(-1).long()))  # NaN matches nothing
    return tuple(torch.cat(blocks, -1) for blocks in zip(*found, strict=True))


MERGES: dict[str, Merge] = {
    "average": partial(into_most_similar, share=average),
    "pivot": partial(into_most_similar, share=pivot),
    "meda": partial(into_most_similar, share=average, first_into=True),
    "weighted": partial(into_most_similar, share=weighted, above_mean=True),
    "d2o": partial(into_most_similar, share=weighted, renewal=0.5),
    "d2o-paper": partial(into_most_similar, share=exponential, renewal=0.7),
    "cam": into_followers,
}
