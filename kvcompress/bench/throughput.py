"""`python -m kvcompress bench throughput`: many requests with answers of different lengths, at equal KV memory.

The contenders are transformers' `generate` in padded batches and its continuous batching, both with the full cache; the
latter with a method inside it (`kvcompress.paged`); and requests in flight (`Session.generate_many`) with any method.
"""

import argparse
import random
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from .. import paged
from ..cache.layer import nbytes_of
from ..cache_name import CACHE
from ..device import release_memory
from ..errors import KVCompressError, loading
from ..hooks.session import compress
from ..inflight.loop import check_storage
from ..inflight.request import Request
from ..policy.conflicts import PAGES, check_conflicts
from ..policy.make import make_policy
from .contenders import MethodSpec
from .results import Results, about, check_files, page, settle, stored_setting
from .shapes import source
from .standalone import CLOCKS, load, prompt_ids, read_prompt
from .timing import short, table


@dataclass(frozen=True)
class Asked:
    """A request: prompt tokens, and the number of tokens in its answer."""

    prompt: list[int]
    new: int


@dataclass
class Served:
    """What a contender achieved.

    Attributes:
        seconds: by the requested clock.
        answers, tokens: complete answers; tokens of all answers, including incomplete ones.
        steps: decode steps (passes through the model); None if unknown.
        slots: the most sequences that decode together.
        kv_bytes: the most bytes held for keys and values at any time.
    """

    seconds: float
    answers: int
    tokens: int
    steps: int | None
    slots: int
    kv_bytes: int


class Padded:
    """transformers' `generate`, batch by batch.

    Each batch is as large as fits and runs as long as its longest answer. A started batch is always finished."""

    name = "transformers generate, padded batches"

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def serve(self, requests: list[Asked], kv_bytes: int, clock: str, seconds: float) -> Served:
        """Serve requests with `kv_bytes` for keys and values, until all are answered or `seconds` are over.

        Every contender has this method, and a name for its row."""
        entries = max(len(asked.prompt) for asked in requests) + max(asked.new for asked in requests)
        of_row = entries * entry_bytes(self.model)
        if (batch := kv_bytes // of_row) < 1:
            raise KVCompressError(
                f"{self.name}: one row takes {of_row / 2**30:.3g} GB, which is more than --kv-gb {kv_bytes / 2**30:.3g}"
            )
        served = Served(0.0, 0, 0, 0, batch, 0)
        start = CLOCKS[clock]()
        for first in range(0, len(requests), batch):
            together = requests[first : first + batch]
            cache, longest = DynamicCache(config=self.model.config), max(asked.new for asked in together)
            ids = torch.tensor([asked.prompt for asked in together], device=self.model.device)
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, do_sample=False, **{CACHE: cache}
            )
            served.answers += len(together)
            served.tokens += sum(asked.new for asked in together)
            served.steps += longest
            served.kv_bytes = max(served.kv_bytes, nbytes_of(cache.layers))
            served.seconds = CLOCKS[clock]() - start
            if served.seconds > seconds:
                break
        return served


class Continuous:
    """transformers' continuous batching, with pages and its own scheduler.

    The cache is full or, with a method, compressed in its pages to `decode_budget` entries, prompts included."""

    name = "transformers continuous batching"
    PAGE = 16  # tokens

    def __init__(self, model: PreTrainedModel, method: MethodSpec | None = None, decode_budget: int | None = None):
        self.model, self._inside = model, nullcontext()
        if method is not None:
            self.name = f"{replace(method, ratio=None)}, in transformers continuous batching"
            self._inside = paged.compress(model, method.name, **sizes(method, decode_budget))

    def serve(self, requests: list[Asked], kv_bytes: int, clock: str, seconds: float) -> Served:
        from transformers import ContinuousBatchingConfig

        page_bytes = self.PAGE * entry_bytes(self.model)
        blocks = kv_bytes // page_bytes
        config = ContinuousBatchingConfig(
            page_size=self.PAGE, num_blocks=blocks, max_batch_tokens=1024, allow_block_sharing=False
        )
        longest = max(asked.new for asked in requests)
        wanted = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        so_far, done = {}, 0
        with (
            self._inside,
            self.model.continuous_batching_context_manager(
                generation_config=wanted, continuous_batching_config=config, block=False
            ) as manager,
        ):
            start = CLOCKS[clock]()  # pages are there, and CUDA graphs recorded
            for asked in requests:
                manager.add_request(asked.prompt, max_new_tokens=asked.new, streaming=True)
            while done < len(requests) and CLOCKS[clock]() - start < seconds:
                if (result := next_result(manager)) is not None:
                    so_far[result.request_id] = len(result.generated_tokens)
                    done += result.is_finished()
            passed = CLOCKS[clock]() - start
        return Served(passed, done, sum(so_far.values()), None, 0, blocks * page_bytes)


