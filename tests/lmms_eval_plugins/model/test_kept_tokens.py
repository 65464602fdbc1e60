"""Which tokens of a prompt were kept: as measured, as the cache says, and as written to disk."""

import json

import numpy as np
import pytest
from PIL import Image

from lmms_eval_plugins.cells import kept_tokens_file
from lmms_eval_plugins.cells.kept_tokens_file import (
    needs,
    needs_kept,
    read_kept_tokens,
    shares,
    unpacked,
    write_kept_tokens,
)
from tests.support.checkpoints import image, load_lm, requests, write_video

METHODS = {
    "full": {},
    "snapkv": {"ratio": 0.3, "window_size": 4},
    "adakv": {"ratio": 0.3},
    "fastv": {"ratio": 0.3},
    "visionzip": {"ratio": 0.3},
}


@pytest.mark.parametrize("method", METHODS)
def test_the_share_that_was_kept_is_the_measured_one_in_a_padded_batch(method):
    lm = load_lm(dtype="auto", batch_size=2, method=method, **METHODS[method])
    lm.overlays = 2
    docs = [
        {"text": "What word is on the red sign?", "images": [image(0, 156, 156)]},
        {"text": "And?", "images": [image(1, 156, 90)]},
        {"text": "Nothing was asked for here", "images": [image(2, 156, 156)]},
    ]
    lm.generate_until(requests(lm, docs, max_new_tokens=3))
    rows = {row["doc_id"]: row for row in lm.rows}
    assert "survivors" not in rows[2]
    for doc in (0, 1):
        entry = rows[doc]["survivors"]
        vision, text = unpacked(entry["vision"]), unpacked(entry["text"])
        assert vision.shape[2] == rows[doc]["vision_tokens"]
        assert vision.shape[2] + text.shape[2] == rows[doc]["tokens_in"]
        np.testing.assert_allclose(shares(entry, "all").mean(1), rows[doc]["realised_ratio"], atol=1e-6)
        assert "".join(entry["pieces"]).count("sign") == (doc == 0)
        assert entry["images"][0]["layout"]["tokens"] == vision.shape[2]


def test_text_videos_and_images_that_are_not_told_apart_have_no_picture_drawn_over(tmp_path):
    lm = load_lm(dtype="auto", method="random", ratio=0.5)
    lm.overlays = 3
    video = write_video(tmp_path / "a.mp4", frames=2)
    docs = [
        {"text": "just text"},
        {"text": "v", "videos": [video]},
        {"text": "b", "images": [image(0)], "videos": [video]},
    ]
    lm.generate_until(requests(lm, docs, max_new_tokens=1))
    text, of_video, both = (row["survivors"] for row in sorted(lm.rows, key=lambda row: row["doc_id"]))
    assert text["images"] == []
    assert shares(text, "vision") is None
    assert shares(text, "text").shape == (5, 2)
    (strip,) = of_video["images"]
    assert strip["layout"]["tokens"] == of_video["vision"]["shape"][2]
    assert "videos" in strip["layout"]["note"]
    picture, *strips_of_both = both["images"]
    assert "jpeg" in picture
    assert picture["layout"]["tokens"] == 0
    assert all("jpeg" not in one for one in strips_of_both)
    assert sum(one["layout"]["tokens"] for one in strips_of_both) == both["vision"]["shape"][2]
    assert not any(one["layout"]["views"] for one in both["images"])


def test_kept_sets_are_the_cache_s_own():
    lm = load_lm(dtype="auto", method="streamingllm", ratio=0.2)
    lm.overlays = 1
    lm.generate_until(requests(lm, [{"text": "x", "images": [image(0, 156, 156)]}], max_new_tokens=2))
    kept = unpacked(lm.rows[0]["survivors"]["vision"])
    # The first tokens stay, then the latest: of the image a beginning and an end.
    assert (np.diff(kept.astype(int), axis=2) == 1).sum(2).max() == 1
    assert kept[..., 0].all()
    assert kept[..., -1].all()
    assert not kept[..., 100].any()


def test_what_the_answer_needs_is_noted_by_the_method_that_knows_it():
    """In a padded batch: hindsight keeps, per head, what its own answer attends to most."""
    lm = load_lm(dtype="auto", batch_size=2, method="hindsight", ratio=0.3)
    docs = [{"text": "What?", "images": [image(0, 156, 156)]}, {"text": "And this?", "images": [image(1, 156, 90)]}]
    entries = {}
    for method in ("hindsight", "snapkv"):
        lm.set_cell(method, 0.3, None)
        lm.overlays = 2
        lm.reset_rows()
        lm.generate_until(requests(lm, docs, max_new_tokens=3))
        entries[method] = {row["doc_id"]: row["survivors"] for row in lm.rows}
    for doc, entry in entries["hindsight"].items():
        worth = needs(entry)
        np.testing.assert_allclose(worth.sum(2), 1, atol=1e-6)
        kept = round(shares(entry, "all")[0, 0] * worth.shape[2])
        most = np.sort(worth, axis=2)[..., -kept:].sum(2)
        np.testing.assert_allclose(needs_kept(entry, worth), most, atol=5e-3)
        other = entries["snapkv"][doc]
        assert needs(other) is None
        assert (needs_kept(other, worth) <= most + 5e-3).all()
        assert (needs_kept(other, worth) < most - 5e-3).any()
    json.dumps(entries)


def test_what_is_written_is_read_back_and_an_image_is_stored_once(tmp_path):
    lm = load_lm(dtype="auto", method="snapkv", ratio=0.2)
    lm.overlays = 2
    docs = [{"text": text, "images": [image(0, 1600, 900)]} for text in ("a", "b")]
    lm.generate_until(requests(lm, docs, max_new_tokens=1))
    entries = [{"task": "t", "doc_id": row["doc_id"], **row["survivors"]} for row in lm.rows]
    assert kept_tokens_file.overlays_asked(tmp_path) == 0
    assert list(read_kept_tokens(tmp_path)) == []
    write_kept_tokens(tmp_path, tmp_path / "images", 5, entries)
    assert kept_tokens_file.overlays_asked(tmp_path) == 5
    back = list(read_kept_tokens(tmp_path))
    assert [entry["doc_id"] for entry in back] == [0, 1]
    np.testing.assert_array_equal(unpacked(back[0]["vision"]), unpacked(entries[0]["vision"]))
    (stored,) = (tmp_path / "images").iterdir()
    assert {entry["images"][0]["file"] for entry in back} == {stored.name}
    assert back[0]["images"][0]["size"] == [1600, 900]
    with Image.open(stored) as small:
        assert small.size == (768, 432)
    assert "jpeg" not in (tmp_path / "survivors.jsonl").read_text()
    json.dumps(back)
