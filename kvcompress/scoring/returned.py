"""Checks of what a method's own code returns, by which a mistake there is one line that names the method.

Of the cache's methods, values are looked at on a CPU alone: elsewhere the host would wait for the device in every
layer."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ..errors import KVCompressError
from .layer_view import Kept, LayerView


@contextmanager
def unchanged(place: str, *given: torch.Tensor | None) -> Iterator[None]:
    """Context manager that raises KVCompressError if a tensor that `place` is given is changed in place inside: it is
    stored, and other methods may share the prefill."""
    watched = [each for each in given if each is not None and not each.is_inference()]
    before = [each._version for each in watched]
    yield
    if before != [each._version for each in watched]:
        raise KVCompressError(f"{place} changes what it is given in place: use copies")


def checked_scores(scores: object, place: str, keys: torch.Tensor) -> torch.Tensor:
    """Return in fp32 the scores of keys (batch, kv_heads, keys, ...) that `place`, such as `Mine.score`, returned.

    Raises KVCompressError if they are no tensor (batch, kv_heads, keys) on the keys' device."""
    scores = _of_shape(scores, place, keys.shape[:3], "(batch, kv_heads, keys)")
    _check_device(scores, place, keys)
    return scores


def check_ranked(scores: torch.Tensor, place: str, given: Iterable[torch.Tensor | None], view: LayerView) -> None:
    """Raise KVCompressError, on a CPU, for NaN scores (batch, kv_heads, keys) that `place` made of finite numbers.

    A row of which anything `given` is not finite may have such scores: its answer is NaN, and no other row's."""
    if scores.device.type != "cpu" or not bool((is_nan := scores.isnan()).any()):
        return
    is_nan = is_nan & view.real_columns(scores)
    for each in (*given, view.sums, view.noted, view.received):
        if each is not None:
            is_nan = is_nan & each.flatten(1).isfinite().all(1)[:, None, None]
    _check_none(is_nan, place)


def check_final(found: torch.Tensor, place: str, scores: torch.Tensor, view: LayerView) -> None:
    """Raise KVCompressError, on a CPU, for NaN that `place` made of scores (batch, kv_heads, keys) of a row without."""
    if found.device.type == "cpu":
        had_nan = scores.isnan().flatten(1).any(1)[:, None, None]
        _check_none(found.isnan() & view.real_columns(scores) & ~had_nan, place)


