"""Bytes against accuracy: what is on the front, and that bytes are those of the storage."""

import copy

import numpy as np
import pytest
import torch

from benchmarks import bytes_front
from benchmarks.bytes_front import Point, best_of, cells_of, front, held_bytes, report
from benchmarks.method_cells import Answers, Task, compute
from benchmarks.method_table import Estimate
from tests.support.families import FAMILIES


def point(ratio, storage, nbytes, right):
    accuracy = Estimate.of(np.array([1] * right + [0] * (10 - right)))
    return Point("snapkv" if ratio else "full", ratio, storage, nbytes, accuracy)


POINTS = [
    point(None, "bf16", 1600, 10),
    point(None, "turboquant 4", 400, 10),
    point(0.5, "bf16", 800, 9),
    point(0.1, "bf16", 160, 5),
    point(0.5, "turboquant 4", 200, 9),
    point(0.2, "turboquant 2", 50, 5),
    point(None, "channels 0.3", 1200, 8),
    point(0.5, "channels 0.3", 600, 7),
]


def test_the_front_is_what_nothing_beats():
    assert {(one.ratio, one.storage) for one in front(POINTS)} == {
        (None, "turboquant 4"),
        (0.5, "turboquant 4"),
        (0.2, "turboquant 2"),
    }


def test_the_best_of_a_kind_within_so_many_bytes():
    assert best_of(POINTS, "evict", 800) == POINTS[2]
    assert best_of(POINTS, "evict", 799) == POINTS[3]
    assert best_of(POINTS, "quantize", 399) is None
    assert best_of(POINTS, "both", 400) == POINTS[4]
    assert best_of(POINTS, "channels", 1600) == POINTS[6]


@pytest.mark.slow
def test_a_run_on_a_small_model_has_every_storage_and_its_bytes(tmp_path):
    pytest.importorskip("hqq", reason="pip install -e .[quantized]")
    family = FAMILIES["qwen2"]
    prompts = family.inputs(family.build(), [90, 90])
    task = Task(
        "letters", "", "letters", copy.deepcopy(family.build()).to(torch.bfloat16), 2, 2, 2,
        inputs=lambda batch: {name: tensor[batch] for name, tensor in prompts.items()},
        right=lambda batch, new: [True, False], protocols=(), has_images=False,
    )  # fmt: skip
    cells = cells_of(("snapkv",), 8)
    answers = Answers(tmp_path / "answers.json", task.identity)
    compute(task, [cell for cell, _ in cells], answers)
    assert not answers.refused
    points = [
        Point(cell.method, cell.column.ratio, storage, held_bytes(task, cell), Estimate.of(answers.of(cell, 2)))
        for cell, storage in cells
    ]
    sizes = {(one.ratio, one.storage): one.nbytes for one in points}
    vectors = 3 * 2 * 2 * 90  # layers, keys and values, KV heads, tokens
    columns = 3 * 2 * 90 * 4  # in int32
    assert sizes[None, "bf16"] == pytest.approx(vectors * 16 * 2 + columns, rel=0.02)
    assert sizes[None, "turboquant 2"] == pytest.approx(vectors * (16 * 2 // 8 + 2) + columns, rel=0.02)
    of_channels = 3 * 2 * 90 * (5 + 16) * 2 + 3 * 2 * 5 * 2  # 5 of 16 in keys; which they are, in 16 bits
    assert sizes[None, "channels 0.3"] == pytest.approx(of_channels + columns, rel=0.02)
    assert sizes[0.5, "turboquant 4"] < sizes[0.5, "bf16"] < sizes[None, "bf16"]
    text = report(task, points)
    assert all(f", {storage} |" in text for storage in bytes_front.STORAGES if storage[:2] in ("hq", "tu", "ch"))
