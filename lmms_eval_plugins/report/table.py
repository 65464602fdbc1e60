"""The table of a folder of cells (results/<task>/<model>): each cell's headline score, its row, the text and the plots.

Only cells with the same run settings (limit, dtype, ...) are comparable, so each set of settings gets its own
table and plots, written beside the cells as `report[-key=value...].md` and `.png`, and `throughput[-...].png`.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from kvcompress.files import locked, write_text

from ..cells.results import dumps, exact, load_cells, settings_name
from . import terminal
from .appearance import score_scale, short_names
from .draws import explanation, pooled
from .gate import most_questions, not_alike
from .headline import headline, why_none
from .numbers import fixed, kept, near, shares, text_of
from .short_answers import too_short, warning
from .terminal import fitted


def report(
    folder: Path,
    settings: dict[str, Any] | None = None,
    console: Console | None = None,
    metric: str | None = None,
    metric_filter: str | None = None,
) -> list[Path]:
    """Print and write the table and plots of the cells in `folder` (results/<task>/<model>).

    Args:
        settings: report only cells with these run settings; default: each set of settings in turn.
        metric, metric_filter: the metric and answer filter to show; default: the task's main ones.

    Returns:
        The files written.

    Raises:
        FileNotFoundError: there is no finished cell.
    """
    console = console or terminal.console()
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r} is not a folder with results")
    from .plots import plot, plot_throughput  # takes a second

    written = []
    with locked(folder):  # if two runs share it, the last report covers all cells
        cells = load_cells(folder)
        if settings is not None:
            cells = [c for c in cells if settings_name(c["protocol"]["settings"]) == settings_name(settings)]
        if not cells:
            raise FileNotFoundError(f"no finished cell under {folder} (expected <method>-<ratio>/results.json)")
        for name, frame in pooled(sweep_frame(cells, metric, metric_filter)).groupby("settings"):
            title = title_of(frame[["task", "model", "settings_text"]].iloc[0])
            table_path = folder / ("-".join(filter(None, ["report", name])) + ".md")
            write_text(table_path, markdown(frame, title))
            console.print(terminal_table(frame, title, console.width, table_path.name))
            if (metric or metric_filter) and frame["score"].isna().all():
                print_warning(console, f"{title}: {why_none(cells[0], metric, metric_filter)}")
            for line in warnings(frame):
                print_warning(console, line)
            written.append(table_path)
            if frame["score"].notna().any():
                written.append(table_path.with_suffix(".png"))
                plot(frame, title, written[-1])
            if (frame["score"].notna() & frame["answers_per_s"].notna()).sum() > 1:
                written.append(table_path.with_name("-".join(filter(None, ["throughput", name])) + ".png"))
                plot_throughput(frame, title, written[-1])
        for path in written:
            console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return written


# -- the row of a cell


def cell_row(cell: dict[str, Any], metric: str | None = None, metric_filter: str | None = None) -> dict[str, Any]:
    """Return a cell as a flat row, with None for missing numbers. `metric` and `metric_filter` choose its score."""
    protocol, efficiency, found = cell["protocol"], cell["efficiency"], headline(cell, metric, metric_filter)
    samples = cell.get("n_questions", cell["n_samples"])
    options = tuple(f"{key}={value}" for key, value in sorted(protocol["changed_options"].items()))
    realised = efficiency.get("realised_ratio", {})

    def median(quantity: str) -> float | None:
        return efficiency.get(quantity, {}).get("median")

    return {
        "task": protocol["task"],
        "model": protocol["model"],
        "series": " ".join((protocol["method"], *options)),
        "method": protocol["method"],
        "options": options,
        "ratio": protocol["ratio"],
        "budget": protocol["budget"],
        "asked": exact(protocol["ratio"]) if protocol["ratio"] is not None else f"budget {protocol['budget']:.0f}",
        "realised": realised.get("mean"),
        "per_layer": realised.get("per_layer"),
        "metric": found.name if found else "",
        "score": found.score if found else None,
        "stderr": found.stderr if found else None,
        "is_lower_better": bool(found and found.is_lower_better),
        "draws": 1,
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
        **{name: cell.get("environment", {}).get(name) for name in ("device", "processes", "versions")},
        "definition": definition(cell),
        "settings": settings_name(protocol["settings"]),
        "settings_text": ", ".join(f"{key}={value}" for key, value in sorted(protocol["settings"].items())),
    }


def definition(cell: dict[str, Any]) -> str:
    """Return a digest of how the cell's task asks and scores; empty if the cell does not record it."""
    tasks = cell.get("fingerprint", {}).get("tasks")
    return hashlib.sha256(dumps(tasks).encode()).hexdigest()[:8] if tasks else ""


