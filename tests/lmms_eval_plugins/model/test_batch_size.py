"""batch_size=auto: the largest batch of the longest prompts that fits into memory, and the same answers."""

import pytest
import torch

from lmms_eval_plugins.model import batch_size
from lmms_eval_plugins.model.answer_store import AnswerStore
from lmms_eval_plugins.model.batch_size import PeakOfTensors, free_memory, largest_batch
from tests.support.checkpoints import image, load_lm, requests

DOCS = [{"text": f"what is number {n}?" + " and why?" * n} for n in range(7)]


def trials(base: int, a_row: int, memory: int):
    """A batch of n takes `base + n * a_row` bytes; above `memory` it fails. And the sizes that were tried."""
    tried = []

    def try_batch(rows: int) -> int | None:
        tried.append(rows)
        took = base + rows * a_row
        return took if took <= memory else None

    return try_batch, tried


@pytest.mark.parametrize(
    ("base", "a_row", "memory", "most", "size"),
    [
        (100, 10, 200, 64, 10),
        (100, 10, 200, 4, 4),  # no more than asked for
        (100, 10, 119, 64, 1),  # a second row fails
        (100, 10, 105, 64, 1),  # a single one, too: that is for the run to say
        (0, 1, 10**9, 64, 64),
        (100, 10, 1000, 1, 1),
    ],
)
@pytest.mark.parametrize("may_fail", [True, False])
def test_the_size_is_the_largest_that_fits(base, a_row, memory, most, size, may_fail):
    try_batch, tried = trials(base, a_row, memory)
    assert largest_batch(try_batch, memory, most, may_fail) == size
    if not may_fail:  # where too much memory would end the process, more than two rows are never tried
        assert set(tried) <= {1, 2}


def test_a_size_that_fails_is_lowered_until_it_fits():
    """Memory that is free but in pieces: what was counted does not hold."""
    try_batch, tried = trials(0, 10, 250)
    size = largest_batch(try_batch, 640, 64, may_fail=True)
    assert 13 <= size <= 25
    assert tried[-1] == size
    try_batch, tried = trials(0, 10, 25)
    assert largest_batch(try_batch, 30, 64, may_fail=True) == 2
    assert tried == [1, 2, 3]  # two rows are known to fit


def test_tensors_that_live_at_the_same_time_are_counted_once_and_as_long_as_they_live():
    with PeakOfTensors() as counted:
        a = torch.zeros(1000)
        b = a.view(10, 100)[2:] + 1  # 3200 bytes, and a view of what is counted
        del a, b
        for _ in range(3):
            c = torch.ones(500)  # 2000
            del c
    assert counted.peak == 4000 + 3200


def test_the_free_memory_of_a_cpu_is_that_of_its_container(tmp_path, monkeypatch):
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(batch_size, "CGROUPS", [(limit, used)])
    of_machine = free_memory(torch.device("cpu"))
    assert of_machine > 2**20
    limit.write_text("1048576\n")
    used.write_text("1000000\n")
    assert free_memory(torch.device("cpu")) == 48576
    limit.write_text("max\n")
    assert free_memory(torch.device("cpu")) == pytest.approx(of_machine, rel=0.5)


# -- in a run


def run(lm, **kwargs):
    results = lm.generate_until(requests(lm, DOCS, **kwargs))
    return [result.text for result in results], {row["doc_id"]: row["batch_size"] for row in lm.rows}


def in_memory_of(rows: int, monkeypatch, lm) -> list[list[int]]:
    """As if so many rows fitted into memory; the lengths of the prompts of each batch that is tried."""
    tried, original = [], lm.sizes.try_batch

    def try_batch(batch, kwargs):
        tried.append(batch.inputs["attention_mask"].sum(1).tolist())
        assert original(batch, kwargs) > 0
        return len(tried[-1])

    monkeypatch.setattr(lm.sizes, "try_batch", try_batch)
    monkeypatch.setattr(batch_size, "room_for_a_batch", lambda device: rows)
    return tried


