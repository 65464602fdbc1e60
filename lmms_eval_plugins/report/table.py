"""Format the table of cells, one row each, for the terminal and for Markdown."""

import re
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from ..cells.results import exact, settings_name
from .headline import headline
from .numbers import fixed, kept, near, share, shares
from .short_answers import too_short, warning
from .terminal import fitted


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
        "series": " ".join((protocol["method"], *options)),
        "method": protocol["method"],
        "options": options,
        "ratio": protocol["ratio"],
        "budget": protocol["budget"],
        "realised": realised.get("mean"),
        "per_layer": realised.get("per_layer"),
        "metric": found.name if found else "",
        "score": found.score if found else None,
        "stderr": found.stderr if found else None,
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
        "settings": settings_name(protocol["settings"]),
        "settings_text": ", ".join(f"{key}={value}" for key, value in sorted(protocol["settings"].items())),
    }


def sweep_frame(
    cells: list[dict[str, Any]], metric: str | None = None, metric_filter: str | None = None
) -> pd.DataFrame:
    """Return all cells as a frame: the full cache first, then by method, the largest ratio or budget first. `size` is
    the requested ratio or budget; `kept` the realised share of the KV entries, or the ratio if none was measured."""
    frame = pd.DataFrame([cell_row(cell, metric, metric_filter) for cell in cells])
    frame["order"] = frame["method"] != "full"
    frame["size"] = frame["ratio"].fillna(frame["budget"]).astype(float)
    frame["kept"] = frame["realised"].astype(float).fillna(frame["ratio"].astype(float))
    return frame.sort_values(["settings", "order", "series", "size"], ascending=[True, True, True, False])


def score_scale(frame: pd.DataFrame) -> int:
    """Return 100 for scores in [0, 1], which are shown in percent; 1 for sums, such as MME's, or scores out of 100."""
    return 1 if (frame["score"].astype(float) > 1).any() else 100


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
    for row in frame.itertuples():
        ttft, tpot = _number(row.ttft_s, 1, 1e3, " ms"), _number(row.tpot_s, 1, 1e3, " ms")
        questions = str(row.samples) if row.scored == row.samples else f"{row.scored} of {row.samples}"
        kv = [_bytes(row.kv_bytes), _bytes(row.kv_room_bytes)]
        speed, tokens = _number(row.answers_per_s, 1), _number(row.tokens_per_correct, 1)
        size = kept(row.realised, row.ratio, row.budget)
        rows.append([row.series, size, score_text(row, scale), ttft, tpot, *kv, speed, tokens, questions])
    return header, rows


def score_text(row: Any, scale: int) -> str:
    """Format the score of a frame's row, with its standard error if it has one."""
    return _number(row.score, 1, scale) + (f" ± {fixed(scale * row.stderr, 1)}" if pd.notna(row.stderr) else "")


def asked(row: Any) -> str:
    """Format the ratio or budget requested for a frame's row."""
    return exact(row.ratio) if pd.notna(row.ratio) else f"budget {row.budget:.0f}"


def scores_by_size(frame: pd.DataFrame, scale: int) -> pd.DataFrame:
    """Return scores as text, a row per series and a column per requested ratio or budget, the largest first. The share
    kept follows in brackets if it differs. Missing cells are empty."""
    sizes = {asked(row): (pd.isna(row.ratio), -row.size) for row in frame.itertuples()}  # budgets after ratios
    columns = sorted(sizes, key=lambda size: sizes[size])
    table = pd.DataFrame("", index=list(dict.fromkeys(frame["series"])), columns=columns, dtype=object)
    for row in frame.itertuples():
        other = "" if near(row.realised, row.ratio) else f" ({share(row.realised)})"
        table.loc[row.series, asked(row)] = score_text(row, scale) + other
    return table


