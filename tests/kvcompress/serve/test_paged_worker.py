"""`kvcompress serve --pages-gb`: text in transformers' continuous batching has the tokens of `generate`, and a request
that its thread cannot bear never reaches it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvcompress.calibration import command as calibration
from kvcompress.errors import KVCompressError
from kvcompress.serve import app, paged_worker
from tests.kvcompress.serve.test_command import RIGHT, refused
from tests.kvcompress.serve.test_serve import CHAT, HELLO, SNAPKV, body, events, generated, metric, question
from tests.support.serving import loaded, served, until

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
KEYDIFF = {"method": "keydiff", "ratio": 0.5, "decode_budget": 30, "decode_interval": 4}
SAID = ("what is written on the red sign", "hello", "the sign " * 20, "read all of it " * 9)


@pytest.fixture(scope="module")
def server():
    return loaded("--pages-gb", "0.004")


@pytest.fixture(scope="module")
def client(server):
    with served(server) as client:
        yield client


def conversation(text: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


@pytest.fixture
def long(monkeypatch):
    """Makes answers go on to their longest: no token ends them."""
    start = paged_worker.PagedWorker.start

    def endless(self):
        self.greedy.update(eos_token_id=-1)
        start(self)

    monkeypatch.setattr(paged_worker.PagedWorker, "start", endless)


def test_answers_are_those_of_generate_and_say_what_was_kept(server, client):
    with ThreadPoolExecutor() as pool:
        asked = [body([{"role": "user", "content": text}], return_token_ids=True) for text in SAID]
        answers = [pool.submit(client.post, CHAT, json=each) for each in asked]
    for text, answer in zip(SAID, answers, strict=True):
        tokens, length, kept = generated(server, conversation(text))
        found = answer.result().json()
        assert found["choices"][0]["token_ids"] == tokens
        usage = found["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["kept_entries"]) == (
            length,
            len(tokens),
            kept,
        )
    assert metric(client, "kv_bytes") == metric(client, "running") == metric(client, "waiting") == 0


def test_evictions_while_decoding_and_shared_prefixes_answer_as_alone(long):
    words = [f"{name}={value}" for name, value in KEYDIFF.items()][2:]
    server = loaded(
        "--pages-gb", "0.004", "--prefix-gb", "0.01", "--prefill-tokens", "8", method=("keydiff", "0.5", *words)
    )
    with served(server) as client:
        for _ in range(2):  # the second time the prefix is known
            asked = body(HELLO, stream=True, return_token_ids=True, max_tokens=40)
            streamed = [each["choices"][0] for each in events(client.post(CHAT, json=asked).iter_lines())]
            expected, _, _ = generated(server, conversation(HELLO[0]["content"]), 40, KEYDIFF, eos_token_id=-1)
            assert streamed[-1]["token_ids"] == expected
            assert len(expected) == 40
            said = "".join(choice["delta"].get("content", "") for choice in streamed)
            assert said == server.prompts.tokenizer.decode(expected, skip_special_tokens=True)
        assert server.worker.session.keywords["prefix_cache"].reused_tokens > 0


def test_an_answer_ends_before_a_stop_string_and_frees_its_pages(long, monkeypatch):
    server, ended = loaded("--pages-gb", "0.004"), []
    with served(server) as client:
        cancel = server.worker._manager.cancel_request
        monkeypatch.setattr(server.worker._manager, "cancel_request", lambda name: (ended.append(name), cancel(name)))
        whole = client.post(CHAT, json=body(max_tokens=60)).json()["choices"][0]["message"]["content"]
        stop = whole[len(whole) // 4 :][:6]
        choice = client.post(CHAT, json=body(max_tokens=60, stop=stop)).json()["choices"][0]
        assert choice["message"]["content"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert {*ended} == {"2"}  # again for tokens that were under way
        until(lambda: server.worker.kv_bytes == 0)


def test_what_pages_cannot_hold_is_status_400_and_the_next_request_is_answered(server, client):
    for asked, said in (
        (body(question(0)[0]), "pages (--pages-gb) hold text only"),
        (body(temperature=0.7), "answers in pages (--pages-gb) are greedy"),
        (body([{"role": "user", "content": "word " * 1500}]), "need more pages than there are"),
    ):
        found = client.post(CHAT, json=asked)
        assert found.status_code == 400
        assert said in found.json()["error"]["message"]
    assert client.post(CHAT, json=body()).status_code == 200


def test_a_client_that_goes_away_frees_its_pages(long, monkeypatch):
    began = threading.Event()
    on_tokens = app.Reply.on_tokens
    monkeypatch.setattr(app.Reply, "on_tokens", lambda self, tokens: began.set() or on_tokens(self, tokens))
    server = loaded("--pages-gb", "0.004")
    with served(server) as client:
        with client.stream("POST", CHAT, json=body(max_tokens=1000, stream=True)):
            assert began.wait(20)
            assert server.worker.running == 1
            assert server.worker.kv_bytes > 0
        until(lambda: (server.worker.running, server.worker.waiting, server.worker.kv_bytes) == (0, 0, 0))
        assert metric(client, "cancelled_requests_total") == 1


def test_a_failed_request_is_status_500_and_an_end_of_transformers_thread_is_not_healthy(monkeypatch):
    server = loaded("--pages-gb", "0.004")
    with served(server) as client:
        monkeypatch.setattr(server.worker._manager.batch_processor.scheduler, "schedule_batch", lambda *given: 1 / 0)
        found = client.post(CHAT, json=body())
        assert found.status_code == 500
        assert "division by zero" in found.json()["error"]["message"]
        until(lambda: client.get("/health").status_code == 503)
        assert client.post(CHAT, json=body()).status_code == 503


def test_a_server_that_ends_gives_its_model_back():
    server = loaded("--pages-gb", "0.004")
    with served(server) as client:
        client.post(CHAT, json=body())
    assert "init_continuous_batching" not in vars(server.prompts.model)
    assert not server.worker._thread.is_alive()


def test_what_does_not_go_with_pages_is_one_line_before_anything_is_loaded(capsys):
    for words, said in (
        ([*RIGHT, "--slots", "4"], "--pages-gb does not go with --slots"),
        ([*RIGHT, "--kv-gb", "1"], "--pages-gb does not go with --kv-gb"),
        (["org/model", "adakv", "0.2"], "head_budget='adaptive' does not go with"),
    ):
        assert said in refused(capsys, *words, "--pages-gb", "1")


@pytest.mark.parametrize(
    ("gigabytes", "said"),
    [
        ("1e-6", "--pages-gb 1e-06 has no room for a page of"),
        ("1e-3", "a prompt of .* tokens and 1024 of its answer need more pages than there are"),
        ("1e9", "MemoryError"),
    ],
)
def test_pages_that_cannot_be_are_refused_before_anything_is_served(gigabytes, said):
    with pytest.raises(KVCompressError, match=said):
        loaded("--pages-gb", gigabytes)


def test_what_continuous_batching_would_do_otherwise_is_refused(monkeypatch):
    load = calibration.load

    def penalised(*given):
        model, tokenizer = load(*given)
        model.generation_config.repetition_penalty = 1.05
        return model, tokenizer

    monkeypatch.setattr(calibration, "load", penalised)
    with pytest.raises(KVCompressError, match="cannot heed the model's repetition_penalty"):
        loaded("--pages-gb", "0.004")


def test_an_error_of_ours_is_that_of_all_requests(monkeypatch, capsys):
    server = loaded("--pages-gb", "0.004")
    with served(server) as client:
        monkeypatch.setattr(app.Reply, "on_tokens", lambda self, tokens: 1 / 0)
        assert client.post(CHAT, json=body()).status_code == 500
        assert client.get("/health").status_code == 503
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_none_of_200_texts_at_a_time_is_lost(server, client):
    texts = [f"{SAID[index % 4]} {index % 20}" for index in range(200)]
    expected = {text: generated(server, conversation(text), method=SNAPKV)[0] for text in set(texts)}

    def ask(text: str) -> list[int]:
        asked = body([{"role": "user", "content": text}], return_token_ids=True)
        response = httpx.post(f"{client.base_url}{CHAT}", json=asked, timeout=300)
        assert response.status_code == 200
        return response.json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(200) as pool:
        assert list(pool.map(ask, texts)) == [expected[text] for text in texts]
    assert (server.worker.running, server.worker.waiting, server.worker.kv_bytes) == (0, 0, 0)