def test_batches_have_the_size_that_fits_and_answers_are_those_of_single_questions(checkpoint, monkeypatch):
    expected, _ = run(load_lm(checkpoint("llama")))
    lm = load_lm(checkpoint("llama"), batch_size="auto")
    tried = in_memory_of(3, monkeypatch, lm)
    answers, sizes = run(lm)
    assert answers == expected
    assert [sizes[doc_id] for doc_id in range(7)] == [1, 3, 3, 3, 3, 3, 3]
    lengths = {row["doc_id"]: row["tokens_in"] for row in lm.rows}
    assert tried == [[lengths[6]], [lengths[6], lengths[5]]]  # the longest
    assert list(lm.batch_sizes.values()) == [3]


def test_the_longest_prompt_is_that_of_most_tokens_not_of_the_longest_text(monkeypatch):
    lm = load_lm(batch_size="auto")
    docs = [{"text": "a long question, but no picture"}, {"text": "?", "images": [image(0)]}]
    tried = in_memory_of(1, monkeypatch, lm)
    lm.generate_until(requests(lm, docs))
    assert tried[0] == [lm.gather_rows()[1]["tokens_in"]]


def test_a_size_may_be_looked_for_in_several_places_and_has_a_bound(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("llama"), batch_size="auto:2", max_batch_size=2)
    tried = in_memory_of(100, monkeypatch, lm)
    _, sizes = run(lm)
    assert sorted(sizes.values()) == [1, 2, 2, 2, 2, 2, 2]  # 7 in two parts: 4 and 3
    assert len(tried) == 2 * 2
    assert tried[0][0] > tried[2][0]


def test_without_a_bound_on_memory_a_cpu_takes_all_that_are_alike(checkpoint):
    lm = load_lm(checkpoint("llama"), batch_size="auto")
    assert set(run(lm)[1].values()) == {7}


def test_a_batch_that_fails_after_all_is_halved(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("llama"), batch_size="auto")
    in_memory_of(7, monkeypatch, lm)
    expected, _ = run(load_lm(checkpoint("llama")))
    generate = lm.answering.generate

    def limited(inputs, kwargs, *others, **settings):
        if len(inputs["input_ids"]) > 2 and "room_for" not in settings:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(inputs, kwargs, *others, **settings)

    monkeypatch.setattr(lm.answering, "generate", limited)
    answers, sizes = run(lm)
    assert answers == expected
    assert max(sizes.values()) <= 2


def test_a_trial_that_fails_says_so_and_leaves_the_model_usable(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("llama"))
    batch = lm.prepare(requests(lm, DOCS[:2]))

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(lm.answering, "generate", fail)
        assert lm.sizes.try_batch(batch, {"max_new_tokens": 4}) is None
    took = [lm.sizes.try_batch(batch, {"max_new_tokens": n, "do_sample": False}) for n in (64, 64_000)]
    lm.generate_until(requests(lm, DOCS[:2]))
    text = lm.model.config
    a_token = 2 * 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    assert took[1] - took[0] >= 2 * 60_000 * a_token  # all of the answer has its room


def test_what_more_rows_take_is_predicted_by_one_and_two():
    lm = load_lm()
    docs = [{"text": "what word is it?", "images": [image(n, 192, 192)]} for n in range(6)]
    made = requests(lm, docs)
    one, two, six = (
        lm.sizes.try_batch(lm.prepare(made[:rows]), {"max_new_tokens": 16, "do_sample": False}) for rows in (1, 2, 6)
    )
    assert six == pytest.approx(one + 5 * (two - one), rel=0.15)
    assert two > 1.5 * one


def test_another_run_takes_the_size_of_the_first_so_that_its_answers_serve(checkpoint, tmp_path, monkeypatch):
    for rows in (3, 5):
        lm = load_lm(checkpoint("llama"), batch_size="auto")
        in_memory_of(rows, monkeypatch, lm)
        lm.answer_store = AnswerStore(tmp_path, {"cell": 1})
        _, sizes = run(lm)
        assert sizes[6] == 3
