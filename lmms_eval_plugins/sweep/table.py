"""Write the table of a sweep: its trials with their results."""

from typing import Any

import pandas as pd

from kvcompress.files import write_text

from ..cells.cell_log import cell_values
from ..report import terminal
from ..report.appearance import short_names
from ..report.table import (
    DROPPABLE,
    cell_row,
    markdown_note,
    markdown_table,
    markdown_text,
    note,
    print_warning,
    table_rows,
    warnings,
)
from .runner import Sweep, model_parameters
from .trial import FLAGS, read_results

# Metrics that `table_rows` has no column for.
FURTHER = ("throughput", "peak_memory_bytes", "accuracy_stderr")


def write_table(sweep: Sweep) -> None:
    """Print the finished trials and write them to `report.md` in the sweep's folder, one table per task: a grid in its
    order, other sweeps with the best first. Trials that share a cell, such as `full` at two ratios, share a row."""
    console, path = terminal.console(), sweep.folder / "report.md"
    text = f"# Sweep {markdown_text(sweep.config.name)}\n"
    for task, rows in trial_rows(sweep).groupby("task", sort=False):
        header, lines = table(sweep, rows)
        names, shared = short_names(rows)
        place = header.index("method")
        short = [[*line[:place], name, *line[place + 1 :]] for name, line in zip(names, lines, strict=True)]
        title = "\n".join(filter(None, [f"{sweep.config.name}: {task}", shared]))
        console.print(
            terminal.fitted(
                console.width, header, short, title, note(rows), place, droppable=DROPPABLE, elsewhere=path.name
            )
        )
        for line in warnings(rows):
            print_warning(console, line)
        text += f"\n## {markdown_text(task)}\n\n{markdown_table(header, lines, ['---'] * len(header))}"
        text += f"\n{markdown_note(rows)}"
    write_text(path, text)
    console.print(f"written: {path}", soft_wrap=True, highlight=False)


def trial_rows(sweep: Sweep) -> pd.DataFrame:
    """Return one row per cell of the finished trials, in the order of the table."""
    rows: dict[Any, dict[str, Any]] = {}
    for trial in sweep.trials.drawn():
        folder = sweep.cell(trial)
        if trial.is_told and folder not in rows and not sweep.has_failed(folder):
            results = read_results(folder)
            value = cell_values(results)[sweep.config.metric]
            rows[folder] = {**cell_row(results), "trial": trial, "value": value}
    frame = pd.DataFrame(list(rows.values()), columns=None if rows else ["task"])
    if sweep.config.method == "grid" or not rows:
        return frame
    return frame.sort_values("value", ascending=sweep.config.goal == "minimize", kind="stable")


def table(sweep: Sweep, rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return header and formatted rows: the trial, its varied settings, and the columns of every report."""
    header, lines = table_rows(rows)
    settings = [name for name in sweep.config.space if name in {*model_parameters(), *FLAGS}]
    further = [sweep.config.metric] if sweep.config.metric in FURTHER else []
    texts = []
    for trial, value, line in zip(rows["trial"], rows["value"], lines, strict=True):
        own = [str(trial.parameters[name]) for name in settings]
        texts.append([str(trial.number + 1), *own, *line, *(f"{value:.4g}" for _ in further)])
    return ["trial", *settings, *header, *further], texts
