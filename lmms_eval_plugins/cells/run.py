"""Evaluate a cell. lmms-eval asks the loaded model, scores each answer as the task's file says (`process_results`) and
averages the scores; here they are joined with the measurements and written into the cell's folder."""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import sys
import tempfile
import zoneinfo
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.errors import one_line

from ..text.run import evaluate_text
from ..text.tasks import TextTask
from .data import filter_names, limited, working_directory
from .errors import EvaluationFailed
from .kept_answers import KeptAnswers, answers_file, write_kept_answers
from .kept_tokens_file import IMAGES_FOLDER, write_kept_tokens
from .machine import rank, say
from .plan import Job
from .processes import TaskFailures, left_out_of_a_group
from .progress import Grid
from .results import dumps, incomplete_reason, new_cell, number_of, score_key, tokens_out, write_cell
from .scorer_failures import JudgeWatch, scorers_watched

if TYPE_CHECKING:
    from ..model.answerer import Answerer
    from ..model.arguments import ModelArguments
    from ..model.lm import KVCompressLM


SEED_ARGUMENTS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
CONFIG_FIELDS = ("model_type", "layers", "kv_heads", "head_dim", "fingerprint")
PACKAGES = ("kvcompress", "torch", "transformers", "lmms-eval", "datasets", "accelerate")


def evaluate_cells(
    lm: "Answerer", jobs: list[Job], failures: TaskFailures, finished: Callable[[Job], None] = lambda job: None
) -> None:
    """Evaluate cells one by one and show the progress. If one fails, it is left out, or with it all others of its task,
    see TaskFailures. `finished` is called after each cell, on every rank."""
    grid, task = Grid([job.questions for job in jobs]), None
    lm.progress_bar = partial(grid.bar, disable=rank() != 0)
    for number, job in enumerate(jobs):
        if job.cell.task != task:
            task = job.cell.task
            say(measured_line(lm, job, sum(other.cell.task == task for other in jobs)))
        grid.begin(number, job.name)
        if task not in failures.reasons and f"{task}/{job.name}" not in failures.left_out:
            with (
                failures.noted(task, cell=f"{task}/{job.name}"),
                left_out_of_a_group(task, job.name, job.cell.method in job.plan.of_groups),
            ):
                evaluate_cell(lm, job)
                finished(job)
                failures.working.add(task)
                continue
        grid.skip(number)  # it failed, or its task did


def measured_line(lm: "Answerer", job: Job, cells: int) -> str:
    """Describe in one line what the next cells measure, and on what machine."""
    facts = {**job.cell.settings, **environment(lm), "batch_size": lm.batch_size}
    untold = ("versions", "python", "config", "server")
    listed = " ".join(f"{key}={value}" for key, value in facts.items() if key not in untold)
    return f"measuring {job.cell.task} with {job.cell.model}: {cells} cells of {job.questions} questions; {listed}"


def evaluate_cell(lm: "Answerer", job: Job) -> None:
    """Run lmms-eval for one cell and write its folder (rank 0; all ranks call this)."""
    from ..model.answer_store import AnswerStore
    from ..model.fewshot import FewShot

    cell, flags = job.cell, job.plan.request.flags
    lm.set_cell(cell.method, cell.ratio, cell.budget, **job.options)
    lm.overlays = flags.overlays and flags.offset + flags.overlays
    lm.few_shot = FewShot(flags.seed[3], flags.fewshot_as_multiturn)
    found = environment(lm, isinstance(job.asked, TextTask))
    identity = json.loads(dumps({"fingerprint": job.fingerprint, "environment": found}))
    lm.answer_store = None if flags.use_cache is None else AnswerStore(flags.use_cache, identity, rank())
    lm.reset_rows()
    score_cell(lm, job, found, flags.overlays, keeps_answers=True)


def score_again(job: Job, answers: KeptAnswers) -> None:
    """Score the answers of an earlier run and write the cell's folder, as `evaluate_cell` does but without a model."""
    from ..model.answerer import AnsweredLM

    say(f"scoring the answers of an earlier run: {job.folder.name}")
    lm = AnsweredLM(job.plan.arguments, answers.rows)
    score_cell(lm, job, answers.environment, answers.overlays, keeps_answers=False)


