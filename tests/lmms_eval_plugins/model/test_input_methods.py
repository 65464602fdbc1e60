"""`downsample` and `blind`: what the model is shown, how many tokens it is, and that no cell takes another's for it."""

import pytest

from kvcompress import KVCompressError
from kvcompress.scoring.vision import vision_token_mask
from lmms_eval_plugins.leaderboard import plausible
from lmms_eval_plugins.model.arguments import make_compression
from lmms_eval_plugins.model.reduced_inputs import shrunk
from tests.support.checkpoints import answer, image, load_lm, requests, write_video

PICTURE = image(0, 128, 96)
DOCS = [{"text": f"what is on sign {n}?", "images": [image(n % 2, 128, 96)]} for n in range(3)]
SIZES = pytest.mark.parametrize(
    "size",
    [{"batch_size": 2}, {"slots": 2}, {"batch_size": 2, "prefix_cache_gb": 1}, {"batch_size": "auto"}],
    ids=["batch", "in flight", "prefix cache", "automatic size"],
)


@pytest.fixture(scope="module")
def large_video(tmp_path_factory):
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4", width=128, height=96)


def prepared(lm, doc, method, ratio=None, **options):
    """The prompt that the model is shown, its vision tokens, and those of the question as it is."""
    lm.set_cell(method, ratio, **options)
    batch = lm.prepare(requests(lm, [doc]))
    return batch.prompts[0], int(vision_token_mask(lm.model.config, batch.inputs["input_ids"]).sum()), batch.whole[0]


def vision_tokens(lm, prompt):
    return int(vision_token_mask(lm.model.config, lm.chat.inputs([prompt])["input_ids"]).sum())


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen3-vl"])
@pytest.mark.parametrize("pictures", [[PICTURE], [PICTURE, image(1, 90, 120)]], ids=["a picture", "two"])
def test_downsample_makes_the_most_tokens_within_the_ratio_that_any_size_makes(checkpoint, family, pictures):
    lm = load_lm(checkpoint(family))
    doc = {"text": "?", "images": pictures}
    full, all_tokens, _ = prepared(lm, doc, "full")
    sides = max(side for picture in pictures for side in picture.size)
    of_sizes = [vision_tokens(lm, shrunk(full, step / sides)) for step in range(4, sides)]
    for ratio in (0.8, 0.5, 0.25):
        shown, tokens, whole = prepared(lm, doc, "downsample", ratio)
        assert tokens == max(count for count in of_sizes if count <= ratio * all_tokens)
        assert whole.vision == all_tokens
        for picture, smaller in zip(pictures, shown.images, strict=True):
            width, height = smaller.size
            assert width / picture.width == pytest.approx(height / picture.height, abs=1 / min(picture.size))


