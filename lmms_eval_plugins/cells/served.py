"""`--server URL`: a server of chat completions answers, asked by lmms-eval's own OpenAI-compatible model.

That model (`lmms_eval/models/chat/openai.py` of 0.7.3) encodes the messages, keeps several requests under way, and
counts tokens. What a request asks beside its messages comes from `ServedLM`, because that model drops stop strings;
takes 1024 tokens where a task says nothing; asks for other settings where a model's name contains `o1`; scores the
message of a failed request as its answer; and counts words where a server counts no tokens.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import openai
import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance
from tqdm import tqdm

from kvcompress import KVCompressError
from kvcompress.errors import one_line, shown
from kvcompress.pictures import read_image
from kvcompress.serve.command import API_KEY

from ..model.answerer import Answerer, question
from ..model.arguments import ModelArguments
from ..model.fewshot import FewShot
from ..model.generation import Generation, generation_of
from ..model.input_methods import INPUT_METHODS, choose
from ..model.shared_media import media_of
from .errors import EvaluationFailed, UsageError
from .machine import number_of_processes
from .names import is_lm_eval
from .request import Request
from .results import Cell

Cells = list[tuple[Cell, dict[str, Any]]]  # each with all options of its method

ARGUMENTS = ("slots", "max_new_tokens")  # of the model's, those that go with a server
SLOTS = 16  # questions under way at once, where slots= says nothing
TOLD = ("id", "root", "owned_by", "max_model_len", "method", "ratio", "options")  # of /v1/models; others vary
# Arguments of `generate` that a request can carry, or that are as they must be.
GENERATION = ("max_new_tokens", "do_sample", "temperature", "top_p", "num_beams", "num_return_sequences", "use_cache")
MOST_STOPS = 4  # that OpenAI's own server takes; more are cut off here only
RETRIES = 5  # of a request, after a busy server or a broken connection


@dataclass(frozen=True)
class Server:
    """A model behind an address.

    Attributes:
        url: up to and with `/v1`.
        model: its name there.
        about: what the server says of it, as far as it is the same each time.
    """

    url: str
    model: str
    about: dict[str, Any]

    @classmethod
    def at(cls, url: str, model: str) -> "Server":
        """Ask a server for its models. Raises UsageError if `model` is none of them, EvaluationFailed if it does not
        answer."""
        try:
            served = {each.id: each.model_dump() for each in client_of(url).with_options(max_retries=0).models.list()}
        except Exception as error:  # what answers at an address need not speak this protocol
            raise EvaluationFailed(failure(url, error)) from error
        if model not in served:
            raise UsageError(f"--server {url}: there is no model {shown(model)}; MODEL is one of {', '.join(served)}")
        return cls(url, model, {name: served[model][name] for name in TOLD if served[model].get(name) is not None})

    @property
    def engine(self) -> str:
        """The program that serves the model: `kvcompress`, `vllm`, ..."""
        return str(self.about.get("owned_by", "unknown"))

    def lm(self, arguments: ModelArguments) -> "ServedLM":
        """Return an lmms-eval model that asks this server."""
        return ServedLM(arguments, self)

    def named(self, cells: Cells) -> Cells:
        """Return the cells with the engine as an option, which distinguishes their rows from those of a local model.

        Raises UsageError if the server says that it runs another method, or with another ratio or other options. Not
        every server says it."""
        if "method" in self.about:
            method, ratio, given = (self.about[name] for name in ("method", "ratio", "options"))
            runs = choose(method, ratio, None, given).effective
            for cell, options in cells:
                if (cell.method, cell.ratio, options) != (method, ratio, runs):
                    words = " ".join([method, f"{ratio:g}", *(f"{name}={value}" for name, value in given.items())])
                    raise UsageError(f"--server {self.url} runs {words}: give the same METHOD, RATIO and options")
        return [(replace(cell, options={**cell.options, "server": self.engine}), options) for cell, options in cells]


def server_of(request: Request, arguments: ModelArguments, cells: Cells) -> Server:
    """Return the server of a request with `--server`. Raises UsageError for what a server cannot be asked, or a model
    that is not there, and EvaluationFailed if the server does not answer."""
    flags = request.flags
    if len(cells) > len(request.tasks):
        raise UsageError("--server: a server answers with one method and ratio: give one of each, not a list")
    if cells[0][0].method in INPUT_METHODS:
        raise UsageError(f"--server: method {cells[0][0].method!r} changes what a model here is shown")
    if others := sorted(arguments.model_fields_set - {"pretrained", "legacy", *ARGUMENTS}):
        raise UsageError(f"--server does not go with {others[0]}=: the server's own command sets such things")
    if not isinstance(arguments.slots, int):
        raise UsageError(f"--server needs a number of slots, not slots={arguments.slots!r}")
    wrong = {"--overlays": flags.overlays, "--use_cache": flags.use_cache, "--write_out": flags.write_out}
    wrong |= {"--repeats": flags.repeats > 1, "NUM_PROCESSES": number_of_processes() > 1}
    if unable := [name for name, value in wrong.items() if value]:
        raise UsageError(f"--server does not go with {unable[0]}")
    if text := [name for name in request.tasks if is_lm_eval(name, flags.include_path)]:
        raise UsageError(f"--server: task {text[0]!r} is lm-eval's, which writes prompts for a model here")
    return Server.at(flags.server, request.model)


def client_of(url: str) -> openai.OpenAI:
    """Return a client of a server, with the key of KVCOMPRESS_API_KEY."""
    return openai.OpenAI(base_url=url, api_key=os.environ.get(API_KEY) or "none", max_retries=RETRIES)


def failure(url: str, error: Exception) -> str:
    """Say in one line why a request to a server failed."""
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return f"--server {url} wants a key: set {API_KEY} ({said(error)})"
    if isinstance(error, openai.APIConnectionError):
        return f"--server {url} cannot be reached: {said(error.__cause__ or error)}"
    return f"--server {url}: {said(error)}"


def said(error: BaseException) -> str:
    """Return an error in one line, in the server's words if it gave any."""
    body = getattr(error, "body", None)  # of an answer with an error status
    message = body.get("message") if isinstance(body, dict) else None
    text = one_line(message or error, 300) or type(error).__name__
    return f"status {error.status_code}: {text}" if isinstance(error, openai.APIStatusError) else text


