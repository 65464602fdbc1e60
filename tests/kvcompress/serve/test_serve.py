"""`kvcompress serve`: answers over HTTP are those of `generate`, and nobody else's trouble reaches a request."""

import base64
import io
import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from starlette.exceptions import HTTPException
from transformers import AutoModelForImageTextToText

import kvcompress
from kvcompress.hooks.session import Session
from kvcompress.inflight.loop import InFlight
from kvcompress.serve import app, chat
from kvcompress.serve.command import LOOPBACK
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
from lmms_eval_plugins.tiny_vlm.dataset import HEADLINE, read_examples
from tests.support.serving import loaded, served, until

CHAT = "/v1/chat/completions"
SNAPKV = {"method": "snapkv", "ratio": 0.2, "window_size": 8}
HELLO = [{"role": "user", "content": "what is written on the red sign"}]


@pytest.fixture(scope="module")
def server():
    return loaded("--slots", "4")


@pytest.fixture(scope="module")
def client(server):
    with served(server) as client:
        yield client


@pytest.fixture
def alone():
    """A server with one slot that goes on only when its gate is open, and a client."""
    server = loaded("--slots", "1", "--queue", "2", "--max-tokens", "32")
    with served(server) as client:
        yield server, client


@pytest.fixture
def gate(monkeypatch):
    """Holds every answer at its first token until it is set; `gate.reached` says that one is held."""
    opened, on_tokens = threading.Event(), app.Reply.on_tokens
    opened.reached = threading.Event()

    def held(self, tokens):
        opened.reached.set()
        assert opened.wait(20)
        return on_tokens(self, tokens)

    monkeypatch.setattr(app.Reply, "on_tokens", held)
    yield opened
    opened.set()


@pytest.fixture
def long(monkeypatch):
    """Makes answers go on to their longest; returns the option of `generate`."""
    options = {"min_new_tokens": 16}
    monkeypatch.setattr(chat.Asked, "options", lambda self: {"do_sample": False, **options})
    return options


@cache
def own_model():
    """The model that is served, once more: one that is served is compressed already."""
    return AutoModelForImageTextToText.from_pretrained(TINY_CHECKPOINT).eval()


@cache
def examples():
    return read_examples(HEADLINE)


