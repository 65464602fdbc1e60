"""Requests to a judge: which were not answered in the end."""

import httpx
import pytest

from lmms_eval_plugins.cells.scorer_failures import JudgeWatch, scorers_watched

URL = "http://judge/"


@pytest.fixture
def watch():
    watch = JudgeWatch()
    watch.is_on = True
    return watch


def test_a_request_that_is_answered_at_the_second_try_counts_as_answered(watch):
    watch.note("POST", URL, b"a", 500, "")
    watch.note("POST", URL, b"b", None, "ReadTimeout")
    assert sorted(watch.unanswered.values()) == [f"{URL}: HTTP 500", f"{URL}: ReadTimeout"]
    watch.note("POST", URL, "a", 200, "")
    assert list(watch.unanswered.values()) == [f"{URL}: ReadTimeout"]


def test_only_what_is_posted_while_answers_are_scored_counts(watch):
    watch.note("GET", URL, None, 404, "")
    watch.is_on = False
    watch.note("POST", URL, b"a", 404, "")
    assert watch.unanswered == {}


def test_two_requests_of_httpx_to_one_address_are_told_apart_by_what_they_say():
    def answered(request):
        return httpx.Response(200 if b"good" in request.content else 500)

    with scorers_watched() as watch, httpx.Client(transport=httpx.MockTransport(answered)) as client:
        watch.is_on = True
        client.post(URL, content=b"bad")
        client.post(URL, content=b"good")
        assert list(watch.unanswered.values()) == [f"{URL}: HTTP 500"]