def score_cell(lm: "Answerer", job: Job, found: dict[str, Any], asked: int, keeps_answers: bool) -> None:
    """Let lmms-eval ask `lm` and score its answers; write the cell's folder (rank 0; all ranks call this).

    Args:
        found: the environment in which the answers were generated.
        asked: for how many questions of each task the kept tokens are recorded.
        keeps_answers: whether to store the answers before they are scored.
    """
    from ..model.measurements import summarise
    from ..model.ranks import of_each_rank

    cell = job.cell
    with new_cell(job.folder) if rank() == 0 else tempfile.TemporaryDirectory() as folder:
        with working_directory(job.plan.data_root), scorers_watched() as watch:

            def answered() -> None:
                rows = lm.gather_rows()
                if keeps_answers and rank() == 0:
                    write_kept_answers(job.folder, job.fingerprint, KeptAnswers(rows, found, asked))
                watch.is_on = True

            lm.when_answered = answered
            with named_failure(job, watch):
                if isinstance(job.asked, TextTask):
                    output = evaluate_text(lm, job.asked, job.plan.request.flags)
                else:
                    output = run_lmms_eval(lm, job, folder)
        rows = lm.gather_rows()
        if unanswered := list(chain.from_iterable(of_each_rank(list(watch.unanswered.values())))):
            raise EvaluationFailed(
                f"{cell.task}: {len(unanswered)} requests to its judge failed ({unanswered[0]}); the answers are "
                "stored, and the same command asks the judge again"
            )
        if rank() != 0:
            return
        kept = [{"task": r["task"], "doc_id": r["doc_id"], **r.pop("survivors")} for r in rows if "survivors" in r]
        write_kept_tokens(folder, job.folder.parent / IMAGES_FOLDER, asked, kept)
        filters = {task: filter_names(config.get("filter_list")) for task, config in output["configs"].items()}
        samples = merge_samples(output.pop("samples"), rows, output["n-samples"], filters)
        results = {
            "protocol": protocol(job),
            **{key: value for key, value in output.items() if not key.startswith(("git_", "lmms_eval_version"))},
            "date": datetime.datetime.now(zoneinfo.ZoneInfo(job.plan.request.flags.timezone)).isoformat(
                timespec="seconds"
            ),
            "token_counts": output.get("efficiency"),
            "efficiency": summarise(rows),
            "environment": found,
            "fingerprint": job.fingerprint,
            "n_questions": len({(sample["task"], sample["doc_id"]) for sample in samples}),
            "metric_questions": metric_questions(output, samples),
            "metric_tokens": metric_tokens(output, samples),
        }
        write_cell(folder, results, samples)
        if reason := incomplete_reason(Path(folder), job.fingerprint):
            raise EvaluationFailed(f"the results written for {job.folder} are incomplete: {reason}")
    answers_file(job.folder).unlink(missing_ok=True)


@contextlib.contextmanager
def named_failure(job: Job, watch: JudgeWatch) -> Iterator[None]:
    """Turn failures that are not this program's into one line: a failing scorer, or a missing or damaged file."""
    task = job.cell.task
    try:
        yield
    except (Exception, SystemExit) as error:  # tasks exit if a video is missing
        message = one_line(error)
        if watch.is_on:
            raise EvaluationFailed(
                f"{task}: scoring failed: {type(error).__name__}: {message}; the answers are stored, and the same "
                "command scores them again"
            ) from error
        if isinstance(error, SystemExit | FileNotFoundError):
            raise EvaluationFailed(f"{task}: a file of its data is missing: {message}") from error
        if type(error).__module__.partition(".")[0] in ("PIL", "av"):
            raise EvaluationFailed(
                f"{task}: a file of its data is damaged: {message}; --check_integrity names all such questions"
            ) from error
        raise


