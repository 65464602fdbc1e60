"""One cell: run lmms-eval on the loaded model and write the cell's folder."""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import zoneinfo
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .data import limited, working_directory
from .errors import EvaluationFailed
from .kept_tokens import IMAGES_FOLDER, write_kept_tokens
from .machine import rank, say
from .plan import Job
from .progress import Grid
from .results import dumps, incomplete_reason, new_cell, write_cell

if TYPE_CHECKING:
    from ..model.arguments import ModelArguments
    from ..model.lm import KVCompressLM


SEED_ARGUMENTS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
PACKAGES = ("kvcompress", "torch", "transformers", "lmms-eval", "datasets", "accelerate")


def evaluate_cells(lm: "KVCompressLM", jobs: list[Job], finished: Callable[[Job], None] = lambda job: None) -> None:
    """Evaluate cells one after the other, and say how far they are. `finished` is called after each, on every rank."""
    grid, task = Grid([job.questions for job in jobs]), None
    lm.progress_bar = partial(grid.bar, disable=rank() != 0)
    for number, job in enumerate(jobs):
        if job.cell.task != task:
            task = job.cell.task
            say(measured_line(lm, job, sum(other.cell.task == task for other in jobs)))
        grid.begin(number, job.name)
        evaluate_cell(lm, job)
        finished(job)


def measured_line(lm: "KVCompressLM", job: Job, cells: int) -> str:
    """What the next cells measure, and on what."""
    found = {key: value for key, value in environment(lm).items() if key not in ("versions", "python")}
    facts = {**job.cell.settings, **found, "batch_size": lm.batch_size}
    listed = " ".join(f"{key}={value}" for key, value in facts.items())
    return f"measuring {job.cell.task} with {job.cell.model}: {cells} cells of {job.questions} questions; {listed}"


def evaluate_cell(lm: "KVCompressLM", job: Job) -> None:
    """Run lmms-eval for one cell and write its folder (rank 0; all ranks call this)."""
    from ..model.answer_store import AnswerStore
    from ..model.fewshot import FewShot
    from ..model.measurements import summarise

    cell, asked = job.cell, job.plan.request.flags.overlays
    lm.set_cell(cell.method, cell.ratio, cell.budget, **job.options)
    lm.overlays = asked
    flags = job.plan.request.flags
    lm.few_shot = FewShot(flags.seed[3], flags.fewshot_as_multiturn)
    identity = json.loads(dumps({"fingerprint": job.fingerprint, "environment": environment(lm)}))
    lm.answer_store = None if flags.use_cache is None else AnswerStore(flags.use_cache, identity, rank())
    lm.reset_rows()
    with new_cell(job.folder) if rank() == 0 else tempfile.TemporaryDirectory() as folder:
        with working_directory(job.plan.data_root):
            output = run_lmms_eval(lm, job, folder)
        rows = lm.gather_rows()
        if rank() != 0:
            return
        kept = [{"task": r["task"], "doc_id": r["doc_id"], **r.pop("survivors")} for r in rows if "survivors" in r]
        write_kept_tokens(folder, job.folder.parent / IMAGES_FOLDER, asked, kept)
        samples = merge_samples(output.pop("samples"), rows, output["n-samples"])
        results = {
            "protocol": protocol(job),
            **{key: value for key, value in output.items() if not key.startswith("git_")},
            "token_counts": output.get("efficiency"),
            "efficiency": summarise(rows),
            "environment": environment(lm),
            "fingerprint": job.fingerprint,
        }
        write_cell(folder, results, samples)
        if reason := incomplete_reason(Path(folder), job.fingerprint):
            raise EvaluationFailed(f"what was written for {job.folder} is not complete: {reason}")


