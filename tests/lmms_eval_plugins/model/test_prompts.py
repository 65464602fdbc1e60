"""From a question to model inputs: template, system prompt, timestamps, precision."""

import shutil

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from kvcompress import KVCompressError
from lmms_eval_plugins.model.batches import in_order, parts_of
from lmms_eval_plugins.model.prompts import DoNotBatch
from tests.support.checkpoints import image, load_lm, requests, write_video


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4")


def test_a_begin_of_sequence_token_stands_in_the_prompt_once(checkpoint):
    """The template writes it, or for plain text the tokenizer; the two never both."""
    for family, template in (("qwen2-vl", "<7>Hi"), ("llama", "<7>Hi"), ("llama", "plain")):
        lm = load_lm(checkpoint(family), fresh=True, chat_template="plain" if template == "plain" else None)
        if template != "plain":
            lm.processor.chat_template = template
        lm.tokenizer.add_special_tokens({"bos_token": "<7>"})
        lm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<7> $A", special_tokens=[("<7>", 7)])
        (request,) = requests(lm, [{"text": "hello"}])
        assert lm.prepare([request]).inputs["input_ids"][0].tolist().count(7) == 1


def test_frame_timestamps_of_a_video_reach_the_prompt(checkpoint, video):
    """Qwen3-VL writes them; 12 frames at 4 per second, of which 0, 3, 7, 11 are taken and merged in pairs."""
    lm = load_lm(checkpoint("qwen3-vl"))
    (request,) = requests(lm, [{"text": "?", "videos": [video]}])
    prompt = lm.tokenizer.decode(lm.prepare([request]).inputs["input_ids"][0])
    assert "<0.4 seconds>" in prompt
    assert "<2.2 seconds>" in prompt


def test_seconds_between_frames_are_not_rounded_to_the_models_precision(checkpoint, tmp_path):
    """Qwen2.5-VL multiplies them into the frames' positions: 0.9524 s, in bfloat16 0.953, made the last ones differ."""
    lm = load_lm(checkpoint("qwen2.5-vl"), dtype="bfloat16", max_frames_num=30)
    (request,) = requests(lm, [{"text": "?", "videos": [write_video(tmp_path / "a.mp4", frames=100, fps=7)]}])
    inputs = lm.prepare([request]).inputs
    assert inputs["second_per_grid_ts"].tolist() == pytest.approx([2 / (30 / 100 * 7)], rel=1e-6)
    assert inputs["pixel_values_videos"].dtype == torch.bfloat16


def test_images_for_a_text_only_model_are_an_error(checkpoint):
    lm = load_lm(checkpoint("llama"))
    with pytest.raises(KVCompressError, match="text-only"):
        lm.generate_until(requests(lm, [{"text": "?", "images": [image(0)]}]))


def test_system_prompt_is_the_first_message(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"), system_prompt="Be brief.")
    (request,) = requests(lm, [{"text": "hello"}])
    assert lm.tokenizer.decode(lm.prepare([request]).inputs["input_ids"][0]).startswith("[system] Be brief.[user]")


def test_one_of_several_templates_of_a_checkpoint_goes_by_its_name(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "several")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "brief.jinja").write_text("Q: {{ messages[0]['content'] }} A: ")
    default, brief = (load_lm(str(folder), **given) for given in ({}, {"chat_template": "brief"}))
    shown = [
        lm.tokenizer.decode(lm.prepare(requests(lm, [{"text": "why?"}])).inputs["input_ids"][0])
        for lm in (default, brief)
    ]
    assert shown == ["[user] why?[assistant] ", "Q: why? A: "]
    with pytest.raises(KVCompressError, match=r"'long' is neither a file nor 'plain', nor one of .*: default, brief"):
        load_lm(str(folder), chat_template="long")
    with pytest.raises(KVCompressError, match="'brief' is neither a file nor 'plain': the checkpoint names none"):
        load_lm(checkpoint("llama"), chat_template="brief")


