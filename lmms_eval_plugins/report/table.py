"""The table and the plot of a folder of cells.

Only cells with the same run settings (limit, dtype, ...) are comparable, so each set of settings gets its own
table and plots, written beside the cells as `report[-key=value...].md` and `.png`, and `throughput[-...].png`.
"""

import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file is written; no display is needed

import matplotlib.pyplot as plt
import pandas as pd
from rich.console import Console
from rich.table import Table

from kvcompress.files import locked, replacing, write_text

from ..cells.results import exact, load_cells, settings_name
from .headline import headline
from .metrics import on_front
from .short_answers import too_short, warning


def cell_row(cell: dict[str, Any], metric: str | None = None, metric_filter: str | None = None) -> dict[str, Any]:
    """One cell as a flat row; numbers that the cell lacks are None. `metric` and `metric_filter` choose its score."""
    protocol, efficiency, found = cell["protocol"], cell["efficiency"], headline(cell, metric, metric_filter)
    samples = cell.get("n_questions", cell["n_samples"])
    options = "".join(f" {key}={value}" for key, value in sorted(protocol["changed_options"].items()))

    def median(quantity: str) -> float | None:
        return efficiency.get(quantity, {}).get("median")

    return {
        "task": protocol["task"],
        "series": protocol["method"] + options,
        "method": protocol["method"],
        "ratio": protocol["ratio"],
        "budget": protocol["budget"],
        "realised": efficiency.get("realised_ratio", {}).get("mean"),
        "metric": found.name if found else "",
        "score": found.score if found else None,
        "stderr": found.stderr if found else None,
        "ttft_s": median("ttft_s"),
        "tpot_s": median("tpot_s"),
        "answers_per_s": efficiency.get("answers_per_s"),
        "tokens_per_s": efficiency.get("tokens_per_s"),
        "tokens_per_correct": found.tokens_per_correct if found else None,
        "tokens_out": median("tokens_out"),
        "too_short": too_short(cell),
        "kv_bytes": median("kv_held_bytes"),
        "kv_room_bytes": median("kv_room_bytes"),
        "peak_kv_bytes": efficiency.get("peak_kv_bytes"),
        "samples": samples,
        "scored": samples if found is None or found.questions is None else found.questions,
        "batch_size": protocol["settings"].get("batch_size", 1),
        "slots": protocol["settings"].get("slots"),
        "settings": settings_name(protocol["settings"]),
        "settings_text": ", ".join(f"{key}={value}" for key, value in sorted(protocol["settings"].items())),
    }


def sweep_frame(
    cells: list[dict[str, Any]], metric: str | None = None, metric_filter: str | None = None
) -> pd.DataFrame:
    """All cells as a frame, the full cache first, then by method, from the largest ratio or budget down."""
    frame = pd.DataFrame([cell_row(cell, metric, metric_filter) for cell in cells])
    frame["order"] = frame["method"] != "full"
    frame["size"] = frame["ratio"].fillna(frame["budget"]).astype(float)
    return frame.sort_values(["settings", "order", "series", "size"], ascending=[True, True, True, False])


def score_scale(frame: pd.DataFrame) -> int:
    """100 for a score in [0, 1], shown in percent; 1 for a sum, such as MME's, or a score out of 100."""
    return 1 if (frame["score"].astype(float) > 1).any() else 100


TABLE_COLUMNS = [
    "method", "ratio kept", "{metric}", "TTFT", "per token", "KV cache", "room", "answers/s", "tokens/correct",
    "realised", "questions",
]  # fmt: skip