def next_result(manager: Any) -> Any:
    """Return the next state of an answer by transformers' continuous batching; None if none comes within a second.

    Raises KVCompressError if the request failed, or the manager has ended by itself."""
    result = manager.get_result(timeout=1.0)
    if result is None and not manager.is_running():
        raise KVCompressError("transformers' continuous batching ended by itself; see its log above")
    if result is not None and result.error is not None:
        raise KVCompressError(f"transformers' continuous batching: {result.error}")
    return result


class InSlots:
    """Requests in flight with a method, which keeps `decode_budget` entries, prompts included, unless it is `full`."""

    def __init__(self, model: PreTrainedModel, method: MethodSpec, decode_budget: int, is_static: bool):
        self.model, self.method, self.name = model, method, str(replace(method, ratio=None))
        self.is_static = is_static
        self.options = sizes(method, decode_budget)

    def serve(self, requests: list[Asked], kv_bytes: int, clock: str, seconds: float) -> Served:
        prompts = (
            Request({"input_ids": torch.tensor([asked.prompt])}, {"max_new_tokens": asked.new}) for asked in requests
        )
        with compress(self.model, self.method.name, **self.options) as session:
            run = session.generate_many(
                prompts, len(requests), kv_gb=kv_bytes / 2**30, static=self.is_static, do_sample=False
            )
            answers, start = 0, CLOCKS[clock]()
            for done in run.by_step():
                for answer in done:
                    if answer.error is not None:
                        raise answer.error
                answers += len(done)
                if CLOCKS[clock]() - start > seconds:
                    break
            passed = CLOCKS[clock]() - start
            served = Served(passed, answers, run.tokens, run.steps, run.slots, run.peak_kv_bytes)
            run.close()  # else its slots are there until cycles are collected
        return served


def sizes(method: MethodSpec, decode_budget: int) -> dict[str, Any]:
    """Return the method's options with its own `decode_budget`, or this one, for both prompt and decoding; `full` has
    none."""
    if method.name == "full":
        return method.options
    options = {"decode_budget": decode_budget, **method.options}
    return {"budget": options["decode_budget"], **options}


