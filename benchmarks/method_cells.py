"""Accuracy of methods on a task: the cells of its tables, and the answers, computed once and stored in a file."""

import hashlib
import inspect
import json
import time
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import kvcompress
from kvcompress.clusters.base import KVCluster, make_cluster
from kvcompress.hooks.shared_prompt import PromptPass, SharedPrompt
from kvcompress.methods import Method
from kvcompress.policy.options import all_options
from kvcompress.tokens import TokenMethod
from lmms_eval_plugins.cells.identity import code_identity
from lmms_eval_plugins.cells.results import write_text

from .learned import digest

RATIOS = (0.5, 0.2, 0.1, 0.05)
RESAMPLES = 10_000


@dataclass(frozen=True)
class Column:
    """A column of a table: a share of the prompt to keep, or options such as a decode budget."""

    title: str
    ratio: float | None = None
    options: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, ratio: float) -> "Column":
        return cls(f"{ratio:g}", ratio)


RULERS = ("full", "hindsight", "random")  # references for the other methods, in this order
BY_RATIO = tuple(map(Column.of, RATIOS))
FULL = Column("full")


@dataclass(frozen=True)
class Protocol:
    """What is compressed and when: the options shared by all methods, and a table's columns."""

    name: str
    options: dict[str, object]
    columns: tuple[Column, ...] = BY_RATIO

    @property
    def title(self) -> str:
        return f"{self.name}: `{' '.join(f'{name}={value}' for name, value in self.options.items())}`"


@dataclass(frozen=True)
class Task:
    """Questions in batches, with the model inputs for a slice of them and a score from 0 to 1 for each answer.

    Attributes:
        identity: hash of the questions and the model; answers stored under another identity are not used.
        window_size: replaces a longer observation window in every method that has one; None: no replacement.
        shows: for each question a digest of what it is about, since questions about the same are not independent;
            empty: each is about something else.
        calibrations: a folder with a file for each method that needs one, or for a learned method the note of its
            checkpoint, METHOD.json (benchmarks/learned.py); methods that need a calibration but have none are left out.
    """

    name: str
    title: str
    identity: str
    model: transformers.PreTrainedModel
    questions: int
    batch_size: int
    new_tokens: int
    inputs: Callable[[slice], dict[str, torch.Tensor]]
    right: Callable[[slice, torch.Tensor], list[float]]
    protocols: tuple[Protocol, ...]
    has_images: bool
    window_size: int | None = None
    kept: str = "the ratio asked"  # meaning of the columns
    measure: str = "Accuracy"  # the name of the score
    calibrations: Path | None = None
    shows: tuple[str, ...] = ()


