"""What is computed once for all methods of a grid, and the thread that prepares batches."""

import functools
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvcompress import KVCompressError, measure
from kvcompress.hooks import shared_prompt
from lmms_eval_plugins.model import answering, stopwatch, vision_tower
from lmms_eval_plugins.model.arguments import CACHE_GB, LOOK_AHEAD, ModelArguments
from lmms_eval_plugins.model.batches import Batch, BatchStore, ahead
from lmms_eval_plugins.model.lm import KVCompressLM
from lmms_eval_plugins.model.vision_tower import Encoded
from tests.support.checkpoints import answer, image, load_lm, requests, write_video
from tests.support.clock import synchronised_reads

CELLS = ({}, {"method": "snapkv", "ratio": 0.5, "window_size": 4}, {"method": "streamingllm", "ratio": 0.3})


@pytest.fixture(scope="module")
def docs(video) -> list[dict]:
    return [
        {"text": "what word is on the red sign?", "images": [image(0)]},
        {"text": "hello"},
        {"text": "which of the two?", "images": [image(1), image(2, 64, 64)]},
        {"text": "what happens in the clip?", "videos": [video]},
    ]


def count_calls(monkeypatch, lm: KVCompressLM) -> list[str]:
    """The calls of the base model's feature functions, and of the processor, from now on."""
    calls = []
    base, names = type(lm.model.base_model), ("get_image_features", "get_video_features")
    for name in [name for name in names if hasattr(base, name)]:
        original = getattr(base, name)

        @functools.wraps(original)
        def counted(self, *args, _original=original, _name=name, **kwargs):
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(base, name, counted)
    processed = lm.chat.inputs
    monkeypatch.setattr(lm.chat, "inputs", lambda prompts: calls.append("processor") or processed(prompts))
    return calls


def grid(lm: KVCompressLM, docs: list[dict], cells=CELLS, **kwargs) -> tuple[list[list[str]], list[list[dict]]]:
    """The answers and the rows of each cell."""
    answers, rows = zip(*(answer(lm, cell, docs, **kwargs) for cell in cells), strict=True)
    return list(answers), list(rows)


# -- the same answers, with less work


def test_beam_search_leaves_what_is_kept_as_it_was(checkpoint, docs):
    """transformers writes the repeated features back into the tower's output."""
    lm, images = load_lm(checkpoint("qwen2-vl"), batch_size=3), docs[:3]
    cells = [{"method": "streamingllm", "ratio": 0.5}] * 3
    answers, _ = grid(lm, images, cells, num_beams=2)
    assert answers[0] == answers[1] == answers[2]


def test_tower_and_processor_run_once_for_all_cells(checkpoint, docs, monkeypatch):
    lm = load_lm(checkpoint("llava-onevision"), batch_size=2)
    calls = count_calls(monkeypatch, lm)
    lm.set_cell()
    lm.generate_until(requests(lm, docs, max_new_tokens=2))
    first = list(calls)
    assert first.count("processor") == 2
    assert {"get_image_features", "get_video_features"} <= set(first)
    lm.set_cell("snapkv", 0.5)
    lm.generate_until(requests(lm, docs, max_new_tokens=2))
    assert calls == first


def test_what_an_overlay_shows_is_found_once_for_all_cells(checkpoint, monkeypatch):
    folder = checkpoint("llava-onevision")
    docs = [{"text": "what?", "images": [image(0)]}, {"text": "which word is on it?", "images": [image(1, 64, 32)]}]
    lm = load_lm(folder, batch_size=2)
    calls = count_calls(monkeypatch, lm)
    lm.overlays = 2
    grid(lm, docs, CELLS[:1])
    first = list(calls)
    assert first.count("processor") == 1 + len(docs)
    _, (rows,) = grid(lm, docs, CELLS[1:2])
    assert calls == first
    fresh = load_lm(folder, batch_size=2, vision_cache_gb=0)
    fresh.overlays = 2
    _, (expected,) = grid(fresh, docs, CELLS[1:2])
    assert [row["survivors"] for row in rows] == [row["survivors"] for row in expected]
    assert rows[0]["survivors"]["images"][0]["layout"] != rows[1]["survivors"]["images"][0]["layout"]