def sweep_frame(
    cells: list[dict[str, Any]], metric: str | None = None, metric_filter: str | None = None
) -> pd.DataFrame:
    """Return all cells as a frame: the full cache first, then by method, the largest ratio or budget first. `size` is
    the requested ratio or budget, `asked` the same as text (`0.2`, `budget 64`); `kept` the realised share of the KV
    entries, or the ratio if none was measured."""
    frame = pd.DataFrame([cell_row(cell, metric, metric_filter) for cell in cells])
    frame["order"] = frame["method"] != "full"
    frame["size"] = frame["ratio"].fillna(frame["budget"]).astype(float)
    frame["kept"] = frame["realised"].astype(float).fillna(frame["ratio"].astype(float))
    return frame.sort_values(["settings", "order", "series", "size"], ascending=[True, True, True, False])


# -- the text of the table


def title_of(key: Sequence[str]) -> str:
    """Return the title of the cells of a task, a model and settings."""
    task, model, settings = key
    return f"{task}, {model}" + (f" ({settings})" if settings else "")


KEPT = "kept (asked)"
TABLE_COLUMNS = [
    "method", KEPT, "{metric}", "TTFT", "per token", "KV cache", "room", "answers/s", "tokens/correct", "questions",
]  # fmt: skip
# Columns that a narrow terminal omits, the least important first.
DROPPABLE = ("room", "questions", "tokens/correct", "TTFT", "per token", "answers/s", "KV cache")