class ServedLM(Answerer):
    """Asks a server, which was told a cell's method when it was started.

    Attributes:
        few_shot, progress_bar: as `KVCompressLM`'s.
    """

    def __init__(self, args: ModelArguments, server: Server):
        super().__init__()
        from lmms_eval.models.chat.openai import OpenAICompatible

        self.args, self.server = args, server
        self.accelerator, self.device = Accelerator(cpu=True), torch.device("cpu")
        self.few_shot = FewShot()
        self.progress_bar: Callable[[int], tqdm] = partial(tqdm, desc=server.model)
        self._client = client_of(server.url)
        # Retries are the client's own, which wait as long as a server asks them to.
        self._theirs = OpenAICompatible(
            model=server.model, base_url=server.url, api_key=self._client.api_key, num_concurrent=args.slots,
            max_retries=1, retry_backoff_s=0, prefix_aware_queue=False,
        )  # fmt: skip
        self._theirs._rank = 1  # hides its progress bar

    def set_cell(self, *size: Any, **options: Any) -> None:
        """Accept a cell, as `KVCompressLM` does; the server has its method."""

    @property
    def told(self) -> dict[str, Any]:
        """Where the answers come from."""
        return {"device": f"{self.server.engine} at {self.server.url}", "server": self.server.about}

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Ask all requests, and return the answers in their order. Raises KVCompressError for what a server cannot be
        asked, EvaluationFailed if it fails."""
        results: list[GenerationResult | None] = [None] * len(requests)
        alike: dict[str, list[int]] = {}  # places of requests with the same generation arguments
        for place, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[2], sort_keys=True, default=str), []).append(place)
        self._theirs.task_dict = self.task_dict
        with self.progress_bar(len(requests)) as progress:
            for places in alike.values():
                answers = self._ask([requests[place] for place in places], progress)
                for place, answer in zip(places, answers, strict=True):
                    results[place] = answer
        return results

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        raise NotImplementedError("`check_task` refuses such tasks")

    def _ask(self, requests: list[Instance], progress: tqdm) -> list[GenerationResult]:
        """Ask requests with the same generation arguments."""
        wanted = generation_of(requests[0].args[2], self.args.max_new_tokens)
        asking = _Asking(self._client, {"model": self.server.model, **asked(wanted)}, progress)
        self._theirs.client = SimpleNamespace(chat=SimpleNamespace(completions=asking))
        prompts = [_Prompt(request, self.few_shot) for request in requests]
        answers = self._theirs.generate_until([prompt.request for prompt in prompts])
        if asking.error is not None:
            raise EvaluationFailed(failure(self.server.url, asking.error)) from asking.error
        results = []
        for request, answer, prompt in zip(requests, answers, prompts, strict=True):
            text, counts = wanted.cut(answer.text), answer.token_counts
            task, doc_id = question(request)
            self.rows.append(
                {
                    "task": task,
                    "doc_id": doc_id,
                    "split": request.args[5],
                    "tokens_in": counts.input_tokens,
                    "tokens_out": counts.output_tokens,
                    "images": prompt.images,
                    "videos": 0,
                    "shows": prompt.digest.hex(),
                    "rank": 0,
                    "answer": text,
                }
            )
            results.append(replace(answer, text=text))
        return results


def asked(wanted: Generation) -> dict[str, Any]:
    """Return what a request asks beside its model and messages. Raises KVCompressError if it cannot be asked."""
    given = {name: value for name, value in wanted.arguments.items() if value is not None}
    others = {name: value for name, value in given.items() if name not in GENERATION}
    others |= {} if wanted.seed is None else {"seed": wanted.seed}
    others |= {} if wanted.skip_special_tokens else {"skip_special_tokens": False}
    for name, value in others.items():
        raise KVCompressError(f"--server: a server cannot be asked for {name}={value!r}")
    body = {"max_tokens": given["max_new_tokens"], "temperature": 0}
    if given["do_sample"]:
        del body["temperature"]
        body |= {name: given[name] for name in ("temperature", "top_p") if name in given}
    return {**body, **({"stop": wanted.until} if 0 < len(wanted.until) <= MOST_STOPS else {})}


class _Prompt:
    """A request for lmms-eval's model, with the messages that a model in this process reads.

    Attributes:
        images, digest: number and digest of the pictures shown, once the messages are read.
    """

    def __init__(self, request: Instance, few_shot: FewShot):
        context, self._messages, *others = request.args
        self._few_shot, self._doc_id = few_shot, request.args[3]
        self.request = replace(request, arguments=(context, self._read, *others))
        self.images, self.digest = 0, b""

    def _read(self, doc: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a document's messages. Raises KVCompressError for videos and sound."""
        messages = self._few_shot.messages(self._messages, doc, self._doc_id)
        read = [{**message, "content": [_part(part) for part in message["content"]]} for message in messages]
        self.images = sum(part["type"] == "image" for message in read for part in message["content"])
        self.digest = media_of(read)
        return read


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] not in ("text", "image"):
        raise KVCompressError(f"--server: content of type {part['type']!r} is not sent to a server: text, image")
    return part if part["type"] == "text" else {**part, "url": read_image(part["url"])}


@dataclass
class _Asking:
    """Stands in for OpenAI's `client.chat.completions` in lmms-eval's model; several threads call it.

    Attributes:
        body: what each request asks beside its messages.
        error: why the first request failed. Those after it fail at once.
    """

    client: openai.OpenAI
    body: dict[str, Any]
    progress: tqdm
    error: Exception | None = None
    _one: Lock = field(default_factory=Lock)

    def create(self, messages: list[dict[str, Any]], **ignored: Any) -> Any:
        if self.error is not None:
            raise self.error
        try:
            answer = self.client.chat.completions.create(messages=messages, **self.body)
            if answer.usage is None:
                raise EvaluationFailed("it does not say how many tokens an answer has")
            if not answer.choices:
                raise EvaluationFailed("it gives no answer to a question")
        except Exception as error:
            self.error = self.error or error
            raise
        message = answer.choices[0].message
        message.content = message.content or ""  # None where a model only thought
        with self._one:
            self.progress.update()
        return answer