def test_a_method_that_watches_the_tower_runs_it(checkpoint, monkeypatch):
    lm, docs = load_lm(checkpoint("llava-onevision")), [{"text": "what?", "images": [image(n)]} for n in range(2)]
    expected, _ = grid(
        load_lm(checkpoint("llava-onevision"), vision_cache_gb=0), docs, [{"method": "visionzip", "ratio": 0.5}]
    )
    grid(lm, docs, [{}])
    calls = count_calls(monkeypatch, lm)
    answers, (rows,) = grid(lm, docs, [{"method": "visionzip", "ratio": 0.5}])
    assert calls.count("get_image_features") == 1 + len(docs)
    assert [row["vision_is_known"] for row in rows] == [False, False]
    assert answers == expected


def test_a_picture_is_known_by_what_it_shows(small_lm):
    lm = small_lm
    one, other = {"text": "what word?", "images": [image(1)]}, {"text": "what word?", "images": [image(2)]}
    lm.batches.begin([])
    known = [
        grid(lm, [doc], [{}])[1][0][0]["vision_is_known"]
        for doc in (one, other, {**one, "text": "what number?"}, one, other)
    ]
    assert known == [False, False, True, True, True]


@pytest.fixture(scope="module")
def small_lm(checkpoint):
    return load_lm(checkpoint("qwen2-vl"))