def table_rows(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return header and formatted rows, the same for the terminal and for Markdown."""
    header = [column.format(metric=frame["metric"].iloc[0] or "score") for column in TABLE_COLUMNS]
    rows, scale = [], score_scale(frame)
    for row, most in zip(frame.itertuples(), most_questions(frame), strict=True):
        ttft, tpot = text_of(row.ttft_s, 1, 1e3, " ms"), text_of(row.tpot_s, 1, 1e3, " ms")
        questions = str(row.scored) if row.scored == most else f"{row.scored} of {most}"
        kv = [_bytes(row.kv_bytes), _bytes(row.kv_room_bytes)]
        speed, tokens = text_of(row.answers_per_s, 1), text_of(row.tokens_per_correct, 1)
        size = kept(row.realised, row.ratio, row.budget)
        rows.append([row.series, size, score_text(row, scale), ttft, tpot, *kv, speed, tokens, questions])
    return header, rows


def score_text(row: Any, scale: int) -> str:
    """Format the score of a frame's row, with its standard error if it has one."""
    return text_of(row.score, 1, scale) + (f" ± {fixed(scale * row.stderr, 1)}" if pd.notna(row.stderr) else "")


def best_of_sizes(frame: pd.DataFrame, scale: int) -> list[bool]:
    """Return which cells have the best score of their requested size after rounding, so that all equal ones do.

    Only cells that keep the requested share and have all questions compete, and not `hindsight`, which knows the
    answer."""
    compressed = frame["method"] != "full"
    most = frame["scored"][compressed].max()
    shown = [
        float(fixed(scale * row.score, 1))
        if near(row.realised, row.ratio) and row.scored == most and row.method != "hindsight" and pd.notna(row.score)
        else math.nan
        for row in frame.itertuples()
    ]
    scores = pd.Series(shown, index=frame.index).where(compressed) * frame["is_lower_better"].map({True: -1, False: 1})
    return scores.eq(scores.groupby(frame["asked"]).transform("max")).tolist()


def by_layer(frame: pd.DataFrame) -> str:
    """Return the shares by layer for rows that keep a different share than requested, such as methods that drop tokens
    after a layer: `fastv 0.499 (0.1): 1.000 in layers 0 to 1, 0.165 in layers 2 to 4`. Empty if there are none."""
    lines = [
        f"{row.series} {kept(row.realised, row.ratio)}: {layers}"
        for row in frame.itertuples()
        if not near(row.realised, row.ratio) and isinstance(row.per_layer, list) and (layers := shares(row.per_layer))
    ]
    return "Kept by layer: " + "; ".join(lines) + "." if lines else ""


def _bytes(value: float | None) -> str:
    if pd.isna(value):
        return "-"
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if value < 1024:
            return f"{fixed(value, digits)} {unit}"
        value /= 1024
    return f"{fixed(value, 2)} GiB"


def _values(column: pd.Series) -> str:
    """Return a column's different values as a text; `auto`: as many as fit."""
    return " or ".join(dict.fromkeys(value if isinstance(value, str) else str(int(value)) for value in column))


def note(frame: pd.DataFrame) -> str:
    """Explain the columns."""
    in_flight = frame["slots"].notna()
    of_batch = ""
    if (sizes := _values(frame["batch_size"][~in_flight])) not in ("", "1"):
        of_batch += f", of batches of up to {sizes}"
    if slots := _values(frame["slots"][in_flight]):
        of_batch += f", with slots={slots}: per token, other requests' prefills included"
    return (
        "Kept: measured share of the prompt's KV entries that is kept; in brackets the share or budget asked for, if "
        "it is a budget or differs by more than 0.01 or a tenth. TTFT: time to first token; per token: time of each "
        f"later token (medians{of_batch}). KV cache: bytes that hold keys, values and their index after the prompt, "
        "per question (median); room: bytes allocated for the answer. Answers/s: without preparing prompts; "
        "tokens/correct: tokens of all answers over the sum of their scores. Unless stated otherwise: scope=prompt, "
        f"ratio_of=prompt, first_token=full. {explanation(frame)}"
    ).rstrip()


def markdown_text(text: str) -> str:
    """Escape text so that Markdown finds no table, code, link, emphasis or HTML in it."""
    text = re.sub(r"[\\`*|\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(header: list[str], rows: list[list[str]], alignment: list[str]) -> str:
    """Return a Markdown table with escaped cells; `alignment`: `---` or `---:` for each column."""
    lines = [[markdown_text(cell) for cell in line] for line in (header, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], alignment, *lines[1:]])


def markdown(frame: pd.DataFrame, title: str) -> str:
    header, rows = table_rows(frame)
    table = markdown_table(header, rows, ["---", *["---:"] * (len(header) - 1)])
    return f"# {markdown_text(title)}\n\n{table}\n{markdown_note(frame)}"


def warnings(frame: pd.DataFrame) -> list[str]:
    """Return the lines of `not_alike`, and one of answers too short to show compression, where they apply."""
    return [*not_alike(frame), *filter(None, [warning(frame)])]


def markdown_note(frame: pd.DataFrame) -> str:
    """Return the text under a table: the note, the shares by layer if they say more than the table, and warnings."""
    lines = [note(frame), *map(markdown_text, (by_layer(frame), *warnings(frame)))]
    return "\n\n".join(filter(None, lines)) + "\n"


def terminal_table(frame: pd.DataFrame, title: str, width: int, elsewhere: str) -> Table:
    """Return the table for a terminal of `width` columns. `elsewhere`: the file that has all columns."""
    header, rows = table_rows(frame)
    names, shared = short_names(frame)
    rows = [[name, *row[1:]] for name, row in zip(names, rows, strict=True)]
    title = "\n".join(filter(None, [title, shared]))
    return fitted(width, header, rows, title, note(frame), droppable=DROPPABLE, elsewhere=elsewhere)


def print_warning(console: Console, line: str) -> None:
    """Print a warning conspicuously."""
    console.print(line, style="yellow", soft_wrap=True, highlight=False)