def table_rows(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and formatted cells, the same for the terminal and for Markdown."""
    header = [column.format(metric=frame["metric"].iloc[0] or "score") for column in TABLE_COLUMNS]
    rows, scale = [], score_scale(frame)
    for row in frame.itertuples():
        size = exact(row.ratio) if pd.notna(row.ratio) else f"budget {row.budget:.0f}"
        score = _number(row.score, "{:.1f}", scale) + (f" ± {scale * row.stderr:.1f}" if pd.notna(row.stderr) else "")
        ttft, tpot = _number(row.ttft_s, "{:.1f} ms", 1e3), _number(row.tpot_s, "{:.1f} ms", 1e3)
        realised = _number(row.realised, "{:.3f}")
        questions = str(row.samples) if row.scored == row.samples else f"{row.scored} of {row.samples}"
        kv = [_bytes(row.kv_bytes), _bytes(row.kv_room_bytes)]
        speed, tokens = _number(row.answers_per_s, "{:.1f}"), _number(row.tokens_per_correct, "{:.1f}")
        rows.append([row.series, size, score, ttft, tpot, *kv, speed, tokens, realised, questions])
    return header, rows


def _number(value: float | None, text: str, factor: float = 1) -> str:
    return "-" if pd.isna(value) else text.format(factor * value)


def _bytes(value: float | None) -> str:
    if pd.isna(value):
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def note(frame: pd.DataFrame) -> str:
    """What the columns mean."""
    batch_size, slots = (str(frame[name].iloc[0]) for name in ("batch_size", "slots"))  # `auto`: as many as fitted
    of_batch = "" if batch_size == "1" else f", of a batch of {batch_size}"
    if slots != "None":
        of_batch = f", with slots={slots}: per token, other requests' prefills included"
    return (
        "Ratio: fraction of the prompt's KV entries that is kept; realised: as measured. TTFT: time to first token; "
        f"per token: time of each further one (medians{of_batch}). KV cache: bytes that hold keys, values and their "
        "index after the prompt, per question (median); room: bytes allocated for the answer. Answers/s: without "
        "preparing prompts; tokens/correct: tokens of all answers over the sum of their scores. A row that names no "
        "other protocol: scope=prompt, ratio_of=prompt, first_token=full."
    )


def markdown_text(text: str) -> str:
    """Text in which Markdown finds no table, code, link, emphasis or HTML of its own."""
    text = re.sub(r"[\\`*|\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(header: list[str], rows: list[list[str]], alignment: list[str]) -> str:
    """`alignment`: `---` or `---:` for each column. Cells are escaped."""
    lines = [[markdown_text(cell) for cell in line] for line in (header, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], alignment, *lines[1:]])


def markdown(frame: pd.DataFrame, title: str) -> str:
    header, rows = table_rows(frame)
    table = markdown_table(header, rows, ["---", *["---:"] * (len(header) - 1)])
    return f"# {markdown_text(title)}\n\n{table}\n{markdown_note(frame)}"


def markdown_note(frame: pd.DataFrame) -> str:
    """What stands under a table: the note, and a warning where answers are too short to show compression."""
    return "\n\n".join(filter(None, [note(frame), markdown_text(warning(frame))])) + "\n"


def terminal_table(frame: pd.DataFrame, title: str) -> Table:
    header, rows = table_rows(frame)
    table = Table(title=title, caption=note(frame))
    for column in header:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_warning(console: Console, line: str) -> None:
    """Print a line that must not be overlooked, if there is one."""
    if line:
        console.print(line, style="yellow", soft_wrap=True, highlight=False)


def plain(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def plot(frame: pd.DataFrame, title: str, path: Path) -> None:
    """Score against ratio (or budget), one line per method with its standard error; the full cache dashed."""
    full, compressed = frame[frame["method"] == "full"], frame[frame["method"] != "full"]
    scale = score_scale(frame)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for row in full.itertuples():
        axes.axhline(scale * row.score, color="black", linestyle="--", linewidth=1.2, label="full cache")
    markers = iter("os^Dv<>pXP*hd" * 8)
    for series, points in compressed.groupby("series", sort=True):
        points = points.sort_values("size")
        axes.errorbar(
            points["size"],
            scale * points["score"],
            yerr=scale * points["stderr"].astype(float),
            marker=next(markers),
            capsize=3,
            linewidth=1.6,
            label=plain(series),
        )
    sizes = sorted(compressed["size"].unique())
    if sizes:
        axes.set_xscale("log")
        axes.set_xticks(sizes, [exact(size) for size in sizes])
        axes.minorticks_off()
    is_budget = compressed["ratio"].isna().any()
    axes.set_xlabel("KV entries kept per layer and head" if is_budget else "ratio of the prompt's KV entries kept")
    axes.set_ylabel(plain(frame["metric"].iloc[0]) + (" (%)" if scale == 100 else ""))
    axes.set_ylim(bottom=0)
    axes.set_title(plain(title), fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format="png")
    plt.close(figure)


def plot_throughput(frame: pd.DataFrame, title: str, path: Path) -> None:
    """Score against answers per second; points named by method and ratio (or budget), their front in grey."""
    frame = frame[frame["score"].notna() & frame["answers_per_s"].notna()]
    frame = frame.assign(shown=score_scale(frame) * frame["score"].astype(float))
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    markers = iter("os^Dv<>pXP*hd" * 8)
    for series, points in frame.groupby("series", sort=False):
        is_full = points["method"].iloc[0] == "full"
        style = {"marker": "*", "s": 130, "color": "black"} if is_full else {"marker": next(markers), "s": 36}
        axes.scatter(points["answers_per_s"], points["shown"], label=plain(series), zorder=3, **style)
    front = frame[on_front(frame["answers_per_s"], frame["score"])].sort_values("answers_per_s")
    axes.plot(front["answers_per_s"], front["shown"], color="grey", linewidth=1.4, zorder=1, label="front")
    axes.set_xlabel("answers per second")
    axes.set_ylabel(plain(frame["metric"].iloc[0]) + (" (%)" if score_scale(frame) == 100 else ""))
    axes.set_xlim(0.8 * frame["answers_per_s"].min(), 1.2 * frame["answers_per_s"].max())
    axes.set_ylim(bottom=min(0, frame["shown"].min()) - 0.04 * frame["shown"].max())
    axes.set_title(plain(title), fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    figure.draw_without_rendering()  # lays it out, so that it is known where the points are
    _name_points(axes, frame)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format="png")
    plt.close(figure)


def _name_points(axes: plt.Axes, frame: pd.DataFrame) -> None:
    """Write the cells' names beside their points, each below what stands there already."""
    size, taken = 7, []
    for row in frame.sort_values("shown", ascending=False).itertuples():
        name = row.method if row.method == "full" else f"{row.method} {exact(row.size)}"
        x, y = axes.transData.transform((row.answers_per_s, row.shown)) * 72 / axes.figure.dpi  # in points, as the text
        width, below = 0.6 * size * len(name), 0.0
        while any(abs(y - below - up) < 1.1 * size and x < right and left < x + width for left, right, up in taken):
            below += 1
        taken.append((x, x + width, y - below))
        axes.annotate(
            plain(name),
            (row.answers_per_s, row.shown),
            textcoords="offset points",
            xytext=(8, -below - size / 3),
            fontsize=size,
        )


def report(
    folder: Path,
    settings: dict[str, Any] | None = None,
    console: Console | None = None,
    metric: str | None = None,
    metric_filter: str | None = None,
) -> list[Path]:
    """Print and write table and plot of the cells under `folder` (results/<task>/<model>).

    Args:
        settings: report only the cells of these run settings; all settings, one after the other, where None.
        metric, metric_filter: the task's metric and answer filter that is shown; the main ones where None.

    Returns:
        The files written.

    Raises:
        FileNotFoundError: there is no finished cell.
    """
    # Where the output is no terminal, rich would fold the table to 80 columns.
    console = console or Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False)
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r} is not a folder with results")
    with locked(folder):  # of two runs in it, the last to report has read all cells
        return _report(folder, settings, console, metric, metric_filter)