def url_of(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def question(index: int) -> tuple[list[dict], list[dict]]:
    """Return the messages of the headline's question, or without its picture if odd: for the server, and for a chat
    template."""
    example = examples()[index]
    text = {"type": "text", "text": example.question.text}
    if index % 2:
        return [{"role": "user", "content": text["text"]}], [{"role": "user", "content": [text]}]
    asked = [{"type": "image_url", "image_url": {"url": url_of(example.pixels)}}, text]
    shown = [{"type": "image", "image": Image.fromarray(example.pixels)}, text]
    return [{"role": "user", "content": asked}], [{"role": "user", "content": shown}]


def generated(server, conversation, max_new_tokens=16, method=SNAPKV, **options) -> tuple[list[int], int, int]:
    """Return the tokens that `generate` gives under the server's method, the tokens of the prompt, and the entries
    that it keeps."""
    inputs = server.prompts.processor.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    length, model = inputs["input_ids"].shape[1], own_model()
    with kvcompress.compress(model, max_new_tokens=max_new_tokens + 1, **method) as session:
        output = model.generate(**inputs, **{"do_sample": False, "max_new_tokens": max_new_tokens, **options})
        kept = np.mean([ratios[0] * length for ratios in session.cache.realised_ratios()])
    return output[0, length:].tolist(), length, round(kept)


def body(messages=HELLO, **more) -> dict:
    return {"model": "tiny", "messages": messages, "max_tokens": 16, **more}


def events(lines) -> list[dict]:
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def metric(client, name: str) -> float:
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    return float(lines.get(f"kvcompress_{name}", 0))


@pytest.mark.parametrize("index", [0, 1])
def test_an_answer_is_that_of_generate_and_says_what_was_kept(server, client, index):
    asked, shown = question(index)
    tokens, length, kept = generated(server, shown)
    found = client.post(CHAT, json=body(asked, return_token_ids=True)).json()
    (choice,) = found["choices"]
    assert choice["token_ids"] == tokens
    assert choice["message"]["content"] == server.prompts.tokenizer.decode(tokens, skip_special_tokens=True)
    assert choice["finish_reason"] == "stop"
    assert found["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": len(tokens),
        "total_tokens": length + len(tokens),
        "kept_entries": kept,
    }
    assert 0 < kept < 0.3 * length


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ({"method": "adakv", "ratio": 0.3, "decode_budget": 40}, ["--kv-gb", "0.1", "--prefill-tokens", "64"]),
        ({"method": "kvzip", "ratio": 0.5}, ["--prefix-gb", "0.1"]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"method": "fastv", "ratio": 0.5}, []),
                ({"method": "streamingllm", "ratio": 0.1, "cache_implementation": "static"}, ["--slots", "2"]),
                ({"method": "full", "ratio": 1.0}, ["--prefix-gb", "0.1", "--prefill-tokens", "64"]),
            )
        ),
    ],
)
def test_other_methods_and_flags_answer_as_alone(method, flags):
    name, ratio, *options = method.values()
    words = [f"{option}={value}" for option, value in zip([*method][2:], options, strict=True)]
    server = loaded(*flags, method=(name, str(ratio), *words))
    with served(server) as client, ThreadPoolExecutor() as pool:
        asked = {index: body(question(index)[0], return_token_ids=True) for index in range(4)}
        answers = {index: pool.submit(client.post, CHAT, json=each) for index, each in asked.items()}
    for index, answer in answers.items():
        found = answer.result().json()
        tokens, _, kept = generated(server, question(index)[1], method=method)
        assert (found["choices"][0]["token_ids"], found["usage"]["kept_entries"]) == (tokens, kept)


def test_an_option_that_not_every_prompt_can_have_is_a_matter_of_each_prompt():
    with served(loaded(method=("snapkv", "0.2", "window_size=8", "scope=context"))) as client:
        shown, unseen = (client.post(CHAT, json=body(question(index)[0])) for index in (0, 1))
    assert shown.status_code == 200
    assert unseen.status_code == 400
    assert "no image or video token that ends the context" in unseen.json()["error"]["message"]


def test_openais_client_streams_the_same_text(server, client):
    asked, shown = question(0)
    tokens, length, _ = generated(server, shown)
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as theirs:
        assert [model.id for model in theirs.models.list()] == ["tiny"]
        stream = theirs.chat.completions.create(**body(asked), stream=True, stream_options={"include_usage": True})
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == server.prompts.tokenizer.decode(
        tokens, skip_special_tokens=True
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks) > 3
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (length, len(tokens))


def test_a_field_that_is_null_is_not_given(client):
    nulls = dict.fromkeys(["tools", "logit_bias", "top_logprobs", "temperature", "return_token_ids"])
    given = client.post(CHAT, json=body([{**HELLO[0], "name": None}], **nulls))
    assert given.json()["choices"] == client.post(CHAT, json=body()).json()["choices"]


def test_a_field_that_asks_for_what_is_done_anyway_is_accepted(client):
    same = {"n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "store": False}
    system = [{"role": "system", "content": "be short"}, *HELLO]
    developer = [{"role": "developer", "content": "be short"}, *HELLO]
    given = client.post(CHAT, json=body(developer, **same))
    assert given.json()["choices"] == client.post(CHAT, json=body(system)).json()["choices"]


def test_an_answer_ends_at_its_length(client):
    cut = client.post(CHAT, json=body(question(0)[0], max_completion_tokens=1)).json()
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 1)


