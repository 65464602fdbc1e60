"""One of lmms-eval's own tasks in the evaluation command, on data made for it: alone and in a padded batch.

Each run is a process of its own, forked from this one, so that a task's global state or an exit does not affect the
next."""

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.identity import own_code
from lmms_eval_plugins.cells.results import read_cell
from lmms_eval_plugins.model.prompts import ChatProcessor
from lmms_eval_plugins.report.headline import headline
from tests.support.official_tasks import leaves, local_data

# Each answer has six tokens: a shorter one would test little.
GENERATION = "max_new_tokens=6,min_new_tokens=6,do_sample=false"
CELLS = ["tiny", "full,snapkv", "0.5", "--data-root", "data", "--gen_kwargs", GENERATION]
BATCH, ROWS = 3, 4
LIMIT_S = 300
PRELOADED = (
    "lmms_eval.evaluator", "lmms_eval_plugins.model.lm", "lmms_eval_plugins.report.table", "nltk",
    "transformers.models.llava_onevision.modeling_llava_onevision",
)  # fmt: skip


def preload() -> None:
    """Import what every run needs, so that no run has to."""
    for name in PRELOADED:
        importlib.import_module(name)
    own_code(Path(evaluate.__file__).parents[1])


def run(command: str, root: Path) -> dict[str, Any]:
    """Run a task; return the outcome as JSON.

    Args:
        command: a task or a group, then flags of the evaluation command.
        root: an empty folder.

    Returns:
        `error`, the last line of a run that failed; or `tasks` (of a group), `questions`, `images`, `videos` and
            `rounds` (least and most per question), `shots`, `metric`, `batch` (the largest batch), `padded` (whether a
            batch had prompts of different lengths), `equal_answers`, `equal_scores`.
    """
    task, *flags = command.split()
    with local_data(root, *leaves(task), rows=ROWS):
        for batch_size in (1, BATCH):
            arguments = [task, *CELLS, *flags, f"batch_size={batch_size}", "--output_path", f"batch_{batch_size}"]
            if (code := _forked(arguments, Path(f"batch_{batch_size}.json"))) != 0:
                lines = (root / f"batch_{batch_size}.log").read_text(encoding="utf-8").splitlines()
                errors = [line for line in lines if line.startswith("error: ")]
                return {"error": errors[-1] if errors else f"exit code {code}: {lines[-1] if lines else ''}"}
        alone, batched = (_cells(Path(f"batch_{batch_size}") / task / "tiny") for batch_size in (1, BATCH))
        seen = json.loads(Path("batch_1.json").read_text(encoding="utf-8"))
    return {**_facts(task, alone, batched), **seen}


def _forked(arguments: list[str], noted: Path) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=_evaluate, args=(arguments, noted))
    child.start()
    child.join(LIMIT_S)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode


def _evaluate(arguments: list[str], noted: Path) -> None:
    """Run the command, and record how many images and videos its prompts have."""
    images, videos, read = [], [], ChatProcessor.read

    def counting(chat: ChatProcessor, *given: Any) -> Any:
        prompt = read(chat, *given)
        images.append(len(prompt.images))
        videos.append(len(prompt.videos))
        return prompt

    ChatProcessor.read = counting
    code = 1
    with open(noted.with_suffix(".log"), "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                code = evaluate.main(arguments)
            finally:
                noted.write_text(json.dumps({"images": _range(images), "videos": _range(videos)}), encoding="utf-8")
    sys.stdout.flush()
    os._exit(code)


def _range(values: list[int]) -> list[int]:
    return [min(values), max(values)] if values else [0, 0]


def _cells(folder: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return each method's results and samples."""
    cells = [read_cell(path.parent) for path in sorted(folder.glob("*/results.json"))]
    return {results["protocol"]["method"]: (results, samples) for results, samples in cells}


def _facts(task: str, alone: dict[str, Any], batched: dict[str, Any]) -> dict[str, Any]:
    results, samples = alone["full"]
    rows = [row for _, of_cell in batched.values() for sample in of_cell for row in _measured(sample)]
    found = headline(results)
    return {
        "tasks": len(leaves(task)),
        "questions": results["n_questions"],
        "rounds": _range([len(_measured(sample)) for sample in samples]),
        "shots": max(results["n-shot"].values()),
        "metric": found.name if found else "",
        "batch": max(row["batch_size"] for row in rows),
        "padded": len({row["tokens_in"] for row in rows if row["batch_size"] > 1}) > 1,
        "equal_answers": _answers(alone) == _answers(batched),
        "equal_scores": _scores(alone) == _scores(batched),
    }


def _measured(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return sample.get("measurements", [sample["measurement"]])


def _answers(cells: dict[str, Any]) -> dict[tuple[Any, ...], Any]:
    return {
        (method, sample["task"], sample["doc_id"], sample["filter"]): (sample["answers"], sample["filtered_resps"])
        for method, (_, samples) in cells.items()
        for sample in samples
    }


def _scores(cells: dict[str, Any]) -> dict[str, Any]:
    return {method: results["results"] for method, (results, _) in cells.items()}
