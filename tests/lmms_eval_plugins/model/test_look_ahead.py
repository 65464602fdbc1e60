"""The thread that prepares batches while the model answers."""

import threading
import time

import pytest

from kvcompress import KVCompressError
from lmms_eval_plugins.model.arguments import CACHE_GB, LOOK_AHEAD, ModelArguments
from lmms_eval_plugins.model.look_ahead import ahead
from tests.support.checkpoints import image, load_lm, requests


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