def run_lmms_eval(lm: "Answerer", job: Job, folder: Path | str) -> dict[str, Any]:
    """Run lmms-eval on the cell's task and return its output. Some tasks write files, such as a submission to a test
    server, into `folder`."""
    from lmms_eval import evaluator

    from kvcompress.hooks.replacement import Replacement

    flags = job.plan.request.flags
    with (
        as_one_process() if lm.args.tp_plan else contextlib.nullcontext(),
        Replacement(evaluator, "simple_parse_args_string", dict),  # its text form loses newlines and quotes
    ):
        output = evaluator.simple_evaluate(
            model=lm,
            model_args=lm.args.model_dump(mode="json", exclude_defaults=True),
            tasks=[job.cell.task],
            task_manager=job.asked,
            batch_size=lm.batch_size,
            device=str(lm.device),
            limit=flags.limit,
            offset=flags.offset,
            repeats=flags.repeats,
            process_docs_parallel=flags.process_docs_parallel,
            num_fewshot=flags.num_fewshot,
            gen_kwargs=flags.gen_kwargs or None,
            predict_only=flags.predict_only,
            verbosity=flags.verbosity,
            cli_args=argparse.Namespace(
                output_path=str(folder),
                process_with_media=flags.process_with_media,
                reasoning_tags=flags.reasoning_tags,
            ),
            **dict(zip(SEED_ARGUMENTS, flags.seed, strict=True)),
        )
    for counts in (output or {}).get("n-samples", {}).values():  # lmms-eval's counts ignore the offset
        counts["effective"] = limited(counts["original"], flags.limit, flags.offset)
    return output


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Keep lmms-eval from splitting the questions: every process of a tensor-parallel model answers all of them."""
    hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def merge_samples(
    samples: dict[str, list[dict]],
    rows: list[dict[str, Any]],
    expected: dict[str, dict[str, int]],
    filters: dict[str, list[str]],
) -> list[dict[str, Any]]:
    """Sort lmms-eval's samples by document, and add to each its answer filter, raw answers and measurement. A question
    with several rounds or repeats has several answers and measurements.

    Args:
        samples: task -> samples; a document has one for each of the task's answer filters, in their order.
        rows: measurements, with `task`, `doc_id` and `answer`.
        expected: task -> {"effective": number of documents}.
        filters: task -> names of its answer filters.

    Raises:
        EvaluationFailed: a document was not answered, or not measured.
    """
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        measured.setdefault((row["task"], row["doc_id"]), []).append(row)
    merged = []
    for task, of_task in samples.items():
        answered = {sample["doc_id"] for sample in of_task}
        if len(answered) != expected[task]["effective"]:
            raise EvaluationFailed(f"{task}: {len(answered)} of {expected[task]['effective']} questions were answered")
        seen: Counter[int] = Counter()
        for sample in sorted(of_task, key=lambda sample: sample["doc_id"]):
            of_question = measured.get((task, sample["doc_id"]))
            if of_question is None:
                raise EvaluationFailed(f"{task}: the answer to question {sample['doc_id']} was not measured")
            arguments = sample["arguments"]
            scores = {key: value for key, value in sample.items() if key not in ("doc_hash", "arguments")}
            measurements = [{key: value for key, value in row.items() if key != "answer"} for row in of_question]
            merged.append(
                {
                    "task": task,
                    "input": arguments[0] if arguments else None,
                    **scores,
                    "filter": filters[task][seen[sample["doc_id"]]],
                    "answers": [row["answer"] for row in of_question],
                    "measurement": measurements[-1],
                    **({"measurements": measurements} if len(measurements) > 1 else {}),
                }
            )
            seen[sample["doc_id"]] += 1
    return merged


def metric_questions(output: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return task -> `metric,filter` -> the number of questions that the metric covers. A scorer may skip a metric for
    some questions."""
    counts: dict[str, dict[str, int]] = {sample["task"]: {} for sample in samples}
    for sample, key, _ in scored(output, samples):
        of_task = counts[sample["task"]]
        of_task[key] = of_task.get(key, 0) + 1
    return counts


