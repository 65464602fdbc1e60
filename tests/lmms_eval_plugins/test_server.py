"""`--server`: a server's answers are scored as a model's, and its row stands beside the model's."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from lmms_eval.api.instance import Instance
from PIL import Image

from kvcompress import KVCompressError
from kvcompress.__main__ import main as kvcompress_main
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import served as asking
from lmms_eval_plugins.cells.errors import EvaluationFailed
from lmms_eval_plugins.cells.results import read_cell
from lmms_eval_plugins.cells.served import ServedLM, Server
from lmms_eval_plugins.leaderboard.checks import problems
from lmms_eval_plugins.model.arguments import ModelArguments
from tests.support.evaluation import FOUR
from tests.support.serving import loaded, served

pytestmark = pytest.mark.usefixtures("small_index", "plots_not_drawn")

OPTION = "window_size=8"
KEY = "secret"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of `kvcompress serve tiny snapkv 0.2 window_size=8`, which wants a key."""
    with served(loaded("--slots", "4", "--api-key", KEY)) as client:
        yield f"http://127.0.0.1:{client.base_url.port}/v1"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, clean_process):
    monkeypatch.setenv(asking.API_KEY, KEY)
    return tmp_path / "results" / "tiny_textvqa" / "tiny"


def refused(capsys, *words: str, code: int = 2) -> str:
    assert evaluate.main([*words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_a_servers_answers_are_the_models_in_a_row_beside_it(url, folder, capsys):
    asked = [*FOUR, OPTION, "--limit", "8"]
    assert evaluate.main([*FOUR[:2], "full,snapkv", *asked[3:]]) == 0
    assert evaluate.main([*asked, "--server", url]) == 0
    here, answers_here = read_cell(folder / "snapkv-0.2-limit=8-window_size=8")
    cell = folder / "snapkv-0.2-limit=8-server=kvcompress-window_size=8"
    there, answers_there = read_cell(cell)
    assert [each["answers"] for each in answers_there] == [each["answers"] for each in answers_here]
    assert len({str(each["answers"]) for each in answers_here}) > 2
    assert there["results"]["tiny_textvqa"] == here["results"]["tiny_textvqa"]
    for own, other in zip(answers_there, answers_here, strict=True):
        assert own["measurement"] == {name: other["measurement"][name] for name in own["measurement"]}
    rows = [line for line in (folder / "report-limit=8.md").read_text().splitlines() if line.startswith("| snapkv")]
    of_server, of_model = ([column.strip() for column in row.split("|")[1:-1]] for row in rows)
    score, questions = of_model[2], of_model[-1]
    assert of_server == [
        "snapkv server=kvcompress window_size=8", "- (0.2)", score, *5 * "-", of_model[-2], questions
    ]  # fmt: skip
    said = problems(folder.parents[1])
    assert f"tiny_textvqa/tiny/{cell.name}: a server answered: what it kept was not measured" in said
    for command in (["metrics", str(folder)], ["report", str(folder), "--out", "page"]):
        assert kvcompress_main(command) == 0
    capsys.readouterr()
    assert evaluate.main([*asked, "--server", url]) == 0
    assert "1 of 1 cells are complete and skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny_textvqa", "org/other", "snapkv", "0.2"], "there is no model 'org/other'; MODEL is one of tiny"),
        ([*FOUR[:3], "0.3", OPTION], "runs snapkv 0.2 window_size=8: give the same METHOD, RATIO and options"),
        (FOUR, "runs snapkv 0.2 window_size=8"),
        ([*FOUR[:2], "full", "1"], "runs snapkv 0.2 window_size=8"),
        ([*FOUR[:3], "0.2,0.3"], "give one of each"),
        ([*FOUR[:2], "blind", "1"], "'blind' changes what a model here is shown"),
        ([*FOUR, "batch_size=4"], "--server does not go with batch_size="),
        ([*FOUR, "slots=auto"], "--server needs a number of slots"),
        ([*FOUR, "--overlays", "1"], "--server does not go with --overlays"),
        ([*FOUR, "--repeats", "2"], "--server does not go with --repeats"),
    ],
)
def test_what_a_server_cannot_be_asked_is_one_line(url, words, said, capsys):
    assert said in refused(capsys, *words, "--server", url)


def test_a_task_of_lm_evals_is_one_line(url, capsys, monkeypatch):
    monkeypatch.setattr(asking, "is_lm_eval", lambda name, include_path: True)
    assert "task 'tiny_textvqa' is lm-eval's" in refused(capsys, *FOUR, OPTION, "--server", url)


def test_a_missing_key_or_server_is_one_line(url, capsys, monkeypatch):
    monkeypatch.delenv(asking.API_KEY)
    assert f"wants a key: set {asking.API_KEY} (status 401" in refused(capsys, *FOUR, "--server", url, code=1)
    nowhere = "http://127.0.0.1:9/v1"
    assert f"--server {nowhere} cannot be reached: " in refused(capsys, *FOUR, "--server", nowhere, code=1)
    assert "'127.0.0.1:8000' is not an address such as" in refused(capsys, *FOUR, "--server", "127.0.0.1:8000")
    assert "/nowhere: status 404" in refused(capsys, *FOUR, "--server", url.replace("v1", "nowhere"), code=1)