def test_a_budget_counts_vision_tokens_and_one_that_is_large_enough_changes_nothing(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"))
    lm.set_cell("downsample", budget=9)
    batch = lm.prepare(requests(lm, DOCS[:1]))
    assert 0 < int(vision_token_mask(lm.model.config, batch.inputs["input_ids"]).sum()) <= 9
    shown, tokens, whole = prepared(lm, DOCS[0], "downsample", 1.0)
    assert (shown.images[0].size, tokens) == ((128, 96), whole.vision)


@pytest.mark.parametrize("family", ["llava-1.5", "gemma3"])
def test_a_processor_with_a_fixed_grid_is_named_in_one_line(checkpoint, family):
    lm = load_lm(checkpoint(family))
    with pytest.raises(KVCompressError, match=r"^downsample: \d+ vision tokens are asked for, .* whatever their size$"):
        prepared(lm, DOCS[0], "downsample", 0.5)


def test_a_floor_is_named_too(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"))
    with pytest.raises(
        KVCompressError, match=r"1 vision tokens are asked for, .* of pictures of 128x96, and never fewer"
    ):
        prepared(lm, DOCS[0], "downsample", 0.1)


def test_of_a_video_frames_shrink_and_only_if_asked_their_number_does(checkpoint, large_video):
    lm = load_lm(checkpoint("qwen2-vl"), max_frames_num=8)
    doc = {"text": "?", "videos": [large_video]}
    full, all_tokens, _ = prepared(lm, doc, "full")
    smaller, tokens, _ = prepared(lm, doc, "downsample", 0.5)
    assert len(smaller.videos[0]) == len(full.videos[0]) == 8
    assert smaller.videos[0].shape[1] < 96
    assert 0 < tokens <= all_tokens / 2
    fewer, tokens, _ = prepared(lm, doc, "downsample", 0.5, fewer_frames=True)
    assert fewer.videos[0].shape == (4, 96, 128, 3)
    assert tokens == all_tokens / 2
    indices = full.video_metadata[0].frames_indices
    assert fewer.video_metadata[0].frames_indices == [indices[place] for place in (0, 2, 4, 7)]


@pytest.mark.parametrize("family", ["qwen2-vl", "llava-1.5", "gemma3", "llava-onevision"])
def test_blind_is_the_prompt_of_the_same_question_without_pictures(checkpoint, family):
    lm = load_lm(checkpoint(family))
    (blind,) = answers(lm, {"method": "blind"}, DOCS[:1])
    seen = lm.gather_rows()[0]
    assert (blind,) == answers(lm, {"method": "full"}, [{"text": DOCS[0]["text"]}])
    alone = lm.gather_rows()[0]
    assert seen["images"] == 0
    assert seen["realised_ratio"] == pytest.approx(
        [alone["tokens_in"] / seen["tokens_in"]] * len(seen["realised_ratio"])
    )


def answers(lm, cell, docs=DOCS):
    return tuple(answer(lm, cell, docs, max_new_tokens=4)[0])


CELLS = [{"method": "downsample", "ratio": 0.5}, {"method": "full"}, {"method": "blind"}]
CELLS += [{"method": "downsample", "ratio": 0.3}, *CELLS[:2]]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """The answers of each cell, by a model that answers no other."""
    folder = checkpoint("qwen2-vl")
    of_cell = [answers(load_lm(folder, vision_cache_gb=0, prefix_cache_gb=0), cell) for cell in CELLS[:4]]
    return of_cell + of_cell[:2]


@SIZES
def test_cells_of_one_model_take_nothing_of_each_other(checkpoint, alone, size):
    together = load_lm(checkpoint("qwen2-vl"), vision_cache_gb=1, **size)
    found, shares = [], []
    for cell in CELLS:
        found.append(answers(together, cell))
        shares.append({row["realised_ratio"][0] for row in together.gather_rows()})
    assert found == alone
    assert len(set(found)) == 4
    assert shares[0] == shares[4] != shares[3]
    assert shares[1] == {1.0}


def test_a_row_counts_the_questions_own_tokens_and_the_share_of_them_that_was_shown(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"))
    answers(lm, {"method": "full"})
    full = lm.gather_rows()[0]
    _, shown, _ = prepared(lm, DOCS[0], "downsample", 0.5)
    answers(lm, {"method": "downsample", "ratio": 0.5})
    row = lm.gather_rows()[0]
    assert [row[name] for name in ("tokens_in", "vision_tokens", "images", "shows")] == [
        full[name] for name in ("tokens_in", "vision_tokens", "images", "shows")
    ]
    gone = full["vision_tokens"] - shown
    assert row["realised_ratio"] == pytest.approx([1 - gone / full["tokens_in"]] * len(row["realised_ratio"]))
    assert row["kv_held_bytes"] < full["kv_held_bytes"]
    options = make_compression("downsample", 0.5).effective
    low, high = plausible.realised_ratio(
        {"method": "downsample", "ratio": 0.5, "budget": None, "options": options}, row
    )
    assert low < row["realised_ratio"][0] < high < 1


def test_a_question_without_pictures_is_asked_as_it_is(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"))
    plain = [{"text": "hello"}]
    expected = answers(lm, {"method": "full"}, plain)
    assert (
        answers(lm, {"method": "downsample", "ratio": 0.1}, plain)
        == answers(lm, {"method": "blind"}, plain)
        == expected
    )


def test_no_overlay_is_recorded(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"))
    lm.overlays = 4
    answers(lm, {"method": "downsample", "ratio": 0.5})
    assert not any("survivors" in row for row in lm.gather_rows())