def metric_tokens(output: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return task -> `metric,filter` -> the sums over its questions of `tokens_out` and of `score`, negative scores
    counted as 0. A metric whose score is not a number for one of its questions is left out."""
    sums: dict[str, dict[str, dict[str, float]]] = {sample["task"]: {} for sample in samples}
    for sample, key, score in scored(output, samples):
        of_key = sums[sample["task"]].setdefault(key, {"tokens_out": 0, "score": 0.0})
        of_key["tokens_out"] += tokens_out(output, sample)
        of_key["score"] += score if math.isnan(score) else max(score, 0.0)  # NaN propagates to the sum
    return {
        task: {key: each for key, each in of_task.items() if not math.isnan(each["score"])}
        for task, of_task in sums.items()
    }


def scored(output: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Yield each question with each `metric,filter` of its task that scored it, and that score; NaN for no number."""
    for sample in samples:
        for key in output["results"].get(sample["task"], {}):
            metric, comma, answer_filter = key.partition(",")
            if comma and metric in sample and answer_filter == sample["filter"]:
                yield sample, key, number_of(sample[metric], score_key(output, sample["task"]))


def protocol(job: Job) -> dict[str, Any]:
    """Return the protocol of a cell: what a reader must know to compare its numbers with others."""
    return {
        **{key: value for key, value in asdict(job.cell).items() if key != "options"},
        "options": job.options,
        "changed_options": job.cell.options,
        # `full` drops nothing, so it has no scope and no denominator.
        **{name: job.options.get(name) for name in ("scope", "ratio_of", "first_token")},
    }


def environment(lm: "Answerer", has_lm_eval: bool = False) -> dict[str, Any]:
    """Describe the model, software and hardware of a run; `has_lm_eval`: include lm-eval's version."""
    import torch

    if (told := getattr(lm, "told", None)) is not None:  # of a server
        here = {name: importlib.metadata.version(name) for name in ("kvcompress", "lmms-eval", "datasets", "openai")}
        return {"versions": here, "python": platform.python_version(), "processes": 1, **told}

    from kvcompress.calibration.files import ModelIdentity

    model = ModelIdentity.of(lm.model.config, lm.model.config.get_text_config(decoder=True).num_hidden_layers)
    packages = (*PACKAGES, "lm-eval") if has_lm_eval else PACKAGES

    on_gpu = lm.device.type == "cuda"
    return {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(lm.device) if on_gpu else f"{lm.device.type} ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "attn_implementation": lm.model.config._attn_implementation,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "config": {name: getattr(model, name) for name in CONFIG_FIELDS},
    }


def load_model(arguments: "ModelArguments", needs_template: bool = True) -> "KVCompressLM":
    """Load the model. Raises EvaluationFailed if transformers cannot find, read or place the checkpoint, and
    KVCompressError if it lacks a required chat template."""
    import torch

    from ..model.arguments import TINY_MODEL, ModelArguments
    from ..model.lm import KVCompressLM

    if arguments.pretrained == ModelArguments(pretrained=TINY_MODEL).pretrained and "OMP_NUM_THREADS" not in os.environ:
        # Its layers are too small to split: two threads mostly wait for each other, on a busy machine for seconds.
        torch.set_num_threads(1)
        # Once glibc has unmapped a block, it keeps freed memory of up to twice that size in the process. Otherwise
        # every pass returns its memory and takes it again page by page, which costs 5 % of the time.
        torch.empty(31 << 20, dtype=torch.uint8)
    try:
        given = arguments.model_dump(exclude_unset=True) | arguments.legacy
        return KVCompressLM(needs_template=needs_template, **given)
    except (OSError, ImportError) as error:
        raise EvaluationFailed(f"model {arguments.pretrained} could not be loaded: {one_line(error, 500)}") from error


def quiet(verbosity: str) -> None:
    """Hide lmms-eval's progress bars, since the model shows one per cell, and its log below `verbosity`; and keep it
    from asking git for its own commit in each cell: in a virtual environment git answers for the folder around it."""
    import datasets
    import lmms_eval.api.task
    import lmms_eval.evaluator
    from loguru import logger
    from tqdm import tqdm

    def no_bar(*args: Any, **kwargs: Any) -> tqdm:
        return tqdm(*args, **{**kwargs, "disable": True})

    logger.remove()
    logger.add(sys.stderr, level=verbosity)
    datasets.disable_progress_bars()
    lmms_eval.api.task.tqdm = lmms_eval.evaluator.tqdm = no_bar
    for name in ("get_git_commit_hash", "get_git_branch_name", "get_lmms_eval_version_string"):
        setattr(lmms_eval.evaluator, name, lambda: None)
