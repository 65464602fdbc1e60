"""A checkpoint that cannot be loaded as asked is one clear error."""

from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer

from kvcompress import KVCompressError
from lmms_eval_plugins.cells.run import load_model
from lmms_eval_plugins.model.arguments import ModelArguments, model_arguments
from lmms_eval_plugins.model.loading import device_of
from tests.support.checkpoints import load_lm, save_checkpoint

# fmt: off
REFUSED = [  # model or family of a checkpoint, arguments, what the error says
    ("./nothing here", {"method": "snapk", "ratio": 0.2}, "snapkv"),  # before it is looked for
    ("tiny", {"chat_template": "plain"}, "text-only"),
    ("llama", {"chat_template": "brief"}, "'brief' is neither a file nor 'plain': the checkpoint names none"),
    ("tiny", {"max_pixels": 1000}, "max_pixels.*LlavaOnevisionProcessor"),
    ("llava-onevision", {"video_max_pixels": 100}, "video_min_pixels and video_max_pixels have no meaning for"),
    ("llava-onevision", {"image_resize": "qwen_vl_utils"}, "does not scale images by area"),
    ("qwen2-vl", {"mm_spatial_pool_stride": 2}, "mm_spatial_pool_stride.*qwen2_vl"),
    ("qwen2.5-vl", {"tile_every_image": True}, "tile_every_image has no meaning for a qwen2_5_vl model"),
    ("tiny", {"device": "cuda:99"}, "CUDA GPUs"),
    ("tiny", {"device": "gpu"}, "is not a device"),
    ("tiny", {"tp_plan": "auto"}, "tp_plan='auto' needs several processes: NUM_PROCESSES=2"),
]
# fmt: on


@pytest.mark.parametrize(("model", "arguments", "said"), REFUSED)
def test_an_argument_that_a_model_has_no_use_for_is_an_error(model, arguments, said, checkpoint):
    with pytest.raises(KVCompressError, match=said):
        load_lm(model if model in ("tiny", "./nothing here") else checkpoint(model), **arguments)


def test_an_argument_that_says_what_the_model_does_is_accepted():
    load_lm(mm_spatial_pool_stride=2)


def test_an_evaluation_refuses_it_too(checkpoint):
    with pytest.raises(KVCompressError, match="mm_spatial_pool_stride has no meaning"):
        load_model(model_arguments(pretrained=checkpoint("qwen2-vl"), device="cpu", mm_spatial_pool_stride=2))


def test_a_model_without_chat_template_is_an_error_that_says_what_to_give(checkpoint, tmp_path):
    folder = Path(save_checkpoint("llama", tmp_path))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(KVCompressError, match=r"no chat template.*chat_template=plain"):
        load_lm(str(folder))


@pytest.mark.parametrize(
    ("given", "world_size", "gpus", "place"),
    [
        ({}, 1, 0, "cpu"),
        ({}, 1, 2, "cuda"),
        ({"device": "cuda:1"}, 1, 2, "cuda:1"),
        ({"device": "cpu"}, 2, 2, "cpu"),
        ({}, 2, 2, "cuda:1"),
        ({"device": "cuda:2"}, 1, 2, "torch sees 2 CUDA GPUs"),
        ({"device_map": "auto"}, 2, 2, "each has one device"),
        ({"tp_plan": "auto"}, 1, 2, "needs several processes"),
        ({"tp_plan": "auto", "device": "cpu"}, 2, 2, "uses the GPUs of this machine"),
    ],
)
def test_each_rank_has_the_device_asked_for_or_its_own_gpu(monkeypatch, given, world_size, gpus, place):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    args = ModelArguments(pretrained="m", **given)
    if " " not in place:
        assert device_of(args, world_size) == torch.device(place)
        return
    with pytest.raises(KVCompressError, match=place):
        device_of(args, world_size)


def test_mps_is_taken_where_torch_has_it_and_is_one_line_where_not(monkeypatch):
    args = ModelArguments(pretrained="m", device="mps")
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert device_of(args, 1) == torch.device("mps")
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(KVCompressError, match="device='mps': torch finds none on this machine"):
        device_of(args, 1)


def test_a_vision_model_whose_processor_is_only_a_tokenizer_is_an_error(monkeypatch):
    """AutoProcessor falls back to the tokenizer where it finds no processor."""
    monkeypatch.setattr(AutoProcessor, "from_pretrained", AutoTokenizer.from_pretrained)
    with pytest.raises(KVCompressError, match="no image processor"):
        load_lm(fresh=True)