def test_an_answer_ends_before_a_stop_string(server, client, long):
    tokens, *_ = generated(server, question(0)[1], **long)
    text = server.prompts.tokenizer.decode(tokens, skip_special_tokens=True)
    stop = text[2:4]
    for stream in (False, True):
        response = client.post(CHAT, json=body(question(0)[0], stop=stop, stream=stream))
        choices = [each["choices"][0] for each in (events(response.iter_lines()) if stream else [response.json()])]
        given = "".join(choice.get("delta", choice.get("message")).get("content", "") for choice in choices)
        assert (given, choices[-1]["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_sampling_with_a_seed_is_generates(server, client):
    options = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "top_k": 0}
    asked = {"temperature": 1.5, "top_p": 0.95, "return_token_ids": True}
    found = set()
    for seed in range(3):
        torch.manual_seed(seed)
        tokens, *_ = generated(server, question(1)[1], **options)
        answer = client.post(CHAT, json=body(question(1)[0], seed=seed, **asked)).json()
        assert answer["choices"][0]["token_ids"] == tokens
        found.add(tuple(tokens))
    assert len(found) > 1


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 9e-6])
def test_a_temperature_next_to_none_is_greedy(client, temperature):
    asked = body(question(1)[0], return_token_ids=True)
    answer = client.post(CHAT, json={**asked, "temperature": temperature})
    assert answer.json()["choices"] == client.post(CHAT, json=asked).json()["choices"]


PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WRONG = {
    "model: Field required": {"model": None},
    "messages: Field required": {"messages": None},
    "messages.0.content: Field required": {"messages": [{"role": "user", "content": None}]},
    "List should have at least 1 item": {"messages": []},
    "messages.0.role: Input should be 'system', 'user' or 'assistant'": {"messages": [{"role": "x", "content": "x"}]},
    "'tools' is not supported": {"tools": []},
    "max_tokens: Input should be greater than or equal to 1": {"max_tokens": 0},
    "max_tokens: Input should be a valid integer": {"max_tokens": "4"},
    "max_tokens: 2000 exceeds this server's 1024": {"max_tokens": 2000},
    "exceed 8192": {"messages": [{"role": "user", "content": "red " * 9000}]},
    "temperature: Input should be less than or equal to 2": {"temperature": 3},
    "n: Input should be 1": {"n": 2},
    "top_p needs a temperature": {"top_p": 0.5},
    "stream_options needs stream": {"stream_options": {"include_usage": True}},
    "response_format.type: Input should be 'text'": {"response_format": {"type": "json_object"}},
    "this server fetches nothing": {
        "messages": [{"role": "user", "content": [{**PIXEL, "image_url": {"url": "http://127.0.0.1/x.png"}}]}]
    },
    "an image cannot be read: Pillow does not know its format": {"messages": [{"role": "user", "content": [PIXEL]}]},
    "messages.0.content.0: Input tag 'audio'": {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_request_is_one_line_with_status_400(client, said):
    asked = {name: value for name, value in {**body(), **WRONG[said]}.items() if value is not None}
    response = client.post(CHAT, json=asked)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert said in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("name", ["temperature", "top_p", "frequency_penalty"])
def test_what_is_not_a_number_is_none(client, name):
    asked = json.dumps({**body(), "temperature": 1, name: float("nan")})
    response = client.post(CHAT, content=asked, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert f"{name}: Input should be a finite number" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [0] * 1000},
        {"messages": [{"role": "user", "content": [0] * 1000}]},
        {"stop": [0] * 1000},
        {"metadata": dict.fromkeys(map(str, range(1000)), 0)},
        dict.fromkeys(map(str, range(1000)), 0),
    ],
)
def test_of_a_thousand_mistakes_few_are_looked_at(wrong):
    with pytest.raises(HTTPException) as refused:
        chat.Asked.of(json.dumps({**body(n=2), **wrong}).encode())
    assert refused.value.status_code == 400
    assert refused.value.__context__.error_count() <= 2


