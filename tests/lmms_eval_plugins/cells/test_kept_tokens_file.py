"""A file of kept tokens that somebody else made: what is wrong in it is one line, and it reads no other file."""

import base64
import json

import numpy as np
import pytest

from lmms_eval_plugins.cells.errors import DamagedFile
from lmms_eval_plugins.cells.kept_tokens_file import SURVIVORS_FILE, read_kept_tokens, write_kept_tokens
from lmms_eval_plugins.model.kept_tokens import packed_bits, packed_worth
from lmms_eval_plugins.report.html.data import mean_needs_kept, mean_shares, needs_by_question


def entry(vision=5, text=3, layers=2, heads=2) -> dict:
    masks = [np.ones((layers, heads, count), dtype=bool) for count in (vision, text)]
    worth = [packed_worth(mask.astype(np.float32), np.ones((layers, heads))) for mask in masks]
    return {
        "task": "t",
        "doc_id": 0,
        "layers": list(range(layers)),
        "kv_heads": heads,
        "vision": packed_bits(masks[0]),
        "text": packed_bits(masks[1]),
        "needs": {"vision": worth[0], "text": worth[1]},
        "pieces": ["a"] * text,
        "images": [{"jpeg": base64.b64encode(b"jpeg").decode()}],
    }


def test_what_is_right_is_read(tmp_path):
    write_kept_tokens(tmp_path, tmp_path, 2, [entry(), entry(vision=0)])
    entries = read_kept_tokens(tmp_path)
    assert mean_shares(entries) == mean_needs_kept(entries[:1], needs_by_question([entries[:1]])) == [[1, 1], [1, 1]]


def reads_another_file(entry):
    entry["images"][0]["file"] = "/etc/hostname"


def reads_a_file_above(entry):
    entry["images"][0]["file"] = "../results.json"


def names_no_file(entry):
    entry["images"][0]["file"] = ["a"]


def is_larger_than_the_memory(entry):
    entry["vision"]["shape"] = [2, 2, 2**31 - 1]


def has_other_layers(entry):
    entry["vision"]["shape"] = [4, 1, 5]


def has_fewer_layers_than_it_says(entry):
    entry["layers"] = [0]


def has_no_tokens(entry):
    entry["vision"] = entry["text"] = packed_bits(np.ones((2, 2, 0), dtype=bool))


def needs_other_tokens(first):
    first["needs"] = entry(vision=6)["needs"]


def has_another_model(first):
    first.update(entry(layers=1))


@pytest.mark.parametrize(
    "wrong",
    [
        reads_another_file, reads_a_file_above, names_no_file, is_larger_than_the_memory, has_other_layers,
        has_fewer_layers_than_it_says, has_no_tokens, needs_other_tokens, has_another_model,
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path, wrong):
    write_kept_tokens(tmp_path, tmp_path, 2, [entry(), entry()])
    header, first, second = (tmp_path / SURVIVORS_FILE).read_text().splitlines()
    first = json.loads(first)
    wrong(first)
    (tmp_path / SURVIVORS_FILE).write_text("\n".join([header, json.dumps(first), second]))
    with pytest.raises(DamagedFile, match=f"^{SURVIVORS_FILE} is damaged: [^\n]+$"):
        read_kept_tokens(tmp_path)