def entry_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a token in the full cache."""
    cache = DynamicCache(config=model.config)
    read_prompt(model, cache, prompt_ids(model, 1, 1), "wall")
    return nbytes_of(cache.layers)


PEERS: dict[str, type[Padded | Continuous]] = {"padded": Padded, "continuous": Continuous}


def workload(vocabulary: int, count: int, prompt: int, least: int, most: int, seed: int) -> list[Asked]:
    """Draw requests of `prompt` random tokens with answers of `least` to `most` tokens, all lengths equally likely."""
    draws = random.Random(seed)
    # From the lower half of the vocabulary, because image placeholders have high ids.
    return [
        Asked([draws.randrange(vocabulary // 2) for _ in range(prompt)], draws.randint(least, most))
        for _ in range(count)
    ]


def measure(given: argparse.Namespace, arguments: list[str]) -> None:
    """Run the benchmark given by parsed `arguments`. Raises KVCompressError before anything is loaded."""
    origin, (least, most) = source(given.model, given.shape), given.answers
    if least > most:
        raise KVCompressError(f"--answers {least} {most}: the least is more than the most")
    methods = [MethodSpec.parse(name, 1.0) for name in given.methods]
    in_pages = [MethodSpec.parse(name, 1.0) for name in given.paged]
    for method in methods:
        policy = make_policy(method.name, **sizes(method, given.decode_budget))
        check_storage(policy.engine.cache_implementation)
    for method in in_pages:
        check_conflicts(make_policy(method.name, **sizes(method, given.decode_budget)), PAGES)
    check_files(given.out, ".json", ".md")
    where = settle(given)
    if given.kv_gb is None and where.type != "cuda":
        raise KVCompressError("--kv-gb auto asks a CUDA device what is free; on a CPU give a number")
    with loading(given.model or given.shape):
        model = load(origin, given.dtype, where)
    if given.kv_gb is None:
        known = stored_setting(given.out.with_suffix(".json"), "kv_gb") if given.resume else None
        given.kv_gb = known or 0.8 * torch.cuda.mem_get_info(where)[0] / 2**30
    model.generation_config.eos_token_id = None  # every answer is as long as it is asked for
    names = ("dtype", "decode_budget", "requests", "prompt", "answers", "seed", "kv_gb", "static", "minutes")
    names += ("clock", "device", "threads")
    settings = {"model": given.model or f"shape {given.shape}", **{name: getattr(given, name) for name in names}}
    content = about(["kvcompress", "bench", *arguments], settings, where)
    content["weight_bytes"] = sum(weight.nbytes for weight in model.parameters())
    results = Results(given.out.with_suffix(".json"), content, given.resume, parts=("served",))
    requests = workload(
        model.config.get_text_config().vocab_size, given.requests, given.prompt, least, most, given.seed
    )
    contenders = [PEERS[name](model) for name in given.peers]
    contenders += [Continuous(model, method, given.decode_budget) for method in in_pages]
    contenders += [InSlots(model, method, given.decode_budget, given.static) for method in methods]
    few = [Asked(asked.prompt, 4) for asked in requests[:2]]
    for contender in contenders:
        if results.has("served", name=contender.name):
            continue
        print(contender.name, flush=True)
        kv_bytes = int(given.kv_gb * 2**30)
        torch._dynamo.reset()  # else the graphs of one contender count against the next one's
        contender.serve(few, kv_bytes, given.clock, float("inf"))  # a warm-up
        if given.static and isinstance(contender, InSlots):  # graphs are compiled for the number of slots
            contender.serve(requests, kv_bytes, given.clock, 0)
        served = contender.serve(requests, kv_bytes, given.clock, 60 * given.minutes)
        results.add("served", {"name": contender.name, **asdict(served)})
        release_memory()
    results.report(markdown(results.content))


def markdown(content: dict[str, Any]) -> str:
    """Return the table and its caption."""
    settings, rows = content["settings"], []
    rate = {served["name"]: served["tokens"] / served["seconds"] for served in content["served"]}
    for served in content["served"]:
        name = served["name"]
        rows.append(
            [
                name,
                served["slots"] or "",
                f"{rate[name]:.1f}",
                *(f"{rate[name] / rate[peer.name]:.2f}" if rate.get(peer.name) else "" for peer in PEERS.values()),
                short(60 * served["answers"] / served["seconds"]),
                f"{served['kv_bytes'] / 1e6:.0f}",
            ]
        )
    header = ["", "slots", "tokens/s", "x padded", "x continuous", "answers/min", "peak KV, MB"]
    least, most = settings["answers"]
    what = (
        f"{settings['model']}, {settings['dtype']}: {settings['requests']} requests of {settings['prompt']} prompt "
        f"tokens, answers of {least} to {most} (seed {settings['seed']}), {settings['kv_gb']:g} GiB for keys and "
        f"values; methods other than full keep {settings['decode_budget']} entries per layer and KV head, or their "
        "decode_budget. Tokens of answers under way when the time was over count; padded batches are finished."
    )
    return page(content, "Throughput at equal KV memory", what, table(header, rows))
