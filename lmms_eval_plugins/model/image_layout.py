"""Where in its image each image token of a prompt lies.

The position of a patch is observed, not computed from a family's rules. The processor gets, in place of the image, a
picture whose colours encode coordinates, so each patch it makes tells where it lies. The model's own code then arranges
these coordinates as it arranges the patches' features. A layout that cannot be observed this way, or is not a regular
grid, becomes a strip: the tokens in their order.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from kvcompress.scoring.vision import VIDEO_ID_NAMES, vision_token_mask

# Families whose processors scale a whole image to a grid of patches and merge these into tokens row by row.
GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v")
# Families whose vision tower sees square tiles and whose projector turns patch features into tokens.
TILE_FAMILIES = ("llava", "llava_next", "llava_onevision", "internvl")
MARK = 1000.0  # value of the channel that distinguishes patches from newlines
WHOLE = 0.99  # share of a patch that must show the image, not padding, for its position to count
MOST_OFF = 0.35  # how far from its place in a regular grid a patch may seem to lie, in patches


@dataclass(frozen=True)
class View:
    """A grid of tokens: token `start + row * stride + column` of the image is the patch at (row, column).

    Attributes:
        stride: tokens from one row to the next; larger than `columns` if a newline token ends each row.
        box: left, top, right and bottom of the grid, as fractions of the image's width and height; below 0 or above 1
            where the grid covers padding.
    """

    start: int
    rows: int
    columns: int
    stride: int
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Layout:
    """A run of `tokens` vision tokens of the prompt, from `start`: one image, or a strip of unknown layout.

    Attributes:
        views: the whole image, then its tiles; empty if the layout is unknown, and `note` then says why.
    """

    start: int
    tokens: int
    views: list[View] = field(default_factory=list)
    note: str = ""


def painted(width: int, height: int) -> Image.Image:
    """Return a picture whose red encodes the position from left to right, green from top to bottom; blue is full."""
    pixels = np.full((height, width, 3), 255, dtype=np.uint8)
    pixels[..., 0] = np.round(255 * (np.arange(width) + 0.5) / width)
    pixels[..., 1] = np.round(255 * (np.arange(height) + 0.5) / height)[:, None]
    return Image.fromarray(pixels)


def layouts(model: Any, processor: Any, inputs: dict[str, torch.Tensor]) -> list[Layout]:
    """Return how the vision tokens of one prompt lie in its images.

    Args:
        inputs: the processor's output for the prompt with each image replaced by a `painted` one of the same size, on
            the model's device, without padding.

    Returns:
        One layout per image; if the layout is unknown, one strip per run of vision tokens.
    """
    ids, config = inputs["input_ids"][0], model.config
    vision = vision_token_mask(config, inputs["input_ids"])[0]
    video_ids = [value for name in VIDEO_ID_NAMES if (value := getattr(config, name, None)) is not None]
    if bool(torch.isin(ids, torch.tensor(video_ids, device=ids.device, dtype=ids.dtype)).any()):
        return strips(vision, "videos are not laid out: the tokens in their order")
    if not bool(vision.any()):
        return []
    if config.model_type in GRID_FAMILIES and "image_grid_thw" in inputs:
        found = _grid_layouts(inputs["image_grid_thw"], config.vision_config.spatial_merge_size)
    elif config.model_type in TILE_FAMILIES:
        found = _tile_layouts(model, processor, inputs, vision)
    else:
        return strips(vision, f"the image layout of {config.model_type} is unknown: the tokens in their order")
    if found is None or sum(layout.tokens for layout in found) != int(vision.sum()):
        return strips(vision, "the image's tokens form no regular grid: the tokens in their order")
    return found


def strips(vision: torch.Tensor, note: str) -> list[Layout]:
    """Return a layout without views for each run of vision tokens; `vision`: bool (tokens,)."""
    kinds, lengths = vision.cpu().unique_consecutive(return_counts=True)
    sizes = lengths[kinds].tolist()
    return [Layout(sum(sizes[:place]), size, note=note) for place, size in enumerate(sizes)]


def _grid_layouts(image_grid_thw: torch.Tensor, merge: int) -> list[Layout]:
    """Return the layouts of images that fill their grid, from frames, height and width in patches (images, 3)."""
    found, start = [], 0
    for frames, height, width in image_grid_thw.tolist():
        rows, columns = height // merge, width // merge
        view = View(0, rows, columns, columns, (0.0, 0.0, 1.0, 1.0))
        found.append(Layout(start, frames * rows * columns, [view] if frames == 1 else []))
        start += frames * rows * columns
    return found


@torch.no_grad()
def _tile_layouts(
    model: Any, processor: Any, inputs: dict[str, torch.Tensor], vision: torch.Tensor
) -> list[Layout] | None:
    """Let the model arrange the patches' positions in place of their features; None if the result is not a grid."""
    base, seen = model.base_model, {}
    if base.config.vision_config.model_type == "pixtral":  # images of any size, with tokens between their rows
        return None

    def note_tiles(tower: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        seen["tiles"] = args[0] if args else kwargs["pixel_values"]

    def coordinates(projector: torch.nn.Module, args: tuple, features: torch.Tensor) -> torch.Tensor:
        seen["per_tile"] = features.shape[1]
        return _patch_places(seen["tiles"], features, processor.image_processor)

    handles = [
        base.vision_tower.register_forward_pre_hook(note_tiles, with_kwargs=True),
        base.multi_modal_projector.register_forward_hook(coordinates),
    ]
    names = ("pixel_values", "image_sizes", "batch_num_images")
    try:  # the class's method: the instance's may be cached
        output = type(base).get_image_features(base, **{name: inputs[name] for name in names if name in inputs})
    finally:
        for handle in handles:
            handle.remove()
    tokens = [image.reshape(-1, image.shape[-1])[:, :4].float().cpu().numpy() for image in output.pooler_output]
    if model.config.model_type == "internvl":  # returns tiles without saying which image each belongs to
        sizes = [strip.tokens for strip in strips(vision, "")]
        tokens = np.split(np.concatenate(tokens), np.cumsum(sizes)[:-1])
    found, start = [], 0
    for places in tokens:
        views = _views(places, seen["per_tile"])
        if views is None:
            return None
        found.append(Layout(start, len(places), views))
        start += len(places)
    return found


def _patch_places(tiles: torch.Tensor, features: torch.Tensor, image_processor: Any) -> torch.Tensor:
    """Return, in the shape of `features` (tiles, patches, size), each patch's mean position in the image (channels 0
    and 1), whether it shows the image without padding (2), and MARK (3)."""
    side = math.isqrt(features.shape[1])
    places = torch.zeros(*features.shape[:2], features.shape[2], device=features.device)
    if side**2 != features.shape[1]:
        return places  # without MARK: not a grid
    colours = tiles.float()
    if image_processor.do_normalize:
        spread, mean = (
            torch.tensor(value, device=colours.device, dtype=torch.float32)[:, None, None]
            for value in (image_processor.image_std, image_processor.image_mean)
        )
        colours = colours * spread + mean
    patch = tiles.shape[-1] // side  # the tower drops a remainder at the right and bottom
    pooled = F.avg_pool2d(colours[..., : side * patch, : side * patch], patch)  # (tiles, 3, side, side)
    places[..., :2] = pooled[:, :2].flatten(2).transpose(1, 2)
    places[..., 2] = (pooled[:, 2].flatten(1) >= WHOLE).float()
    places[..., 3] = MARK
    return places


def _views(places: np.ndarray, per_tile: int) -> list[View] | None:
    """Find the grids in an image's tokens, in order: tiles of `per_tile` patches, or one tile and then rows of patches
    that each end in a newline. `places` (tokens, 4) as from `_patch_places`; None if they form no grid."""
    is_patch, side, count = places[:, 3] > MARK / 2, math.isqrt(per_tile), len(places)
    if side**2 != per_tile or count < per_tile or not is_patch[:per_tile].all():
        return None
    whole = _view(places, 0, side, side, side)
    rest = is_patch[per_tile:]
    if rest.all() and len(rest) % per_tile == 0:
        views = [_view(places, start, side, side, side) for start in range(0, count, per_tile)]
    elif not rest.any():
        views = [whole] if len(rest) == 1 else [None]
    else:
        stride = int(rest.argmin()) + 1  # up to the first newline
        rows = len(rest) // stride
        newlines = np.arange(stride - 1, len(rest), stride)
        if rows * stride != len(rest) or not np.array_equal(np.flatnonzero(~rest), newlines):
            return None
        views = [whole, _view(places, per_tile, rows, stride - 1, stride)]
    return None if None in views else views


def _view(places: np.ndarray, start: int, rows: int, columns: int, stride: int) -> View | None:
    """Return the grid of tokens from `start`, fitting its box to the patches; None if they form no regular grid."""
    grid = np.stack([places[start + row * stride :][:columns] for row in range(rows)])  # (rows, columns, 4)
    inside = grid[..., 2] > WHOLE
    row, column = np.nonzero(inside)
    if not len(row) or (np.ptp(row) == 0) != (rows == 1) or (np.ptp(column) == 0) != (columns == 1):
        return None
    edges = []
    for place, values, count in ((column, grid[inside][:, 0], columns), (row, grid[inside][:, 1], rows)):
        if count == 1:
            return None  # the width of a single patch is unknown
        step, first = np.polyfit(place, values, 1)
        if step <= 0 or np.abs(first + step * place - values).max() > MOST_OFF * step:
            return None
        edges.append((float(first - step / 2), float(first + step * (count - 0.5))))
    (left, right), (top, bottom) = edges
    return View(start, rows, columns, stride, (left, top, right, bottom))
