"""Read pictures as transformers' processors and `datasets` do."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from .errors import KVCompressError


def read_image(source: Any) -> Image.Image:
    """Return an image, an image file or a data: URL of one as RGB, on white where it is transparent; a file as its
    camera was held.

    Raises KVCompressError for anything else; errors about a damaged file propagate."""
    if isinstance(source, str) and source.startswith("data:"):
        source = io.BytesIO(base64.b64decode(source.partition(",")[2]))
    if isinstance(source, (str, Path, io.IOBase)):
        with Image.open(source) as image:
            if image.format == "EPS":
                raise KVCompressError("an EPS file is a program for Ghostscript: convert it to PNG")
            return read_image(ImageOps.exif_transpose(image))
    if not isinstance(source, Image.Image):
        raise KVCompressError(f"an image must be a PIL image or a file name, got {type(source).__name__}")
    if source.mode.startswith("I;16"):  # Pillow would clip 16 bits to the lowest 8: all but the darkest turn white
        source = Image.fromarray((np.asarray(source) >> 8).astype(np.uint8))
    if source.has_transparency_data:  # the colour below is arbitrary, and often black like the text
        white = Image.new("RGBA", source.size, "white")
        source = Image.alpha_composite(white, source.convert("RGBA"))
    return source.convert("RGB")
