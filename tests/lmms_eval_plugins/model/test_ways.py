"""However questions are answered, one by one or together: the same answers, and the same entries kept."""

from itertools import product

import pytest

from tests.support.checkpoints import answer, image, load_lm

FAMILIES = ("llava-onevision", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "internvl")
CELLS = ({}, {"method": "snapkv", "ratio": 0.5, "window_size": 4})
WAYS = {
    "batch": {"batch_size": 5},
    "in flight": {"slots": 3},
    "in pieces": {"slots": 3, "prefill_tokens": 16},
    "shared prefills": {"batch_size": 1, "prompt_cache_gb": 1},
    "shared prefills of batches": {"batch_size": 4, "prompt_cache_gb": 1},
}
ALONE = {"batch_size": 1, "vision_cache_gb": 0, "prompt_cache_gb": 0, "look_ahead": 0}
FEW = ("llava-onevision", "qwen3-vl", "internvl")  # of an ordinary run
QUICK = {*product(["batch"], FAMILIES), *product(["in flight", "in pieces", "shared prefills of batches"], FEW)}
QUICK.add(("shared prefills", "qwen3-vl"))
SAME = ("tokens_in", "tokens_out", "vision_tokens", "images", "videos", "answer")


def answers(lm, video: str) -> list[tuple[list[str], list[dict]]]:
    """The texts and the rows of each cell, over questions of every kind: with Qwen3-VL images and videos go through one
    function."""
    docs = [
        {"text": "what word is on the red sign?", "images": [image(0)]},
        {"text": "hello"},
        {"text": "which of the two?", "images": [image(1), image(2, 64, 64)]},
        {"text": "what happens in the clip?", "videos": [video]},
        {"text": "in either clip?", "videos": [video, video]},
    ]
    return [answer(lm, cell, docs) for cell in CELLS]


@pytest.fixture(scope="module")
def alone(checkpoint, video):
    """family -> what each question's answer is, alone and with nothing reused."""
    known = {}

    def of(family: str):
        if family not in known:
            known[family] = answers(load_lm(checkpoint(family), max_new_tokens=4, **ALONE), video)
        return known[family]

    return of


@pytest.mark.parametrize(
    ("way", "family"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in product(WAYS, FAMILIES)],
)
def test_answers_and_what_was_kept_are_those_of_each_question_alone(checkpoint, video, alone, way, family):
    given = dict(WAYS[way])
    if way == "in pieces" and family == "llava-onevision":
        given["prefill_tokens"] = 256  # an image's tokens are not split
    lm = load_lm(checkpoint(family), max_new_tokens=4, **given)
    for number, ((found, rows), (expected, others)) in enumerate(zip(answers(lm, video), alone(family), strict=True)):
        assert found == expected
        for row, other in zip(rows, others, strict=True):
            assert [row[name] for name in SAME] == [other[name] for name in SAME]
            assert row["realised_ratio"] == pytest.approx(other["realised_ratio"])
            assert not other["vision_is_known"]
        assert [(row["images"], row["videos"]) for row in rows] == [(1, 0), (0, 0), (2, 0), (0, 1), (0, 2)]
        # Of the second cell, the tower runs never, and only the first batch runs its own prefill.
        assert [row["vision_is_known"] for row in rows if row["images"]] == [number > 0] * 2
        if way == "shared prefills":
            assert sum(row["prompt_is_known"] for row in rows) == 4 * number
    assert alone(family)[0][0] != alone(family)[1][0]