# -- what is asked of another server, and what comes of its answers


class Other:
    """A server of a model named `o1`. `reply` makes its answer to the number-th request, with its status."""

    def __init__(self, monkeypatch, reply):
        self.asked = []

        def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/models"):
                model = {"id": "o1", "object": "model", "created": 1, "owned_by": "vllm", "permission": [{"id": "x"}]}
                return httpx.Response(200, json={"object": "list", "data": [model]})
            self.asked.append(json.loads(request.content))
            status, body = reply(len(self.asked))
            return httpx.Response(status, json=body)

        client = openai.OpenAI(
            base_url="http://other/v1",
            api_key="x",
            max_retries=0,
            http_client=httpx.Client(transport=httpx.MockTransport(handle)),
        )
        monkeypatch.setattr(asking, "client_of", lambda url: client)
        self.server = Server.at("http://other/v1", "o1")
        self.lm = ServedLM(ModelArguments(pretrained="o1", slots=1), self.server)

    def answers(self, *requests: Instance) -> list[str]:
        self.lm.task_dict = {"t": {"s": [f"What is {number}?" for number in range(len(requests))]}}
        return [answer.text for answer in self.lm.generate_until(list(requests))]


def completion(text: str | None, **more) -> dict:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {
        "id": "x", "object": "chat.completion", "created": 1, "model": "o1", "choices": [choice], "usage": usage,
    } | more  # fmt: skip


def request(number: int, **kwargs) -> Instance:
    def messages(doc: str) -> list[dict]:
        picture = {"type": "image", "url": Image.new("P", (4, 4))}
        return [{"role": "user", "content": [picture, {"type": "text", "text": doc}]}]

    metadata = {"task": "t", "doc_id": number, "repeats": 1}
    return Instance("generate_until", ("", messages, kwargs, number, "t", "s"), number, metadata)


def test_each_request_asks_what_the_task_wants(monkeypatch):
    other = Other(monkeypatch, lambda number: (200, completion(None if number == 3 else f"answer {number};no")))
    assert other.server.about == {"id": "o1", "owned_by": "vllm"}
    requests = [
        request(0, max_new_tokens=5, until=[";"]),
        request(1, do_sample=True, temperature=0.5, top_p=0.9),
        request(2, max_new_tokens=5, until=[";"]),
        request(3, until=list("vwxyz")),
    ]
    # Requests with the same arguments are asked one after the other.
    assert other.answers(*requests) == ["answer 1", "", "answer 2", "ans"]
    beside = [{name: value for name, value in asked.items() if name != "messages"} for asked in other.asked]
    assert beside == [
        {"model": "o1", "max_tokens": 5, "temperature": 0, "stop": [";"]},
        {"model": "o1", "max_tokens": 5, "temperature": 0, "stop": [";"]},
        {"model": "o1", "max_tokens": 128, "temperature": 0.5, "top_p": 0.9},
        {"model": "o1", "max_tokens": 128, "temperature": 0},
    ]
    ((picture, text),) = [message["content"] for message in other.asked[1]["messages"]]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "What is 2?"}
    row = other.lm.gather_rows()[2]
    assert (row["doc_id"], row["tokens_in"], row["tokens_out"], row["images"]) == (2, 7, 3, 1)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((500, {"message": "no\nmemory"}), "status 500: no memory"),
        ((429, {"message": "busy"}), "status 429: busy"),
        ((200, completion("x", usage=None)), "it does not say how many tokens an answer has"),
        ((200, completion("x", choices=[])), "it gives no answer to a question"),  # some do where they refuse
    ],
)
def test_a_failed_request_fails_the_evaluation_and_is_no_answer(reply, said, monkeypatch):
    other = Other(monkeypatch, lambda number: reply if number == 2 else (200, completion("x")))
    with pytest.raises(EvaluationFailed, match=f"--server http://other/v1: {said}"):
        other.answers(*map(request, range(5)))
    assert len(other.asked) == 2
    assert other.lm.rows == []


@pytest.mark.parametrize("wrong", [{"seed": 1}, {"top_k": 3, "do_sample": True}, {"skip_special_tokens": False}])
def test_what_a_request_cannot_carry_is_an_error(wrong, monkeypatch):
    other = Other(monkeypatch, lambda number: pytest.fail("it was asked"))
    name = next(iter(wrong))
    with pytest.raises(KVCompressError, match=f"a server cannot be asked for {name}={wrong[name]}"):
        other.answers(request(0, **wrong))


def test_a_video_is_an_error(monkeypatch):
    other = Other(monkeypatch, lambda number: pytest.fail("it was asked"))
    video = [{"role": "user", "content": [{"type": "video", "url": "x.mp4"}]}]
    asked = Instance("generate_until", ("", lambda doc: video, {}, 0, "t", "s"), 0, request(0).metadata)
    with pytest.raises(KVCompressError, match="'video' is not sent"):
        other.answers(asked)