def checked_token_scores(scores: object, place: str, vision: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return in fp32 the scores (batch, tokens) of a token method, of which only those of vision tokens count.

    Raises KVCompressError for what is no tensor of this shape, and for NaN where a row's hidden states (batch, tokens,
    hidden_size) are finite; on any device, because the choice waits for it anyway."""
    scores = _of_shape(scores, place, vision.shape, "(batch, tokens)")
    if bool((is_nan := scores.isnan() & vision).any()):
        _check_none(is_nan & hidden.flatten(1).isfinite().all(1)[:, None], place)
    return scores


def _of_shape(scores: object, place: str, shape: torch.Size, axes: str) -> torch.Tensor:
    if (returned := shape_of(scores)) != tuple(shape):
        raise KVCompressError(f"{place} returned {returned}: it must be a tensor {axes}, {tuple(shape)}")
    if scores.is_complex():
        raise KVCompressError(f"{place} returned {scores.dtype}: scores are real numbers")
    return scores.float()


def _check_device(found: torch.Tensor, place: str, keys: torch.Tensor) -> None:
    if found.device != keys.device:
        raise KVCompressError(f"{place} returned a tensor on {found.device}: it must be on {keys.device}, as keys are")


def _check_none(is_nan: torch.Tensor, place: str) -> None:
    if count := int(is_nan.sum()):
        raise KVCompressError(f"{place} returned NaN, {count} of {is_nan.numel()} numbers: NaN has no rank")


def check_columns(columns: object, place: str, keys: torch.Tensor, view: LayerView) -> None:
    """Check the columns that `place` keeps of keys (batch, kv_heads, keys, ...), in the format of `Kept.indices`.

    Raises KVCompressError if they are no LongTensor (batch, kv_heads, kept) on the keys' device and, on a CPU, for
    columns that are pads, do not exist or do not ascend."""
    batch, kv_heads, most = keys.shape[:3]
    is_long = isinstance(columns, torch.Tensor) and columns.dtype == torch.long
    if not is_long or columns.ndim != 3 or columns.shape[:2] != keys.shape[:2]:
        kind = f" of {columns.dtype}" if isinstance(columns, torch.Tensor) else ""
        raise KVCompressError(
            f"{place} returned {shape_of(columns)}{kind}: it must be a LongTensor (batch, kv_heads, kept), here "
            f"({batch}, {kv_heads}, kept)"
        )
    _check_device(columns, place, keys)
    if columns.device.type != "cpu":
        return
    # Of stored entries a pad may be kept: it counts as a place that is not used.
    padding = None if view.is_decoding else view.padding
    first = torch.zeros(1, 1, 1, dtype=torch.long) if padding is None else padding[..., None]
    is_wrong = (columns < -1) | (columns >= most) | ((columns >= 0) & (columns < first))
    is_wrong[..., 1:] |= (columns[..., 1:] <= columns[..., :-1]) & (columns[..., :-1] >= 0)
    if bool(is_wrong.any()):
        row, head, at = is_wrong.nonzero()[0].tolist()
        least = int(first.expand(*columns.shape[:2], 1)[row, head])
        raise KVCompressError(
            f"{place} returned column {int(columns[row, head, at])} at place {at} of row {row}, KV head {head}: the "
            f"columns of a head ascend, from {least} to {most - 1}, after a -1 for each place that is not used"
        )


def check_kept(kept: object, place: str, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> None:
    """Raise KVCompressError if `place` returned no `Kept` of columns of these keys and values, see `check_columns`."""
    if not isinstance(kept, Kept):
        raise KVCompressError(f"{place} returned {type(kept).__name__}: it must be kvcompress.Kept")
    check_columns(kept.indices, f"{place} (in indices)", keys, view)
    of_parts = [tuple(part.shape[:3]) for part in (kept.keys, kept.values, kept.indices)]
    if len(set(of_parts)) > 1:
        of_keys, of_values, of_indices = of_parts
        raise KVCompressError(
            f"{place} returned keys for (batch, kv_heads, kept) {of_keys}, values for {of_values}, indices for "
            f"{of_indices}"
        )
    for name, part, given in (("keys", kept.keys, keys), ("values", kept.values, values)):
        if part.shape[3:] != given.shape[3:] or part.dtype != given.dtype:
            raise KVCompressError(
                f"{place} returned {name} of {part.shape[3]} channels in {part.dtype}, "
                f"made of {given.shape[3]} in {given.dtype}"
            )


def check_measured(
    measured: torch.Tensor, place: str, states: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor], view: LayerView
) -> None:
    """Raise KVCompressError, on a CPU, for NaN or infinities (batch, ...) that `place` measured of a row that has
    entries, and whose queries, keys and values are finite."""
    if measured.device.type != "cpu" or bool(
        (is_finite := measured.isfinite().reshape(len(measured), -1).all(1)).all()
    ):
        return
    is_finite = is_finite | ~view.real_columns(states[1]).flatten(1).any(1)
    for each in states:
        if each is not None:
            is_finite = is_finite | ~each.flatten(1).isfinite().all(1)
    if not bool(is_finite.all()):
        raise KVCompressError(f"{place} returned NaN or an infinity; scores are +inf where entries must stay")


def checked_rows(found: object, place: str, rows: int) -> torch.Tensor:
    """Return the tensor (batch, ...) that `place` returned. Raises KVCompressError for anything else."""
    if not isinstance(found, torch.Tensor) or found.shape[:1] != (rows,):
        raise KVCompressError(
            f"{place} returned {shape_of(found)}: it must be a tensor (batch, ...), here ({rows}, ...)"
        )
    return found


def shape_of(returned: object) -> tuple[int, ...] | str:
    """Return a tensor's shape, or the name of any other type."""
    return tuple(returned.shape) if isinstance(returned, torch.Tensor) else type(returned).__name__
