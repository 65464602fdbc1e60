"""Questions about one picture: what their prompts begin with is prefilled once, and each cell starts with nothing."""

import pytest

from lmms_eval_plugins.model.measurements import summarise
from tests.support.checkpoints import image, load_lm, requests

DOCS = [{"text": f"what word is on sign {n} of all?", "images": [image(n // 3)]} for n in range(6)]
CELLS = [{"method": "snapkv", "ratio": 0.3}, {"method": "knorm", "ratio": 0.3}, {"method": "fastv", "ratio": 0.5}]


def answers(lm, cell):
    lm.set_cell(**cell)
    lm.reset_rows()
    results = lm.generate_until(requests(lm, DOCS, max_new_tokens=4))
    return [result.text for result in results], lm.gather_rows()


@pytest.mark.parametrize("size", [{}, {"slots": 2}], ids=["one by one", "in flight"])
def test_answers_are_the_same_and_rows_say_how_much_was_known(checkpoint, size):
    plain, shared = (load_lm(checkpoint("qwen2-vl"), **size, **more) for more in ({}, {"prefix_cache_gb": 1}))
    for cell in CELLS:
        expected, plain_rows = answers(plain, cell)
        found, rows = answers(shared, cell)
        assert found == expected
        assert [row["realised_ratio"] for row in rows] == [row["realised_ratio"] for row in plain_rows]
        assert {row["reused_tokens"] for row in plain_rows} == {None}
        assert not any(row["prompt_is_known"] for row in rows)
        reused = {row["doc_id"]: row["reused_tokens"] for row in rows}
        if cell["method"] == "fastv":  # drops tokens on the way
            assert set(reused.values()) == {0}
            continue
        picture = rows[0]["vision_tokens"]
        assert (reused[0], reused[1]) == (0, reused[4])
        assert reused[1] == reused[2] == reused[4] == reused[5] >= reused[3] + picture
        assert summarise(rows)["reused_tokens"]["mean"] == sum(reused.values()) / 6
