"""lmms-eval's messages become conversations, images and evenly sampled video frames."""

import os
import shutil
from types import SimpleNamespace

import av
import numpy as np
import pytest
from lmms_eval.models.model_utils.load_video import read_video as lmms_eval_read_video
from lmms_eval.protocol import ChatMessages
from PIL import Image

from kvcompress import KVCompressError
from lmms_eval_plugins.model.media import digest, read_messages, read_video
from tests.support.checkpoints import image, messages, write_video


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
    "part",
    [
        {"type": "audio", "url": "a.wav"},
        {"type": "video", "url": "a.mp4", "start_time": 1.0, "end_time": 2.0},
        {"type": "video", "url": ["a.mp4"]},
        {"type": "image", "url": b"png"},
    ],
)
def test_media_that_is_not_supported_is_an_error(part):
    with pytest.raises(KVCompressError):
        read_messages(ChatMessages(messages=[{"role": "user", "content": [part]}]), 4)
