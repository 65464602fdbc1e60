"""A picture looks as transformers' processors and `datasets` would have it."""

import base64
import io

import numpy as np
import pytest
from PIL import EpsImagePlugin, ExifTags, Image
from transformers.image_transforms import convert_to_rgb

from kvcompress import KVCompressError
from kvcompress.pictures import read_image

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 4), dtype=np.uint8)


def test_16_bits_keep_their_shades():
    shades = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    shown = np.asarray(read_image(Image.fromarray(shades)))
    assert (shown == (shades // 256)[..., None]).all()


def test_a_file_is_turned_as_its_camera_was(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    picture = Image.fromarray(PIXELS[:4, :, :3])
    picture.save(tmp_path / "a.png", exif=exif)
    upright = picture.transpose(Image.Transpose.ROTATE_270).tobytes()
    assert read_image(tmp_path / "a.png").tobytes() == upright
    file = (tmp_path / "a.png").read_bytes()
    assert read_image(io.BytesIO(file)).tobytes() == upright
    assert read_image("data:image/png;base64," + base64.b64encode(file).decode()).tobytes() == upright  # as mme_sci's


def test_black_text_on_a_transparent_ground_is_black_on_white():
    picture = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    picture.paste((0, 0, 0, 255), (2, 2, 4, 4))
    shown = np.asarray(read_image(picture))
    assert (shown[2:4, 2:4] == 0).all()
    assert (shown == 0).sum() == 2 * 2 * 3
    assert (shown == 255).sum() == (8 * 8 - 2 * 2) * 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "L", "RGB"])
def test_transparency_is_what_the_processor_would_make_of_it(mode):
    picture = Image.fromarray(PIXELS).convert(mode)
    if mode in ("P", "L", "RGB"):  # files have one transparent colour
        picture.info["transparency"] = picture.getpixel((3, 3))
    assert read_image(picture).tobytes() == convert_to_rgb(picture, return_numpy=True).tobytes()
    assert read_image(picture).tobytes() != picture.convert("RGB").tobytes()


def test_what_is_no_picture_is_an_error_that_says_what_it_is():
    with pytest.raises(KVCompressError, match="got bytes"):
        read_image(b"png")


def test_no_program_is_run_to_read_a_picture(monkeypatch):
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **more: pytest.fail("Ghostscript runs"))
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "EPS")
    with pytest.raises(KVCompressError, match="an EPS file is a program"):
        read_image(file)