def resampled(parts: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean over the parts' means with its 95 % bootstrap interval; each part's numbers are drawn again
    separately."""
    generator = np.random.default_rng(0)
    drawn = [part[generator.integers(len(part), size=(RESAMPLES, len(part)))].mean(1) for part in parts]
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    return float(np.mean([part.mean() for part in parts])), float(low), float(high)


def by_text(
    tokenizer: Any, asked: Sequence[Any], score: Callable[[Any, str], float]
) -> Callable[[slice, torch.Tensor], list[float]]:
    """Return a `Task.right` that scores each answer's text: `score` takes one of `asked` and the text."""

    def right(batch: slice, new: torch.Tensor) -> list[float]:
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        return [score(one, text) for one, text in zip(asked[batch], texts, strict=True)]

    return right


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    protocol: Protocol
    method: str
    column: Column
    options: dict[str, object] = field(default_factory=dict)
    calibration: Path | None = None

    @property
    def key(self) -> str:
        """Everything the answers depend on besides the task, including the method's own code."""
        options = json.dumps({**self.options, **self.column.options, **self.protocol.options}, sort_keys=True)
        code = method_code(self.method)
        if self.calibration:
            code += f" {hashlib.sha256(self.calibration.read_bytes()).hexdigest()[:16]}"
        return f"{self.protocol.name} {self.method} {self.column.ratio} {options} {code}"


@cache
def method_code(method: str) -> str:
    """Hash the files that define a method: those of its class and its base classes. Cached, because a file that changes
    later is not what runs."""
    parents = set(kvcompress.list_methods()[method].cls.__mro__) - {Method, KVCluster, TokenMethod, ABC, object}
    return code_identity(*sorted({Path(inspect.getfile(cls)) for cls in parents}))


def cells_of(task: Task, methods: list[str]) -> list[Cell]:
    """Return the cells of each method and protocol, without methods that do not apply: those that drop vision tokens
    before caching, if there are none or a budget applies while decoding; and those that lack a calibration."""
    cells = []
    for protocol in task.protocols:
        for method in methods:
            info, options, calibration = kvcompress.list_methods()[method], {}, None
            if getattr(info.cls, "needs_calibration", False):
                calibration = task.calibrations and task.calibrations / f"{method}.safetensors"
                if calibration is None or not calibration.exists():
                    continue
            elif task.calibrations and (note := task.calibrations / f"{method}.json").exists():
                calibration = note
            if info.options.get("answer_tokens", task.new_tokens) < task.new_tokens:
                options["answer_tokens"] = task.new_tokens  # hindsight looks ahead at the whole answer
            if issubclass(info.cls, KVCluster):
                window = info.options.get("window_size")
                observes = window and make_cluster(method).query_window == window
                if task.window_size and observes and window >= task.window_size:
                    options["window_size"] = task.window_size
            elif not task.has_images:
                continue
            columns = (FULL,) if method == "full" else protocol.columns
            takes = {"budget", *all_options(info)}
            if any(not takes.issuperset(column.options) for column in columns):
                continue
            cells += [Cell(protocol, method, column, options, calibration) for column in columns]
    return cells


class Answers:
    """A JSON file of answers, written at each addition.

    It holds the scores of each cell's answers, key -> "1101...", or "1 0.5 0 ..." for other scores than 0 and 1; the
    share of the prompts' KV entries that each cell keeps, by layer, averaged over its questions; and the cells that
    the library refuses, key -> message. Content stored under another `identity` (see `Task`) is discarded.
    """

    def __init__(self, path: Path, identity: str):
        self.path, self.identity = path, identity
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        is_ours = stored.get("task") == identity
        self.right: dict[str, str] = stored["right"] if is_ours else {}
        self.refused: dict[str, str] = stored["refused"] if is_ours else {}
        self.kept: dict[str, list[float]] = stored.get("kept", {}) if is_ours else {}

    def add(self, cell: Cell, right: list[float], shares: list[list[float]] | None = None) -> None:
        """Append the scores of a batch. `shares`: the kept share of its prompts, [compressed layer][row]; their mean
        over all batches is stored if every batch has some."""
        before = _numbers(self.right.get(cell.key, ""))
        every = [*before, *map(float, right)]
        self.right[cell.key] = ("" if set(every) <= {0.0, 1.0} else " ").join(f"{one:.4g}" for one in every)
        if shares and (cell.key in self.kept or not before):
            sums = np.mean(shares, axis=1) * len(right) + np.multiply(self.kept.get(cell.key, 0.0), len(before))
            self.kept[cell.key] = np.round(sums / len(every), 4).tolist()
        self._write()

    def refuse(self, cell: Cell, error: kvcompress.KVCompressError) -> None:
        self.refused[cell.key] = str(error)
        self._write()

    def _write(self) -> None:
        stored = {"task": self.identity, "right": self.right, "refused": self.refused, "kept": self.kept}
        write_text(self.path, json.dumps(stored, indent=0, sort_keys=True) + "\n")

    def drop_incomplete(self, cell: Cell, task: Task) -> None:
        """Forget answers that end within a batch, those of a call with fewer questions."""
        found = len(self.of(cell, task.questions))
        if found < task.questions and found % task.batch_size:
            del self.right[cell.key]
            self.kept.pop(cell.key, None)

    def of(self, cell: Cell, questions: int) -> np.ndarray:
        return np.array(_numbers(self.right.get(cell.key, ""))[:questions])


def _numbers(text: str) -> list[float]:
    return [float(one) for one in (text.split() if "." in text else text.replace(" ", ""))]


def compute(
    task: Task, cells: list[Cell], answers: Answers, prompts: dict[tuple[str, int], PromptPass] | None = None
) -> None:
    """Compute missing answers batch by batch: the prefill once, then each cell from it. `prompts`: prefills by task and
    first question, to reuse in another call."""
    cells = list({cell.key: cell for cell in cells}.values())  # a duplicate would be answered twice
    for cell in cells:
        answers.drop_incomplete(cell, task)
    for start in range(0, task.questions, task.batch_size):
        batch = slice(start, min(start + task.batch_size, task.questions))
        missing = [
            cell for cell in cells if len(answers.of(cell, task.questions)) == start and cell.key not in answers.refused
        ]
        if not missing:
            continue
        inputs, began, known = task.inputs(batch), time.monotonic(), (prompts or {}).get((task.name, start))
        for cell in missing:
            try:
                tokens, known, shares = answer(task, cell, inputs, known)
                answers.add(cell, task.right(batch, tokens), shares if cell.column.ratio is not None else None)
            except kvcompress.KVCompressError as error:  # such as a video method on an image
                answers.refuse(cell, error)
        if prompts is not None and known:
            prompts[task.name, start] = known
        seconds = time.monotonic() - began
        print(f"{task.name}: questions {start} to {batch.stop}: {len(missing)} cells in {seconds:.0f} s", flush=True)


def learned(file: Path) -> dict[str, str]:
    """Return the option that gives a method its calibration, or the checkpoint that a note names.

    Raises FileNotFoundError if the checkpoint is not there, and KVCompressError if it is another one."""
    if file.suffix != ".json":
        return {"calibration": str(file)}
    note = json.loads(file.read_text(encoding="utf-8"))
    checkpoint = Path(note["checkpoint"])
    if not checkpoint.exists():
        raise FileNotFoundError(f"{checkpoint} is missing: {note['made by']}")
    if (found := digest(checkpoint)) != note["sha256"]:
        what = f"{checkpoint} is not the checkpoint of {file}: its SHA-256 is {found}"
        raise kvcompress.KVCompressError(f"{what}; {note['made by']}")
    return {"checkpoint": note["checkpoint"]}


def answer(
    task: Task, cell: Cell, inputs: dict[str, torch.Tensor], known: PromptPass | None
) -> tuple[torch.Tensor, PromptPass | None, list[list[float]]]:
    """Return the first tokens of each answer, (batch, at most task.new_tokens); the prefill if it is known; and the
    realised ratios, [compressed layer][row]."""
    # Options that the method does not take (`full` compresses nothing) are left out.
    takes = all_options(kvcompress.list_methods()[cell.method])
    options = {name: value for name, value in cell.protocol.options.items() if name in takes}
    options |= {**cell.column.options, **cell.options}
    if cell.calibration:
        options |= learned(cell.calibration)
    with (
        SharedPrompt(task.model, known) as shared,
        kvcompress.compress(task.model, cell.method, cell.column.ratio, **options) as session,
    ):
        ids = task.model.generate(**inputs, max_new_tokens=task.new_tokens, do_sample=False)
    return ids[:, inputs["input_ids"].shape[1] :], shared.prompt_pass or known, session.cache.realised_ratios()
