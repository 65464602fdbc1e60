"""A checkpoint that cannot be loaded as asked is one clear error."""

from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer

from kvcompress import KVCompressError
from lmms_eval_plugins.model.arguments import ModelArguments
from lmms_eval_plugins.model.loading import device_of
from tests.support.checkpoints import load_lm, save_checkpoint


def test_plain_text_is_an_error_for_a_vision_model():
    with pytest.raises(KVCompressError, match="text-only"):
        load_lm(chat_template="plain")


def test_a_model_without_chat_template_is_an_error_that_says_what_to_give(checkpoint, tmp_path):
    folder = Path(save_checkpoint("llama", tmp_path))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(KVCompressError, match=r"no chat template.*chat_template=plain"):
        load_lm(str(folder))


def test_max_pixels_is_an_error_where_it_would_do_nothing():
    with pytest.raises(KVCompressError, match=r"max_pixels.*LlavaOnevisionProcessor"):
        load_lm(max_pixels=1000)


def test_a_llava_onevision_argument_is_an_error_for_another_model(checkpoint):
    load_lm(mm_spatial_pool_stride=2)
    with pytest.raises(KVCompressError, match=r"mm_spatial_pool_stride.*qwen2_vl"):
        load_lm(checkpoint("qwen2-vl"), mm_spatial_pool_stride=2)


def test_arguments_are_checked_before_anything_is_loaded(tmp_path):
    with pytest.raises(KVCompressError, match="snapkv"):
        load_lm(str(tmp_path / "nothing here"), method="snapk", ratio=0.2)


@pytest.mark.parametrize(("device", "part"), [("cuda:99", "CUDA GPUs"), ("gpu", "is not a device")])
def test_a_device_that_is_not_there_is_an_error_that_names_it(device, part):
    with pytest.raises(KVCompressError, match=part):
        load_lm(device=device)


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