def test_chat_template_file_and_plain_text(checkpoint, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("Q: {{ messages[0]['content'] }}\nA:")
    for value, expected in ((str(template), "Q: hello\nA:"), ("plain", "hello")):
        lm = load_lm(checkpoint("llama"), chat_template=value)
        (request,) = requests(lm, [{"text": "hello"}])
        assert lm.tokenizer.decode(lm.prepare([request]).inputs["input_ids"][0]) == expected


def test_max_pixels_bounds_the_image_where_the_processor_scales_by_area(checkpoint):
    tokens = []
    for bounds in ({}, {"max_pixels": 32 * 32}, {"min_pixels": 112 * 112}):
        lm = load_lm(checkpoint("qwen2-vl"), **bounds)
        lm.generate_until(requests(lm, [{"text": "?", "images": [image(0)]}]))
        tokens.append(lm.rows[0]["vision_tokens"])
    assert tokens[1] < tokens[0] < tokens[2]


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
def test_frames_and_area_of_a_video_are_bounded(checkpoint, tmp_path, family):
    clip = write_video(tmp_path / "a.mp4", frames=12, fps=4)
    patches = []
    for bounds in (
        {},
        {"video_fps": 1},
        {"video_max_pixels": 1500, "video_min_pixels": 1},
        {"video_min_pixels": 90000},
    ):
        lm = load_lm(checkpoint(family), **({"max_frames_num": 12, "video_max_pixels": 90000} | bounds))
        inputs = lm.prepare(requests(lm, [{"text": "?", "videos": [clip]}])).inputs
        patches.append(inputs["video_grid_thw"].prod().item())
    whole, slow, small, large = patches
    assert slow < whole
    assert small < whole < large


def test_clips_of_different_lengths_go_into_a_batch_or_into_one_for_each_length(checkpoint, tmp_path):
    """Qwen2-VL's processor concatenates patches; LLaVA-OneVision's stacks clips."""
    clips = [{"text": "?", "videos": [write_video(tmp_path / f"{n}.mp4", frames=n, fps=4)]} for n in (3, 5)]
    lm = load_lm(checkpoint("qwen2-vl"), max_frames_num=8)
    assert len(lm.prepare(requests(lm, clips)).inputs["input_ids"]) == 2
    lm = load_lm(checkpoint("llava-onevision"), max_frames_num=8)
    assert len(lm.prepare(requests(lm, [clips[0]] * 2)).inputs["input_ids"]) == 2
    with pytest.raises(DoNotBatch, match="cannot batch clips of 3 and 5 frames"):
        lm.prepare(requests(lm, clips))
    parts = parts_of(requests(lm, [clips[0], clips[1], clips[0]]), lm.prepare)
    assert [(places, len(batch.inputs["input_ids"])) for places, batch in parts] == [([0, 2], 2), ([1], 1)]


def test_area_of_a_video_is_no_argument_where_nothing_scales_by_it(checkpoint):
    with pytest.raises(KVCompressError, match="video_min_pixels and video_max_pixels have no meaning for"):
        load_lm(checkpoint("llava-onevision"), video_max_pixels=100)


@pytest.mark.parametrize("family", ["llava-onevision", "qwen2-vl"])
def test_a_placeholder_in_a_tasks_text_is_text(checkpoint, family):
    """It represents no image, whether the question has one or none."""
    lm = load_lm(checkpoint(family))
    token = lm.processor.image_token
    for images in ([image(0)], []):
        plain, marked = (
            lm.prepare(requests(lm, [{"text": text, "images": images}])).inputs
            for text in ("what is this?", f"what is {token} this?")
        )
        image_id = lm.tokenizer.convert_tokens_to_ids(token)
        counts = [(inputs["input_ids"] == image_id).sum().item() for inputs in (plain, marked)]
        assert counts[0] == counts[1]
        assert (counts[0] > 0) == bool(images)
        assert f"what is {token[0]} {token[1:]} this?" in lm.tokenizer.decode(marked["input_ids"][0])


def test_answers_of_parts_stand_as_their_requests_do():
    assert in_order([[0, 2], [3], [1]], [["a", "c"], ["d"], ["b"]]) == ["a", "b", "c", "d"]