@pytest.mark.parametrize(
    ("given", "status"), [("Bearer secret", 200), ("bearer  secret", 200), ("Bearer other", 401), ("Basic secret", 401)]
)
def test_the_key_counts_however_its_scheme_is_written(server, client, monkeypatch, given, status):
    monkeypatch.setattr(server, "api_key", "secret")
    assert client.get("/v1/models", headers={"Authorization": given}).status_code == status


@pytest.mark.parametrize(
    ("name", "status"), [("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("evil.example", 403)]
)
def test_a_page_whose_name_was_made_to_mean_this_machine_is_refused(server, client, monkeypatch, name, status):
    monkeypatch.setattr(server, "hosts", LOOPBACK)
    answer = client.get("/v1/models", headers={"Host": name})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["message"].startswith("this server has no name 'evil.example', only")


@pytest.mark.parametrize(("small", "most"), [(0, 100), (100, 200)])
def test_images_that_would_fill_the_memory_are_refused(client, monkeypatch, small, most):
    monkeypatch.setattr(chat, "SMALL", small)
    monkeypatch.setattr(chat, "MOST_PIXELS", most)
    image = {"type": "image_url", "image_url": {"url": url_of(np.zeros((5, 10, 3), np.uint8))}}
    for images, status in ((1, 200), (2, 200), (3, 400)):
        content = [*[image] * images, {"type": "text", "text": "what is written"}]
        response = client.post(CHAT, json=body([{"role": "user", "content": content}]))
        assert response.status_code == status
    assert response.json()["error"]["message"].startswith(f"the images have more than {most} pixels")


@pytest.mark.parametrize("error", [RuntimeError, EOFError, struct.error, OSError])
def test_a_picture_that_its_decoder_refuses_in_its_own_way_is_status_400(client, monkeypatch, error):
    asked = body(question(0)[0])

    def refuse(self, mode):
        raise error("broken")

    monkeypatch.setattr(Image.Image, "convert", refuse)
    response = client.post(CHAT, json=asked)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("an image cannot be read: ")


def test_other_wrong_calls_have_statuses_of_their_own(client, monkeypatch):
    def status(method, path, **more):
        response = client.request(method, path, **more)
        assert response.json()["error"]["code"] == response.status_code
        return response.status_code

    assert status("POST", CHAT, json=body(model="other")) == 404
    assert status("GET", "/v1/nothing") == 404
    assert status("GET", CHAT) == 405
    assert status("POST", CHAT, content=json.dumps(body())) == 415
    assert status("POST", CHAT, content="{", headers={"content-type": "application/json"}) == 400
    monkeypatch.setattr(app, "LARGEST_BODY", 100)
    assert status("POST", CHAT, json=body([{"role": "user", "content": "red " * 100}])) == 413


def test_a_key_is_asked_for_where_there_is_one(server, client, monkeypatch):
    monkeypatch.setattr(server, "api_key", "geheim-ß")
    for key in (None, "Bearer geheim", "geheim-ß", "Bearer", "Basic geheim-ß"):
        headers = {} if key is None else {"Authorization": key.encode()}
        for response in (client.get("/v1/models", headers=headers), client.post(CHAT, json=body(), headers=headers)):
            assert response.status_code == 401
            assert "geheim" not in response.text
    right = {"Authorization": "Bearer geheim-ß".encode()}
    assert client.get("/v1/models", headers=right).status_code == 200
    assert client.post(CHAT, json=body(), headers=right).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_full_queue_is_status_429_and_those_in_it_are_answered(alone, gate):
    server, client = alone
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(client.post, CHAT, json=body()) for _ in range(2)]
        until(lambda: gate.reached.is_set() and server.worker.waiting == 1)
        refused = client.post(CHAT, json=body())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["message"] == "2 requests are unanswered: try again later"
        gate.set()
        assert [each.result().status_code for each in asked] == [200, 200]
    assert client.post(CHAT, json=body()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(alone, gate, stream):
    server, client = alone
    address = client.base_url.host, client.base_url.port
    content = json.dumps(body(stream=stream))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )

    def connect():
        connection = socket.create_connection(address)
        connection.sendall((head + content).encode())
        return connection

    running = connect()
    assert gate.reached.wait(20)
    waiting = connect()
    until(lambda: server.worker.waiting == 1)
    waiting.close()
    until(lambda: server.worker.waiting == 0)  # although the slot is taken
    running.close()
    until(lambda: metric(client, "cancelled_requests_total") == 2)
    with ThreadPoolExecutor() as pool:
        after = pool.submit(client.post, CHAT, json=body())
        until(lambda: server.worker.waiting == 1)  # as the one that left is held at the gate
        gate.set()
        assert after.result().json()["choices"][0]["finish_reason"] == "stop"
    assert metric(client, "completion_tokens_total") == after.result().json()["usage"]["completion_tokens"]
    until(lambda: server.worker.running == 0)


def test_a_client_that_goes_away_within_its_request_is_no_error_of_the_server(alone, caplog):
    _, client = alone
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(head.encode())
    until(lambda: metric(client, 'requests_total{status="499"}') == 1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_stream_that_is_left_in_its_middle_ends(alone, monkeypatch, long):
    server, client = alone
    told, on_tokens = [], app.Reply.on_tokens

    def slow(self, tokens):
        told.append(len(tokens))
        if len(tokens) == 3:
            until(lambda: server._metrics.cancelled._value.get() == 1)
        return on_tokens(self, tokens)

    monkeypatch.setattr(app.Reply, "on_tokens", slow)
    with client.stream("POST", CHAT, json=body(stream=True)) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        until(lambda: told == [1, 2, 3])
    until(lambda: server.worker.running == 0)
    assert told == [1, 2, 3]


def test_what_a_request_cannot_have_is_its_own_error(alone, monkeypatch):
    server, client = alone
    made = server.prompts.inputs

    def broken(self, messages):
        inputs = made(messages)
        return (
            {**inputs, "input_ids": inputs["input_ids"] + 1000} if "broken" in messages[0].content[0].text else inputs
        )

    monkeypatch.setattr(type(server.prompts), "inputs", broken)
    response = client.post(CHAT, json=body([{"role": "user", "content": "broken"}]))
    assert response.status_code == 500
    assert "\n" not in response.json()["error"]["message"]
    assert client.post(CHAT, json=body()).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}


def test_an_error_of_a_run_is_that_of_its_requests_only(alone, monkeypatch, capsys):
    server, client = alone
    tokens, *_ = generated(server, question(0)[1])
    feed = InFlight._feed

    def fail(self):
        monkeypatch.setattr(InFlight, "_feed", feed)
        raise RuntimeError("one kernel\nfailed")

    for _ in range(4):  # more than in a row would end the worker
        monkeypatch.setattr(InFlight, "_feed", fail)
        response = client.post(CHAT, json=body())
        assert (response.status_code, response.json()["error"]["message"]) == (500, "one kernel failed")
        answer = client.post(CHAT, json=body(question(0)[0], return_token_ids=True)).json()
        assert answer["choices"][0]["token_ids"] == tokens
    assert client.get("/health").status_code == 200
    assert server.worker.running == 0
    assert "RuntimeError: one kernel" in capsys.readouterr().err


def test_a_worker_that_has_ended_is_not_healthy(alone, monkeypatch, capsys):
    _, client = alone

    def fail(self):
        raise RuntimeError("the device\nis gone")

    monkeypatch.setattr(InFlight, "_feed", fail)
    for status in (500, 500, 503, 503):
        response = client.post(CHAT, json=body())
        assert (response.status_code, response.json()["error"]["message"]) == (status, "the device is gone")
    health = client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "the device is gone"})
    assert "RuntimeError: the device" in capsys.readouterr().err