def test_a_replaced_video_is_read_again(tmp_path, checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"))
    path = write_video(tmp_path / "a.mp4", frames=12)
    request = requests(lm, [{"text": "?", "videos": [path]}])
    before = lm.prepare(request).key
    assert lm.prepare(request).key == before
    write_video(tmp_path / "a.mp4", frames=8)
    assert lm.prepare(request).key != before


# -- times and memory are those of a generation in which the tower runs


def test_time_to_first_token_holds_the_towers_seconds_where_it_did_not_run(small_lm, monkeypatch):
    lm, docs = small_lm, [{"text": "what word is it?", "images": [image(7, 192, 192)]}]
    lm.batches.begin(["other"])
    base = type(lm.model.base_model)
    original = base.get_image_features

    ran = []

    @functools.wraps(original)
    def slow(self, *args, **kwargs):
        ran.append(self)
        time.sleep(0.1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(base, "get_image_features", slow)
    grid(lm, docs, [{}])
    lm.answering.is_warm, before, ran_before = True, lm.compression, len(ran)
    lm.generate_until(requests(lm, docs))
    assert len(ran) == ran_before > 0  # it did not run
    assert lm.compression is before
    (row, known) = lm.rows
    assert (row["vision_is_known"], known["vision_is_known"]) == (False, True)
    assert known["vision_s"] == row["vision_s"] > 0.1
    assert known["ttft_s"] > known["vision_s"]


def test_peak_memory_is_that_of_the_tower_where_it_would_be_higher(small_lm, monkeypatch):
    lm, docs = small_lm, [{"text": "what word?", "images": [image(8)]}]
    grid(lm, docs, [{}])
    ((call, found),) = lm.batches.encoded(lm.prepare(requests(lm, docs))).items()
    high = Encoded(found.output, found.device, found.seconds, peak_memory=10**15)
    monkeypatch.setattr(lm.batches, "encoded", lambda batch: {call: high})
    _, ((row,),) = grid(lm, docs, [{}])
    assert row["peak_memory_bytes"] == 10**15


# -- a prefill for all cells


def count_passes(monkeypatch, lm: KVCompressLM) -> list[int]:
    """Columns of the forward passes through the text model, from now on."""
    columns, decoder = [], type(lm.model.base_model.language_model)
    forward = decoder.forward

    @functools.wraps(forward)
    def counted(self, *args, **kwargs):
        columns.append(kwargs["inputs_embeds"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(decoder, "forward", counted)
    return columns


def test_a_prompt_passes_once_for_all_cells_but_for_the_first_batch_of_each(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("qwen2-vl"), batch_size=2)
    docs = [{"text": "what word?", "images": [image(n)]} for n in range(6)]
    columns = count_passes(monkeypatch, lm)
    passes = []
    for cell in CELLS:
        before = len(columns)
        grid(lm, docs, [cell])
        passes.append(sum(each > 1 for each in columns[before:]))
    warm_up, first, others = 1, 1, 2  # the warm-up's is kept once another cell has run the model warm
    assert passes == [warm_up + first + others, warm_up + first, first]


def test_single_questions_share_no_pass_unless_asked_to(checkpoint):
    docs = [{"text": "what word?", "images": [image(n)]} for n in range(3)]
    for arguments, shared in (({}, [False] * 3), ({"prompt_cache_gb": 1}, [False, True, True])):
        _, rows = grid(load_lm(checkpoint("qwen2-vl"), batch_size=1, **arguments), docs, CELLS[:2])
        assert [row["prompt_is_known"] for row in rows[0]] == [False] * 3
        assert [row["prompt_is_known"] for row in rows[1]] == shared


def test_time_to_first_token_holds_the_seconds_of_a_pass_that_did_not_run(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("qwen2-vl"), batch_size=1, prompt_cache_gb=1)
    decoder = type(lm.model.base_model.language_model)
    forward = decoder.forward

    @functools.wraps(forward)
    def slow(self, *args, **kwargs):
        time.sleep(0.2 if kwargs["inputs_embeds"].shape[1] > 1 else 0)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(decoder, "forward", slow)
    docs = [{"text": "what word?", "images": [image(n)]} for n in range(2)]
    _, (first, second) = grid(lm, docs, CELLS[:2])
    assert second[1]["prompt_is_known"]
    assert second[1]["ttft_s"] == pytest.approx(first[1]["ttft_s"], abs=0.15)
    assert second[1]["ttft_s"] > 0.2
    # Things lie in memory that do not where each pass just runs: only the first batch says what its peak was.
    for rows in (first, second):
        assert rows[0]["peak_memory_bytes"] > 0
        assert rows[1]["peak_memory_bytes"] is None


# -- the store


def batch_of(key: bytes, size: int) -> Batch:
    return Batch(key, {"pixels": torch.zeros(size, dtype=torch.uint8)})


def encoded_of(size: int) -> dict:
    tensor = torch.zeros(size, dtype=torch.uint8)
    return {("image", 0): Encoded([tensor], tensor.device, 1.0, 0)}


def test_the_store_never_holds_more_than_its_budget_and_keeps_what_came_first():
    store, batches = BatchStore(100), [batch_of(b"a", 60), batch_of(b"b", 20), batch_of(b"c", 5)]
    for batch, size in zip(batches, (30, 0, 50), strict=True):
        store.keep_encoded(batch, encoded_of(size))
        store.keep(batch)  # the second does not fit any more
    assert [store.get(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert store.encoded(batches[0])
    assert not store.encoded(batches[2])  # 50 do not fit
    assert store.nbytes == 95
    store.keep_encoded(batches[0], encoded_of(30))  # as in the second cell
    store.keep(batches[0])
    assert store.nbytes == 95


def test_questions_about_one_picture_have_its_features_once():
    store = BatchStore(100)
    one, other = (replace(batch_of(key, 10), shows=[b"picture"]) for key in (b"a", b"b"))
    store.keep_encoded(one, encoded_of(30))
    assert store.encoded(other) == store.encoded(one) != {}
    store.keep_encoded(other, encoded_of(30))
    assert store.nbytes == 30
    assert store.encoded(batch_of(b"c", 10)) == {}


def test_features_that_fill_the_store_exactly_are_kept():
    store, batch = BatchStore(30), batch_of(b"a", 0)
    store.keep_encoded(batch, encoded_of(30))
    assert store.encoded(batch)
    assert store.nbytes == 30


def test_prompt_passes_have_a_budget_of_their_own():
    store = BatchStore(100, prompt_budget=50)
    for key, size in ((b"a", 30), (b"b", 30), (b"c", 20)):
        store.keep(batch_of(key, 1), SimpleNamespace(nbytes=size))
    assert [store.get(key).prompt_pass is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert (store.nbytes, store.prompt_room) == (53, 0)
    store.keep(store.get(b"a"), SimpleNamespace(nbytes=30))  # as in the second cell
    assert store.nbytes == 53
    store.begin(["another"])
    assert (store.nbytes, store.prompt_room) == (0, 50)


def test_a_budget_of_zero_keeps_nothing():
    store = BatchStore(0)
    store.keep(batch_of(b"a", 1))
    store.keep_encoded(batch_of(b"a", 1), encoded_of(1))
    assert store.get(b"a") is None
    assert store.nbytes == 0


def test_another_task_forgets_the_batches():
    store = BatchStore(100)
    store.begin(["a", "a"])
    store.keep(batch_of(b"a", 60))
    store.begin(["a"])
    assert store.get(b"a") is not None
    store.begin(["b"])
    assert (store.get(b"a"), store.nbytes) == (None, 0)


def test_a_model_that_answers_once_keeps_nothing():
    """As under lmms-eval's own command: no other cell can follow."""
    lm = load_lm()
    lm.generate_until(requests(lm, [{"text": "what?", "images": [image(0)]}]))
    assert lm.batches.nbytes == 0


def test_every_time_is_taken_when_the_device_is_done(checkpoint, docs):
    """Of the tower, the prefill, the tokens and the whole; where they run and where they were kept."""
    lm = load_lm(checkpoint("qwen2-vl"), batch_size=2, prompt_cache_gb=1, max_new_tokens=3)
    with synchronised_reads(measure, vision_tower, answering) as reads:
        grid(lm, docs)
    places = {read.rpartition(":")[0] for read in reads}
    modules = (measure, shared_prompt, vision_tower, stopwatch)
    assert places == {module.__name__ for module in modules}


# -- the thread that prepares batches


@pytest.fixture(scope="module")
def lm_of_tiny():
    return load_lm()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_results_come_in_order_and_errors_where_they_belong(depth):
    with ahead(lambda item: 10 // item, [5, 2, 0, 1], depth) as results:
        assert next(results) == 2
        assert next(results) == 5
        with pytest.raises(ZeroDivisionError):
            next(results)


def test_no_more_than_depth_are_prepared_ahead():
    begun = []
    with ahead(lambda item: begun.append(item) or item, range(100), 2) as results:
        assert next(results) == 0
        time.sleep(0.1)
        assert begun == [0, 1, 2]
        assert list(results) == list(range(1, 100))


@pytest.mark.parametrize(
    ("size", "given", "ahead", "gigabytes"),
    [
        ({"batch_size": 1}, None, 0, 0.0),
        ({"batch_size": 2}, None, LOOK_AHEAD, CACHE_GB),
        ({"slots": 2}, None, LOOK_AHEAD, CACHE_GB),
        ({"batch_size": 1}, 3, 3, 3),
        ({"batch_size": 2}, 0, 0, 0),
        ({"slots": 2}, 0, 0, 0),
    ],
)
def test_one_question_at_a_time_is_measured_alone_unless_asked_otherwise(size, given, ahead, gigabytes):
    args = ModelArguments(pretrained="m", **size, look_ahead=given, prompt_cache_gb=given)
    assert args.batches_ahead == ahead
    assert args.gb_for_prompts == gigabytes


def test_leaving_waits_for_the_call_under_way_and_begins_no_other():
    begun = []

    def slow(item):
        begun.append(item)
        time.sleep(0.1)

    def interrupted():
        with ahead(slow, range(100), 3) as results:
            next(results)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(begun) <= 2
    assert not any(thread.name.startswith("look-ahead") for thread in threading.enumerate())


def test_a_bad_question_ends_the_run_in_the_main_thread(lm_of_tiny):
    lm = lm_of_tiny
    docs = [{"text": "what?" * (4 - n), "images": [image(n) if n < 2 else 7]} for n in range(3)]
    lm.args = lm.args.model_copy(update={"look_ahead": 2})
    try:
        with pytest.raises(KVCompressError, match="PIL image or a file name"):
            lm.generate_until(requests(lm, docs))
        assert [row["doc_id"] for row in lm.rows[-2:]] == [0, 1]  # those before it were answered
    finally:
        lm.args = lm.args.model_copy(update={"look_ahead": None})
    assert not any(thread.name.startswith("look-ahead") for thread in threading.enumerate())