def short_names(frame: pd.DataFrame) -> tuple[list[str], str]:
    """Return each row's method with the options that not all rows of the method share; and the shared options in one
    text: `first_token=compressed; adakv, snapkv: window_size=8`."""
    shared = {
        method: [option for option in rows.iloc[0] if all(option in own for own in rows)]
        for method, rows in frame.groupby("method", sort=False)["options"]
    }
    names = [
        " ".join([row.method, *(option for option in row.options if option not in shared[row.method])])
        for row in frame.itertuples()
    ]
    methods_of: dict[str, list[str]] = {}
    for method, option in ((method, option) for method, own in shared.items() for option in own):
        methods_of.setdefault(option, []).append(method)
    options_of: dict[str, list[str]] = {}
    compressed = set(shared) - {"full"}
    for option, methods in methods_of.items():
        whose = "" if compressed and compressed.issubset(methods) else ", ".join(methods) + ": "
        options_of.setdefault(whose, []).append(option)
    return names, "; ".join(whose + " ".join(options_of[whose]) for whose in sorted(options_of))


def by_layer(frame: pd.DataFrame) -> str:
    """Return the shares by layer for rows that keep a different share than requested, such as methods that drop tokens
    after a layer: `fastv 0.499 (0.1): 1.000 in layers 0 to 1, 0.165 in layers 2 to 4`. Empty if there are none."""
    lines = [
        f"{row.series} {kept(row.realised, row.ratio)}: {layers}"
        for row in frame.itertuples()
        if not near(row.realised, row.ratio) and isinstance(row.per_layer, list) and (layers := shares(row.per_layer))
    ]
    return "Kept by layer: " + "; ".join(lines) + "." if lines else ""


def _number(value: float | None, digits: int, factor: float = 1, unit: str = "") -> str:
    return "-" if pd.isna(value) else fixed(factor * value, digits) + unit


def _bytes(value: float | None) -> str:
    if pd.isna(value):
        return "-"
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if value < 1024:
            return f"{fixed(value, digits)} {unit}"
        value /= 1024
    return f"{fixed(value, 2)} GiB"


def note(frame: pd.DataFrame) -> str:
    """Explain the columns."""
    of_draws = " draws=N: mean of N seeds, ± their standard deviation." if (frame["draws"] > 1).any() else ""
    batch_size, slots = (str(frame[name].iloc[0]) for name in ("batch_size", "slots"))  # `auto`: as many as fit
    of_batch = "" if batch_size == "1" else f", of batches of up to {batch_size}"
    if slots != "None":
        of_batch = f", with slots={slots}: per token, other requests' prefills included"
    return (
        "Kept: measured share of the prompt's KV entries that is kept; in brackets the share or budget asked for, if "
        "it is a budget or differs by more than 0.01 or a tenth. TTFT: time to first token; per token: time of each "
        f"later token (medians{of_batch}). KV cache: bytes that hold keys, values and their index after the prompt, "
        "per question (median); room: bytes allocated for the answer. Answers/s: without preparing prompts; "
        "tokens/correct: tokens of all answers over the sum of their scores. Unless stated otherwise: scope=prompt, "
        f"ratio_of=prompt, first_token=full.{of_draws}"
    )


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


def markdown_note(frame: pd.DataFrame) -> str:
    """Return the text under a table: the note, the shares by layer if they say more than the table, and a warning if
    answers are too short to show compression."""
    lines = [note(frame), markdown_text(by_layer(frame)), markdown_text(warning(frame))]
    return "\n\n".join(filter(None, lines)) + "\n"


def terminal_table(frame: pd.DataFrame, title: str, width: int, elsewhere: str) -> Table:
    """Return the table for a terminal of `width` columns. `elsewhere`: the file that has all columns."""
    header, rows = table_rows(frame)
    names, shared = short_names(frame)
    rows = [[name, *row[1:]] for name, row in zip(names, rows, strict=True)]
    title = "\n".join(filter(None, [title, shared]))
    return fitted(width, header, rows, title, note(frame), droppable=DROPPABLE, elsewhere=elsewhere)


def print_warning(console: Console, line: str) -> None:
    """Print a warning conspicuously, unless it is empty."""
    if line:
        console.print(line, style="yellow", soft_wrap=True, highlight=False)