def test_a_broken_device_is_not_healthy_wherever_it_is_noticed(alone, monkeypatch, capsys):
    _, client = alone

    def fail(*given):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(Session, "_prefill", fail)
    for status in (500, 500, 500, 503):
        assert client.post(CHAT, json=body()).status_code == status
    assert client.get("/health").status_code == 503
    assert "illegal memory access" in capsys.readouterr().err


def test_pictures_for_which_there_is_no_memory_may_be_sent_again_later(client, monkeypatch):
    def fail(file):
        raise MemoryError

    monkeypatch.setattr(chat, "read_image", fail)
    response = client.post(CHAT, json=body([{"role": "user", "content": [PIXEL]}]))
    assert response.status_code == 503
    assert "not enough memory" in response.json()["error"]["message"]


def test_answers_that_are_not_there_when_the_server_has_ended_are_an_error(monkeypatch, long, caplog):
    server, on_tokens, released = loaded("--slots", "1"), app.Reply.on_tokens, threading.Event()

    def held(self, tokens):  # as a pass over a long prompt may
        assert len(tokens) < 3 or released.wait(20)
        return on_tokens(self, tokens)

    monkeypatch.setattr(app.Reply, "on_tokens", held)
    with ThreadPoolExecutor() as pool, served(server) as client:
        url = f"{client.base_url}{CHAT}"
        running = pool.submit(httpx.post, url, json=body(stream=True))
        until(lambda: server.worker.running == 1)
        waiting = pool.submit(httpx.post, url, json=body())
        until(lambda: server.worker.waiting == 1)
        pool.submit(wait, [running, waiting]).add_done_callback(lambda _: released.set())
    *begun, last = [json.loads(line.removeprefix("data: ")) for line in running.result().iter_lines() if line]
    assert begun[-1]["choices"][0]["delta"]["content"]
    for status, answer in (
        (running.result().status_code, last),
        (waiting.result().status_code, waiting.result().json()),
    ):
        assert answer["error"]["message"] == "the server is ending"
        assert status == (200 if answer is last else 503)  # a stream has begun
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert not server.worker._thread.is_alive()