def _report(
    folder: Path,
    settings: dict[str, Any] | None,
    console: Console,
    metric: str | None,
    metric_filter: str | None,
) -> list[Path]:
    cells = load_cells(folder)
    if settings is not None:
        cells = [c for c in cells if settings_name(c["protocol"]["settings"]) == settings_name(settings)]
    if not cells:
        raise FileNotFoundError(f"no finished cell under {folder} (expected <method>-<ratio>/results.json)")
    written = []
    for name, frame in sweep_frame(cells, metric, metric_filter).groupby("settings"):
        protocol = cells[0]["protocol"]
        title = f"{protocol['task']}, {protocol['model']}" + (f" ({frame['settings_text'].iloc[0]})" if name else "")
        table_path = folder / ("-".join(filter(None, ["report", name])) + ".md")
        write_text(table_path, markdown(frame, title))
        console.print(terminal_table(frame, title))
        print_warning(console, warning(frame))
        written.append(table_path)
        if frame["score"].notna().any():
            plot(frame, title, table_path.with_suffix(".png"))
            written.append(table_path.with_suffix(".png"))
        if (frame["score"].notna() & frame["answers_per_s"].notna()).sum() > 1:
            written.append(table_path.with_name("-".join(filter(None, ["throughput", name])) + ".png"))
            plot_throughput(frame, title, written[-1])
    for path in written:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return written
