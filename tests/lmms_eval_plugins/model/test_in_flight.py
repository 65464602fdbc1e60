"""slots=: requests in flight have the answers that they get one by one, and rows of their own."""

import functools
import time

import pytest
import torch

from kvcompress.inflight.layer import SlotLayer
from lmms_eval_plugins.model import batch_size, in_flight
from lmms_eval_plugins.model.answer_store import AnswerStore
from lmms_eval_plugins.model.batch_size import MOST_SLOTS
from lmms_eval_plugins.model.kept_tokens import KeptSets
from tests.support.checkpoints import image, load_lm, requests, texts
from tests.support.in_flight import OutOfMemory

CELL = {"method": "snapkv", "ratio": 0.5, "window_size": 4}
DOCS = [{"text": "what word is on the red sign?" * (n % 3), "images": [image(n)] * (n % 2)} for n in range(5)]
DOCS[0]["text"] = "hello"


def asked(lm, docs=DOCS, **kwargs):
    """Requests that end after different numbers of tokens."""
    made = requests(lm, docs, **kwargs)
    for number, request in enumerate(made):
        request.args[2].setdefault("max_new_tokens", 1 + 3 * number % 8)
    return made


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Answers and rows, one by one."""
    lm = load_lm(checkpoint("qwen2-vl"), **CELL)
    return lm.generate_until(asked(lm)), lm.gather_rows()


@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (3, 2), (16, 2), ("auto", 0)])
def test_answers_and_what_was_kept_are_those_of_one_by_one(checkpoint, alone, slots, ahead):
    lm = load_lm(checkpoint("qwen2-vl"), slots=slots, look_ahead=ahead, **CELL)
    expected, rows = alone
    assert lm.generate_until(asked(lm)) == expected
    same = ("doc_id", "tokens_in", "tokens_out", "vision_tokens", "kv_held_bytes", "answer", "batch_size", "split")
    for row, other in zip(lm.gather_rows(), rows, strict=True):
        assert [row[name] for name in same] == [other[name] for name in same]
        assert row["realised_ratio"] == pytest.approx(other["realised_ratio"])
        assert row.keys() == other.keys()


@pytest.mark.parametrize("slots", [2, "auto"])
def test_a_rank_without_questions_answers_none(checkpoint, slots):
    assert load_lm(checkpoint("qwen2-vl"), slots=slots).generate_until([]) == []


@pytest.mark.parametrize("more", [{}, {"prefix_cache_gb": 1}])
def test_in_pieces_answers_and_rows_are_the_same_and_only_prompts_of_one_piece_share_a_prefill(checkpoint, alone, more):
    expected, rows = alone
    longest = sorted({row["tokens_in"] for row in rows})[-2]
    lm = load_lm(checkpoint("qwen2-vl"), slots=3, prefill_tokens=longest, prompt_cache_gb=1, **more)
    for is_later in (False, True):
        lm.set_cell(**CELL)
        lm.reset_rows()
        assert lm.generate_until(asked(lm)) == expected
        for row, other in zip(lm.gather_rows(), rows, strict=True):
            assert (row["kv_held_bytes"], row["tokens_in"]) == (other["kv_held_bytes"], other["tokens_in"])
            assert (row["ttft_s"] is None) == bool(row["reused_tokens"])
            assert row["prompt_is_known"] == (is_later and not more and row["tokens_in"] <= longest)


def test_rows_say_how_long_each_waited_and_what_all_slots_held(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"), slots=2, look_ahead=0, **CELL)
    start = time.perf_counter()
    lm.generate_until(asked(lm))
    wall, rows = time.perf_counter() - start, lm.gather_rows()
    waited = [row["waited_s"] for row in rows]
    assert min(waited) < 0.1 * max(waited)
    assert all(row["ttft_s"] > 0 and row["share_s"] >= 0 for row in rows)
    assert [row["tpot_s"] is None for row in rows] == [row["tokens_out"] == 1 for row in rows]
    assert {row["slots"] for row in rows if row["tokens_out"] > 1} == {2}
    long = max(rows, key=lambda row: row["peak_kv_bytes"])
    assert long["peak_kv_bytes"] >= 2 * min(row["kv_bytes_end"] for row in rows if row["tokens_out"] > 1)
    assert max(waited) < wall
    assert 0.5 * max(waited) < sum(row["share_s"] for row in rows) < wall  # preparing is no part of it


@pytest.mark.parametrize(
    ("cell", "gigabytes"),
    [
        ({}, 1),
        (CELL, 0),
        (CELL, 1),
        ({**CELL, "cache_implementation": "static"}, 1),
        ({"method": "adakv", "budget": 20}, 1),
        ({**CELL, "decode_budget": 16}, 1),
    ],
)
def test_cells_share_tower_and_prefill_and_answers_do_not_depend_on_it(checkpoint, cell, gigabytes):
    lm = load_lm(checkpoint("qwen2-vl"), slots=2, prompt_cache_gb=gigabytes)
    fresh = load_lm(checkpoint("qwen2-vl"))
    for each in (lm, fresh):
        each.set_cell(**cell)
    first, second = [], []
    for found in (first, second):
        lm.set_cell(**cell)
        lm.reset_rows()
        found += lm.generate_until(asked(lm))
    assert first == second == fresh.generate_until(asked(fresh))
    rows = lm.gather_rows()
    assert [row["vision_is_known"] for row in rows] == [bool(doc["images"]) for doc in DOCS]
    assert {row["prompt_is_known"] for row in rows} == {gigabytes == 1}
    assert {row["peak_memory_bytes"] is None for row in rows} == {gigabytes == 1}


def test_times_are_those_of_a_run_in_which_each_prefill_runs(checkpoint, monkeypatch):
    lm, slow = load_lm(checkpoint("qwen2-vl"), slots=2), 0.03
    forward, slept = lm.model.forward, []

    @functools.wraps(forward)  # `generate` reads the signature
    def slow_prefill(*args, input_ids, **kwargs):
        if input_ids.shape[1] > 1:
            slept.append(time.sleep(slow))
        return forward(*args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(lm.model, "forward", slow_prefill)
    for known in (False, True):
        lm.set_cell(**CELL)
        lm.reset_rows()
        slept.clear()
        lm.generate_until(asked(lm))
        assert len(slept) == 1 + (0 if known else len(DOCS))  # the warm-up
        rows = sorted(lm.rows, key=lambda row: row["waited_s"])
        assert {row["prompt_is_known"] for row in rows} == {known}
        assert all(row["ttft_s"] > slow for row in rows)
        assert all(row["waited_s"] > slow * place for place, row in enumerate(rows))
        assert sum(row["share_s"] for row in rows) > slow * len(rows)
        longest = max(rows, key=lambda row: row["tokens_out"])  # which waits for others' prefills meanwhile
        assert longest["tpot_s"] * (longest["tokens_out"] - 1) > slow


def test_preparing_other_prompts_and_recording_what_they_keep_is_in_nobodys_time(checkpoint, monkeypatch):
    lm, hours, clock = load_lm(checkpoint("qwen2-vl"), slots=2, look_ahead=0, **CELL), [], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(hours))

    def slowly(function):
        return lambda *given: (hours.append(1), function(*given))[1]

    monkeypatch.setattr(in_flight, "on_device", slowly(in_flight.on_device))
    monkeypatch.setattr(in_flight.Flight, "_record", slowly(in_flight.Flight._record))
    lm.generate_until(asked(lm))
    assert len(hours) == 2 * (1 + len(DOCS))
    for row in lm.gather_rows():
        assert max(row["ttft_s"], row["tpot_s"] or 0, row["waited_s"], row["share_s"]) < 3600


@pytest.mark.parametrize("more", [{"batch_size": 2}, {"slots": 2}])
def test_recording_what_is_kept_is_in_nobodys_share(checkpoint, monkeypatch, more):
    lm, hours, clock, of = load_lm(checkpoint("qwen2-vl"), **more, **CELL), [], time.perf_counter, KeptSets.of
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(hours))
    monkeypatch.setattr(KeptSets, "of", lambda cache: (hours.append(1), of(cache))[1])
    lm.overlays = 2
    lm.generate_until(asked(lm))
    assert hours
    assert max(row["share_s"] for row in lm.gather_rows()) < 3600


def test_stop_strings_special_tokens_and_padding_are_as_ever(checkpoint):
    one, many = load_lm(checkpoint("llama")), load_lm(checkpoint("llama"), slots=2)
    docs = [{"text": "hello"}, {"text": "you"}, {"text": "and you"}]
    (whole, *_) = texts(one.generate_until(requests(one, docs, max_new_tokens=20)))
    one.reset_rows()
    wanted = {"until": [whole[4:6]], "max_new_tokens": 20, "skip_special_tokens": False, "padding": 1}
    assert many.generate_until(requests(many, docs, **wanted)) == one.generate_until(requests(one, docs, **wanted))
    assert [row["doc_id"] for row in many.gather_rows()] == [0, 1]
    assert many.gather_rows()[0]["answer"] == whole.split(whole[4:6])[0]


def test_a_seed_draws_what_it_draws_alone_and_each_repetition_has_the_next(checkpoint):
    sampled = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 12, "seed": 7}
    found = []
    for slots in (None, 1, 3):
        lm = load_lm(checkpoint("llama"), slots=slots)
        found.append(texts(lm.generate_until(requests(lm, [{"text": "a question"}, {"text": "hm"}], **sampled) * 2)))
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][2]


def test_answers_of_an_earlier_run_are_taken_again(checkpoint, tmp_path, monkeypatch):
    lm = load_lm(checkpoint("qwen2-vl"), slots=2, **CELL)
    given, original = [], in_flight.Flight._begin
    monkeypatch.setattr(in_flight.Flight, "_begin", lambda *args: given.append(args) or original(*args))
    lm.answer_store = AnswerStore(tmp_path, {"cell": 1})
    expected = lm.generate_until(asked(lm, DOCS[:3]))
    first, given[:] = lm.gather_rows(), []
    lm.reset_rows()
    assert lm.generate_until(asked(lm, DOCS[:3])) == expected
    assert (lm.gather_rows(), given) == (first, [])
    lm.reset_rows()
    assert lm.generate_until(asked(lm))[:3] == expected  # some from the store, others in flight
    assert len(given) == 2
    assert [row["doc_id"] for row in lm.gather_rows()] == [0, 1, 2, 3, 4]


def test_overlays_are_those_of_one_by_one(checkpoint):
    found = []
    for slots in (None, 2):
        lm = load_lm(checkpoint("qwen2-vl"), slots=slots, **CELL)
        lm.overlays = 2
        lm.generate_until(asked(lm))
        found.append([row.get("survivors") for row in lm.gather_rows()])
    assert found[0] == found[1]
    assert [each is not None for each in found[0]] == [True, True, False, False, False]


def test_an_error_ends_the_run_and_leaves_the_model_usable(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("llama"), slots=2)
    docs = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
    expected = lm.generate_until(requests(lm, docs))
    with monkeypatch.context() as patch:
        patch.setattr(lm.model, "generate", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lm.generate_until(requests(lm, docs))
    with monkeypatch.context() as patch:
        patch.setattr(lm, "_results", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lm.generate_until(requests(lm, docs))
    assert lm.generate_until(requests(lm, docs)) == expected


@pytest.mark.parametrize(("on_oom", "halved"), [("raise", False), ("halve_batch", True)])
def test_where_memory_does_not_suffice_slots_are_halved_or_the_run_ends(checkpoint, monkeypatch, on_oom, halved):
    lm = load_lm(checkpoint("llama"), slots=4, on_oom=on_oom, method="snapkv", ratio=0.5)
    docs = [{"text": f"question {n}"} for n in range(5)]
    expected = lm.generate_until(requests(lm, docs))
    lm.reset_rows()
    forward = lm.model.forward

    def limited(*args, input_ids, **kwargs):
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(lm.model, "forward", limited)
    if not halved:
        with pytest.raises(torch.OutOfMemoryError):
            lm.generate_until(requests(lm, docs))
        return
    assert lm.generate_until(requests(lm, docs)) == expected
    assert {row["on_oom"] for row in lm.rows} == {"halve_batch"}
    assert {row["slots"] for row in lm.rows} == {2}


def test_an_answer_that_is_done_when_memory_ends_and_all_slots_go_is_a_row(checkpoint, monkeypatch):
    evicting = {"method": "streamingllm", "ratio": 0.5, "decode_budget": 4, "decode_interval": 2}
    lm = load_lm(checkpoint("llama"), slots=2, on_oom="halve_batch", **evicting)
    made = requests(lm, [{"text": "question 1"}, {"text": "question 2"}])
    for request, new in zip(made, (4, 8), strict=True):
        request.args[2]["max_new_tokens"] = new
    expected = lm.generate_until(made)
    lm.reset_rows()
    first = lm.model.config.num_hidden_layers + 1  # an eviction of the second as the first is done, and fewer slots
    for name in ("_evict", "resize"):
        monkeypatch.setattr(SlotLayer, name, OutOfMemory(first).failing(getattr(SlotLayer, name)))
    assert lm.generate_until(made) == expected
    assert [row["tokens_out"] for row in lm.gather_rows()] == [4, 8]


def test_auto_takes_what_is_left_beside_one_request(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("qwen2-vl"), slots="auto", look_ahead=0, **CELL)
    made = asked(lm)
    monkeypatch.setattr(lm.sizes, "try_batch", lambda batch, kwargs: 1000)
    for room, slots, kv_bytes in ((2**40, len(DOCS), 2**40 - 1000), (1000, 1, None), (999, 1, None)):
        monkeypatch.setattr(batch_size, "room_for_a_batch", lambda device, room=room: room)
        limits = lm.sizes.limits(made)
        assert (limits.slots, limits.on_oom) == (slots, "halve")
        assert limits.kv_gb == (None if kv_bytes is None else kv_bytes / 2**30)
    monkeypatch.setattr(batch_size, "room_for_a_batch", lambda device: 2**40)
    assert lm.sizes.limits(made * MOST_SLOTS).slots == MOST_SLOTS
    lm.generate_until(made)
    slot = max(row["kv_bytes_end"] for row in lm.rows)
    lm.reset_rows()
    monkeypatch.setattr(batch_size, "room_for_a_batch", lambda device: 1000 + int(2.5 * slot))
    lm.generate_until(made)
    assert max(row["slots"] for row in lm.rows) == 2


def test_what_does_not_go_with_slots_is_refused_in_one_line(checkpoint):
    lm = load_lm(checkpoint("llama"), slots=2)
    with pytest.raises(Exception, match="slots=2 does not go with num_beams=3: it has to be 1"):
        lm.generate_until(requests(lm, [{"text": "hello"}], num_beams=3))
    with pytest.raises(Exception, match="slots=2 does not go with cache_implementation='quantized'"):
        lm.set_cell("snapkv", 0.5, cache_implementation="quantized")
    with pytest.raises(Exception, match="slots=2 works only with tasks of a single round"):
        lm.generate_until_multi_round(requests(lm, [{"text": "hello"}]))