def test_metrics_count_what_was_asked_and_answered(alone):
    _, client = alone
    answers = [client.post(CHAT, json=body()).json()["usage"] for _ in range(2)]
    client.post(CHAT, json=body(n=2))
    assert metric(client, 'requests_total{status="200"}') == 2
    assert metric(client, 'requests_total{status="400"}') == 1
    for name, counted in (
        ("prompt_tokens_total", "prompt_tokens"),
        ("completion_tokens_total", "completion_tokens"),
        ("kept_entries_total", "kept_entries"),
    ):
        assert metric(client, name) == sum(usage[counted] for usage in answers) > 0
    assert metric(client, "ttft_seconds_count") == metric(client, "tpot_seconds_count") == 2
    assert metric(client, "running") == metric(client, "waiting") == 0


@pytest.mark.slow
def test_none_of_200_requests_at_a_time_is_lost(server, client):
    expected = {index: generated(server, question(index)[1])[0] for index in range(40)}
    text = {
        index: server.prompts.tokenizer.decode(tokens, skip_special_tokens=True) for index, tokens in expected.items()
    }
    before = metric(client, 'requests_total{status="200"}')

    def ask(request):
        index = request % 40
        asked = body(question(index)[0], stream=request % 3 == 0, return_token_ids=True)
        response = httpx.post(f"{client.base_url}{CHAT}", json=asked, timeout=300)
        assert response.status_code == 200
        if not asked["stream"]:
            return index, response.json()["choices"][0]["token_ids"], None
        choices = [each["choices"][0] for each in events(response.iter_lines())]
        return index, choices[-1]["token_ids"], "".join(choice["delta"].get("content", "") for choice in choices)

    with ThreadPoolExecutor(200) as pool:
        for index, tokens, streamed in pool.map(ask, range(200)):
            assert tokens == expected[index]
            assert streamed in (None, text[index])
    assert metric(client, 'requests_total{status="200"}') == before + 200
    assert (server.worker.running, server.worker.waiting) == (0, 0)
