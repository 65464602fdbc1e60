"""Which patch of the picture each image token is, checked against what the model really computes."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    Glm4vImageProcessor,
    GotOcr2ImageProcessor,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    Qwen2VLImageProcessor,
)

from lmms_eval_plugins.model.image_layout import layouts, painted, strips
from tests.support.checkpoints import image, load_lm, requests
from tests.support.families import FAMILIES, FIRST_TEXT, IMAGE, MORE_FAMILIES, VIDEO

SIDE = 32  # of a tile in pixels; 8 x 8 patches
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [SIDE, 3 * SIDE], [3 * SIDE, SIDE]]
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": SIDE // 8,
}  # fmt: skip


def llava(config, vision_type, **settings):
    text = {"model_type": "llama", **TEXT}
    vision = {"model_type": vision_type, **VISION}
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(
        config(text_config=text, vision_config=vision, image_token_index=IMAGE, **settings)
    )


def build(name):
    """A model and its image processor."""
    if name == "llava":
        crop = {"height": SIDE, "width": SIDE}
        model = llava(LlavaConfig, "clip_vision_model")
        return model, CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=crop)
    if name == "llava-next":
        crop = {"height": SIDE, "width": SIDE}
        model = llava(LlavaNextConfig, "clip_vision_model", image_grid_pinpoints=PINPOINTS)
        processor = LlavaNextImageProcessor(
            size={"shortest_edge": SIDE}, crop_size=crop, image_grid_pinpoints=PINPOINTS
        )
        return model, processor
    if name.startswith("llava-onevision"):
        ratio = "anyres_max_1" if name.endswith("pooled") else "anyres_max_9"
        model = llava(
            LlavaOnevisionConfig, "siglip_vision_model", image_grid_pinpoints=PINPOINTS, vision_aspect_ratio=ratio,
            video_token_index=VIDEO,
        )  # fmt: skip
        processor = LlavaOnevisionImageProcessor(size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS)
        return model, processor
    if name == "internvl":
        size = {"height": 24, "width": 24}
        return FAMILIES[name].build(), GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=6)
    bounds = {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}
    model = (FAMILIES | MORE_FAMILIES)[name].build()
    if name == "glm4v":
        return model, Glm4vImageProcessor(size=bounds)
    return model, Qwen2VLImageProcessor(size=bounds, patch_size=model.config.vision_config.patch_size)


@torch.no_grad()
def tokens_of(model, processed):
    output = model.base_model.get_image_features(**processed).pooler_output
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in output])


def without_attention(model):
    """The model with a vision tower in which each patch sees itself only."""
    model = copy.deepcopy(model).float().eval()
    for name, weight in model.named_parameters():
        in_tower = "vision" in name or "visual" in name
        if in_tower and ("attn" in name or "attention" in name) and ("proj" in name):
            weight.data.zero_()
    return model


CASES = [
    (name, size)
    for name in (
        "llava", "llava-next", "llava-onevision", "llava-onevision-pooled", "internvl", "qwen2-vl", "qwen2.5-vl",
        "qwen3-vl", "qwen3.5", "glm4v",
    )
    for size in ((120, 80), (60, 150))
]  # fmt: skip


@pytest.mark.parametrize(("name", "size"), CASES, ids=[f"{name}-{w}x{h}" for name, (w, h) in CASES])
def test_the_patches_of_a_bright_square_are_the_tokens_that_it_changes(name, size):
    model, image_processor = build(name)
    model = without_attention(model)
    box = (0.4, 0.3, 0.75, 0.65)  # left, top, right, bottom of the square
    dark = Image.new("RGB", size, (90, 90, 90))
    bright = dark.copy()
    bright.paste((250, 250, 250), tuple(round(edge * side) for edge, side in zip(box, 2 * size, strict=True)))
    pictures = (dark, bright, painted(*size), Image.new("RGB", size, (250, 250, 250)))
    processed = [dict(image_processor([picture], return_tensors="pt")) for picture in pictures]
    for one in processed:
        one.pop("num_patches", None)
    before, after, other = (tokens_of(model, processed[place]) for place in (0, 1, 3))
    changed, shows_image = (
        ((tokens - before).abs().amax(-1) > 1e-4 * before.abs().amax()).numpy() for tokens in (after, other)
    )
    assert changed.any()
    assert not changed.all()

    ids = torch.full((1, len(changed) + 2), FIRST_TEXT)
    ids[0, 1:-1] = IMAGE
    (layout,) = layouts(model, SimpleNamespace(image_processor=image_processor), {"input_ids": ids, **processed[2]})
    assert layout.note == ""
    assert layout.tokens == len(changed)
    is_patch = np.zeros(len(changed), dtype=bool)
    for view in layout.views:
        left, top, right, bottom = view.box
        width, height = (right - left) / view.columns, (bottom - top) / view.rows
        reach = 1.6 if name.endswith("pooled") else 0.35  # how far, in patches, resampling carries the square
        for row in range(view.rows):
            for column in range(view.columns):
                token = view.start + row * view.stride + column
                x, y = left + column * width, top + row * height
                overlap_x = min(x + width, box[2]) - max(x, box[0])
                overlap_y = min(y + height, box[3]) - max(y, box[1])
                if overlap_x > 0.35 * width and overlap_y > 0.35 * height:
                    assert changed[token], (view, row, column)
                if overlap_x < -reach * width or overlap_y < -reach * height:
                    assert not changed[token], (view, row, column)
                is_patch[token] = True
    assert not shows_image[~is_patch].any()  # only newlines are no patch


def test_several_images_of_a_prompt_have_their_own_tokens():
    lm = load_lm(dtype="auto")
    docs = [{"text": "two?", "images": [image(0, 160, 90), image(1, 90, 160)]}]
    lm.overlays = 1
    lm.generate_until(requests(lm, docs, max_new_tokens=1))
    one, two = (each["layout"] for each in lm.rows[0]["survivors"]["images"])
    assert (one["start"], two["start"]) == (0, one["tokens"])
    # Several images are padded to squares: the first above and below, the second at its sides.
    (first,), (second,) = one["views"], two["views"]
    np.testing.assert_allclose(first["box"], (0, (1 - 160 / 90) / 2, 1, (1 + 160 / 90) / 2), atol=0.02)
    np.testing.assert_allclose(second["box"], ((1 - 160 / 90) / 2, 0, (1 + 160 / 90) / 2, 1), atol=0.02)


def test_a_family_whose_layout_is_unknown_is_a_strip_that_says_so():
    model = SimpleNamespace(config=SimpleNamespace(model_type="other", image_token_id=IMAGE))
    ids = torch.tensor([[9, IMAGE, IMAGE, 9, IMAGE, 9]])
    first, second = layouts(model, None, {"input_ids": ids})
    assert (first.start, first.tokens, first.views) == (0, 2, [])
    assert (second.start, second.tokens, second.views) == (2, 1, [])
    assert "is unknown" in first.note


def test_the_grid_of_a_second_image_begins_where_the_first_ends():
    model, _ = build("qwen2-vl")
    inputs = {"input_ids": torch.full((1, 12), IMAGE), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 8, 4]])}
    assert [(one.start, one.tokens) for one in layouts(model, None, inputs)] == [(0, 4), (4, 8)]


def test_a_grid_with_fewer_patches_than_tokens_is_a_strip():
    model, _ = build("qwen2-vl")
    ids = torch.full((1, 10), IMAGE)
    (layout,) = layouts(model, None, {"input_ids": ids, "image_grid_thw": torch.tensor([[1, 6, 8]])})
    assert layout.views == []
    assert "no regular grid" in layout.note


def test_strips_are_the_runs_of_vision_tokens():
    found = strips(torch.tensor([True, True, False, True]), "why")
    assert [(one.start, one.tokens, one.note) for one in found] == [(0, 2, "why"), (2, 1, "why")]
