"""From a question to model inputs: template, system prompt, timestamps, precision."""

import os
import shutil
import wave
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from lmms_eval.models.model_utils.load_video import read_video as lmms_eval_read_video
from lmms_eval.protocol import ChatMessages
from PIL import Image
from tokenizers.processors import TemplateProcessing

from kvcompress import KVCompressError
from lmms_eval_plugins.model.prompts import (
    DoNotBatch,
    digest,
    in_order,
    parts_of,
    read_messages,
    read_video,
)
from tests.support.checkpoints import image, load_lm, messages, requests, write_video


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


def test_a_picture_that_the_processor_refuses_is_not_the_templates_fault(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"))
    with pytest.raises(KVCompressError, match=r"refuses a question's images.*ratio must be smaller than 200"):
        lm.prepare(requests(lm, [{"text": "?", "images": [Image.new("RGB", (2010, 10))]}]))


def test_system_prompt_is_the_first_message_in_place_of_the_tasks_own(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"), system_prompt="Be brief.")
    (request,) = requests(lm, [{"text": "hello"}])
    assert lm.tokenizer.decode(lm.prepare([request]).inputs["input_ids"][0]).startswith("[system] Be brief.[user]")
    own = [{"role": "system", "content": [{"type": "text", "text": "Be long."}]}, *messages({"text": "hello"})]
    prompt = lm.chat.read(ChatMessages(messages=own), "task")  # it replaces the task's own
    assert lm.chat.text(prompt).startswith("[system] Be brief.[user]")


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


# -- messages become conversations, images and evenly sampled video frames


def read(doc, max_frames_num=4):
    return read_messages(ChatMessages(messages=messages(doc)), max_frames_num)


def test_order_of_placeholders_is_that_of_the_media(tmp_path):
    video = write_video(tmp_path / "a.mp4")
    prompt = read({"text": "which?", "images": [image(0), image(1)], "videos": [video]})
    kinds = [part["type"] for part in prompt.conversation[0]["content"]]
    assert kinds == ["image", "image", "video", "text"]
    assert [picture.tobytes() for picture in prompt.images] == [image(0).tobytes(), image(1).tobytes()]
    assert (len(prompt.videos), len(prompt.video_metadata)) == (1, 1)


def test_text_only_has_no_media():
    prompt = read({"text": "hello"})
    assert prompt.conversation == [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert (prompt.images, prompt.videos) == ([], [])


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK"])
def test_images_of_any_mode_become_rgb(mode):
    assert read({"text": "", "images": [image(0).convert(mode)]}).images[0].mode == "RGB"


def test_an_image_may_be_a_file(tmp_path):
    image(3).save(tmp_path / "a.png")
    assert read({"text": "", "images": [str(tmp_path / "a.png")]}).images[0].tobytes() == image(3).tobytes()


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.mkv"])  # the last two record no number of frames
@pytest.mark.parametrize(("most", "taken"), [(4, [0, 3, 7, 11]), (1, [0]), (64, list(range(12)))])
def test_frames_are_spread_evenly_from_first_to_last(tmp_path, name, most, taken):
    frames, metadata = read_video(write_video(tmp_path / name, frames=12, fps=4), most)
    assert frames.shape == (len(taken), 48, 64, 3)
    assert np.abs(frames.mean((1, 2, 3)) - 20 * np.array(taken)).max() < 8
    assert metadata.frames_indices == taken
    assert (metadata.total_num_frames, metadata.fps, metadata.duration) == (12, 4, 3)


@pytest.mark.parametrize(("fps", "most", "taken"), [(2, 64, 6), (2, 4, 4), (0.01, 64, 1), (30, 64, 12), (None, 64, 12)])
def test_frames_per_second_are_at_most_those_asked_for(tmp_path, fps, most, taken):
    frames, metadata = read_video(write_video(tmp_path / "a.mp4", frames=12, fps=4), most, fps)
    assert len(frames) == taken
    assert metadata.frames_indices == list(np.linspace(0, 11, taken, dtype=int))


def test_frames_of_an_mp4_are_those_that_lmms_eval_reads(tmp_path):
    path = write_video(tmp_path / "a.mp4", frames=30)
    assert np.array_equal(read_video(path, 8)[0], lmms_eval_read_video(path, num_frm=8, backend="pyav"))


def test_an_undecodable_video_is_an_error(tmp_path):
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(800))
    with pytest.raises(KVCompressError, match=r"sound\.wav holds no video frame"):
        read_video(tmp_path / "sound.wav", 4)
    (tmp_path / "a.mp4").write_bytes(b"not a video")
    with pytest.raises(av.error.InvalidDataError):
        read_video(tmp_path / "a.mp4", 4)


def chat(*messages):
    """(role, part, ...) each; a part is a text, an image, or a video's path."""
    return ChatMessages(
        messages=[{"role": role, "content": [content(part) for part in parts]} for role, *parts in messages]
    )


def content(part):
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image", "url": part} if isinstance(part, Image.Image) else {"type": "video", "url": str(part)}


def test_equal_digests_mean_equal_prompts(tmp_path):
    """Any two of these prompts differ, in one thing each."""
    red, dim = Image.new("RGB", (2, 3), (255, 0, 0)), Image.new("RGB", (2, 3), (255, 0, 0))
    dim.putpixel((1, 2), (254, 0, 0))
    one, two = tmp_path / "one.mp4", tmp_path / "two.mp4"
    one.write_bytes(b"video")
    shutil.copy2(one, two)
    prompts = [
        chat(("user", "ab")),
        chat(("user", "ba")),
        chat(("user", "a", "b")),
        chat(("user", "a"), ("user", "b")),
        chat(("user", "a"), ("assistant", "b")),
        chat(("system", "a"), ("user", "b")),
        chat(("user", "a", "b"), ("user",)),
        chat(("user",), ("user", "a", "b")),
        chat(("user", "a''textb")),
        chat(("user", "a'text'b")),
        chat(("user", "a'", "b")),
        chat(("user", "image", "ab")),
        chat(("user", red, "ab")),
        chat(("user", "ab", red)),
        chat(("user", red, red, "ab")),
        chat(("user", dim, "ab")),
        chat(("user", Image.new("RGB", (3, 2), (255, 0, 0)), "ab")),  # the same bytes in another shape
        chat(("user", Image.new("RGB", (6, 1), (255, 0, 0)), "ab")),
        chat(("user", one, "ab")),
        chat(("user", two, "ab")),
        chat(("user", one, one, "ab")),
        chat(("user", one, two, "ab")),
        chat(("user", two, one, "ab")),
    ]
    assert len({digest(prompt) for prompt in prompts}) == len(prompts)
    assert digest(chat(("user", red.copy(), "ab"))) == digest(chat(("user", red, "ab")))

    before = digest(chat(("user", one)))
    assert digest(chat(("user", one))) == before
    stat = one.stat()
    one.write_bytes(b"longer video")
    os.utime(one, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    longer = digest(chat(("user", one)))
    one.write_bytes(b"video")
    os.utime(one, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert len({before, longer, digest(chat(("user", one)))}) == 3


def test_an_image_file_counts_by_what_it_shows(tmp_path):
    def shown():
        part = {"type": "image", "url": str(tmp_path / "a.png")}
        return digest(ChatMessages(messages=[{"role": "user", "content": [part]}]))

    image(1).save(tmp_path / "a.png")
    before = shown()
    image(2).save(tmp_path / "a.png")
    assert shown() != before
    image(1).save(tmp_path / "a.png")
    assert shown() == before


@pytest.mark.parametrize(("frames", "message"), [(0, "holds no video frame$"), (3, "that could be decoded")])
def test_a_video_without_a_frame_is_an_error_that_says_so(tmp_path, monkeypatch, frames, message):
    class Container:
        streams = SimpleNamespace(video=[SimpleNamespace(frames=frames, average_rate=None)])

        def __enter__(self):
            return self

        def nothing(self, *given, **named):
            return ()

        __exit__ = demux = decode = nothing

    monkeypatch.setattr(av, "open", lambda path: Container())
    with pytest.raises(KVCompressError, match=message):
        read_video(tmp_path / "a.mp4", 4)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "audio", "url": "a.wav"}, "content of type 'audio' is not supported"),
        ({"type": "video", "url": "a.mp4", "start_time": 1.0, "end_time": 2.0}, "clips .* are not supported"),
        ({"type": "video", "url": ["a.mp4"]}, "a video must be a file name, got list"),
        ({"type": "image", "url": b"png"}, "an image must be a PIL image or a file name, got bytes"),
    ],
)
def test_media_that_is_not_supported_is_an_error(part, said):
    with pytest.raises(KVCompressError, match=said):
        read_messages(ChatMessages(messages=[{"role": "user", "content": [part]}]), 4)