def run_lmms_eval(lm: "KVCompressLM", job: Job, folder: Path | str) -> dict[str, Any]:
    """What lmms-eval returns for the cell's task; some tasks write side files, such as a test server's submission, into
    `folder`."""
    from lmms_eval.evaluator import simple_evaluate

    flags = job.plan.request.flags
    with as_one_process() if lm.args.tp_plan else contextlib.nullcontext():
        output = simple_evaluate(
            model=lm,
            model_args=lm.args.model_dump(mode="json", exclude_defaults=True),
            tasks=[job.cell.task],
            task_manager=job.manager,
            batch_size=lm.batch_size,
            device=str(lm.device),
            limit=flags.limit,
            offset=flags.offset,
            repeats=flags.repeats,
            process_docs_parallel=flags.process_docs_parallel,
            num_fewshot=flags.num_fewshot,
            gen_kwargs=",".join(f"{name}={value}" for name, value in flags.gen_kwargs.items()) or None,
            predict_only=flags.predict_only,
            verbosity=flags.verbosity,
            datetime_str=datetime.datetime.now(zoneinfo.ZoneInfo(flags.timezone)).isoformat(timespec="seconds"),
            cli_args=argparse.Namespace(
                output_path=str(folder),
                process_with_media=flags.process_with_media,
                reasoning_tags=flags.reasoning_tags,
            ),
            **dict(zip(SEED_ARGUMENTS, flags.seed, strict=True)),
        )
    for counts in (output or {}).get("n-samples", {}).values():  # lmms-eval's do not know of the offset
        counts["effective"] = limited(counts["original"], flags.limit, flags.offset)
    return output


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """A tensor-parallel model answers all questions in every process: lmms-eval must not share them out."""
    hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def merge_samples(
    samples: dict[str, list[dict]], rows: list[dict[str, Any]], expected: dict[str, dict[str, int]]
) -> list[dict[str, Any]]:
    """lmms-eval's samples in the order of the documents, each with its measurement.

    Args:
        samples: task -> samples; one document has several where a task has several answer filters.
        rows: measurements, with `task` and `doc_id`.
        expected: task -> {"effective": number of documents}.

    Raises:
        EvaluationFailed: a document was not answered, or not measured.
    """
    measured = {(row["task"], row["doc_id"]): row for row in rows}
    merged = []
    for task, of_task in samples.items():
        answered = {sample["doc_id"] for sample in of_task}
        if len(answered) != expected[task]["effective"]:
            raise EvaluationFailed(f"{task}: {len(answered)} of {expected[task]['effective']} questions were answered")
        for sample in sorted(of_task, key=lambda sample: sample["doc_id"]):
            row = measured.get((task, sample["doc_id"]))
            if row is None:
                raise EvaluationFailed(f"{task}: the answer to question {sample['doc_id']} was not measured")
            arguments = sample["arguments"]
            scores = {key: value for key, value in sample.items() if key not in ("doc_hash", "arguments")}
            merged.append({"task": task, "input": arguments[0] if arguments else None, **scores, "measurement": row})
    return merged


def protocol(job: Job) -> dict[str, Any]:
    """What was compressed how: what a reader must know to compare the numbers with others."""
    return {
        **{key: value for key, value in asdict(job.cell).items() if key != "options"},
        "options": job.options,
        "changed_options": job.cell.options,
        # `full` drops nothing, so it has no scope and no denominator.
        **{name: job.options.get(name) for name in ("scope", "ratio_of", "first_token")},
    }


def environment(lm: "KVCompressLM") -> dict[str, Any]:
    import torch

    on_gpu = lm.device.type == "cuda"
    return {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(lm.device) if on_gpu else f"{lm.device.type} ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "attn_implementation": lm.model.config._attn_implementation,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
    }


def load_model(arguments: "ModelArguments") -> "KVCompressLM":
    """Raises EvaluationFailed where transformers cannot find, read or place the checkpoint."""
    import torch

    from ..model.arguments import TINY_MODEL, ModelArguments
    from ..model.lm import KVCompressLM

    if arguments.pretrained == ModelArguments(pretrained=TINY_MODEL).pretrained and "OMP_NUM_THREADS" not in os.environ:
        # Its layers are too small to share: two threads mostly wait for each other, on a busy machine for seconds.
        torch.set_num_threads(1)
    try:
        return KVCompressLM(**arguments.model_dump(exclude_unset=True))
    except (OSError, ImportError) as error:
        message = " ".join(str(error).split())
        raise EvaluationFailed(f"model {arguments.pretrained} could not be loaded: {message[:500]}") from error


def quiet(verbosity: str) -> None:
    """One progress bar per cell, the model's, is enough: hide lmms-eval's, and its log below `verbosity`."""
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
