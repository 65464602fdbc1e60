"""`--server URL`: a server of chat completions answers, with several questions under way at once.

lmms-eval's own OpenAI-compatible model is not used: it drops stop strings; takes 1024 tokens where a task says nothing;
asks for other settings where a model's name contains `o1`; scores the message of a failed request as its answer; and
counts words where a server counts no tokens.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import openai
import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.models.model_utils.usage_metrics import log_usage
from lmms_eval.protocol import ChatMessages
from openai.types.chat import ChatCompletion
from tqdm import tqdm

from kvcompress import KVCompressError
from kvcompress.errors import one_line, shown
from kvcompress.serve.command import API_KEY

from ..model.answerer import Answerer
from ..model.arguments import ModelArguments
from ..model.fewshot import FewShot
from ..model.generation import Generation, generation_of
from ..model.input_methods import INPUT_METHODS, choose
from ..model.prompts import read_image
from ..model.shared_media import media_of
from .errors import EvaluationFailed, UsageError
from .machine import number_of_processes
from .names import is_lm_eval
from .request import Request
from .results import Cell

Cells = list[tuple[Cell, dict[str, Any]]]  # each with all options of its method
_Answered = tuple[GenerationResult, dict[str, Any], float]  # an answer, its row, and the seconds it took

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
        """What serves: `kvcompress`, `vllm`, ..."""
        return str(self.about.get("owned_by", "unknown"))

    def lm(self, arguments: ModelArguments) -> "ServedLM":
        """Return the model that asks it."""
        return ServedLM(arguments, self)

    def named(self, cells: Cells) -> Cells:
        """Return the cells with the server's kind as an option, which tells their rows from those of a model here.

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
    """Say in one line what a server did not do."""
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
    """Asks a server. What a cell's method is was told to the server when it was started.

    Attributes:
        few_shot, progress_bar: as `KVCompressLM`'s.
    """

    def __init__(self, args: ModelArguments, server: Server):
        super().__init__()
        self.args, self.server = args, server
        self.accelerator, self.device = Accelerator(cpu=True), torch.device("cpu")
        self.few_shot = FewShot()
        self.progress_bar: Callable[[int], tqdm] = partial(tqdm, desc=server.model)
        self._client = client_of(server.url)

    def set_cell(self, *size: Any, **options: Any) -> None:
        """Accept a cell, as `KVCompressLM` does; the server has its method."""

    @property
    def told(self) -> dict[str, Any]:
        """Where the answers come from."""
        return {"device": f"{self.server.engine} at {self.server.url}", "server": self.server.about}

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Ask all requests, and return the answers in their order. Raises KVCompressError for what a server cannot be
        asked, EvaluationFailed if it fails."""
        waiting, running, answered = enumerate(requests), {}, {}
        with ThreadPoolExecutor(self.args.slots) as threads, self.progress_bar(len(requests)) as progress:
            while len(answered) < len(requests):
                # The prompts are written in this thread: a task's own code need not run in several.
                for place, request in islice(waiting, self.args.slots - len(running)):
                    running[self._start(threads, request)] = place
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    answered[running.pop(future)] = future.result()
                    progress.update()
        in_order = [answered[place] for place in range(len(requests))]
        self.rows += [row for _, row, _ in in_order]
        seconds, tokens = sum(each for *_, each in in_order), sum(row["tokens_out"] for _, row, _ in in_order)
        log_metrics(total_elapsed_time=seconds, total_gen_tokens=tokens, avg_speed=tokens / seconds if seconds else 0)
        return [result for result, *_ in in_order]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        raise NotImplementedError("`check_task` refuses such tasks")

    def _start(self, threads: ThreadPoolExecutor, request: Instance) -> Future[_Answered]:
        """Write a request's prompt and ask it in another thread. Raises KVCompressError for videos and sound."""
        _, doc_to_messages, kwargs, doc_id, task, split = request.args
        wanted = generation_of(kwargs, self.args.max_new_tokens)
        given = self.few_shot.messages(doc_to_messages, self.task_dict[task][split][doc_id], doc_id)
        messages = [{**message, "content": [_part(part) for part in message["content"]]} for message in given]
        row = {
            "task": task,
            "doc_id": doc_id,
            "split": split,
            "images": sum(part["type"] == "image" for message in messages for part in message["content"]),
            "videos": 0,
            "shows": media_of(messages).hex(),
            "rank": 0,
        }
        body = {"messages": ChatMessages(messages=messages).to_openai_messages(), **asked(wanted)}
        return threads.submit(self._ask, body, wanted, row)

    def _ask(self, body: dict[str, Any], wanted: Generation, row: dict[str, Any]) -> _Answered:
        """Return the answer to a request, its row, and the seconds that it took."""
        start = time.perf_counter()
        try:
            answer: ChatCompletion = self._client.chat.completions.create(model=self.server.model, **body)
            if answer.usage is None:
                raise EvaluationFailed("it does not say how many tokens an answer has")
        except Exception as error:
            raise EvaluationFailed(failure(self.server.url, error)) from error
        seconds, usage = time.perf_counter() - start, answer.usage
        thought = usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens
        counts = TokenCounts(usage.prompt_tokens, usage.completion_tokens, thought or 0)
        log_usage(self.server.model, None, counts.input_tokens, counts.output_tokens, counts.reasoning_tokens)
        text = wanted.cut(answer.choices[0].message.content or "")  # None where a model only thought
        row |= {"tokens_in": counts.input_tokens, "tokens_out": counts.output_tokens, "answer": text}
        return GenerationResult(text=text, token_counts=counts), row, seconds


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


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] not in ("text", "image"):
        raise KVCompressError(f"--server: content of type {part['type']!r} is not sent to a server: text, image")
    return part if part["type"] == "text" else {**part, "url": read_image(part["url"])}
