"""Write tables for papers and spreadsheets: Markdown, LaTeX (booktabs), CSV and parquet."""

from pathlib import Path

import pandas as pd

from kvcompress.files import replacing, write_text

from ..against import MARGIN, against_full, columns, explanation
from ..appearance import score_scale
from ..draws import pooled
from ..groups import QUESTION, Group
from ..latex import PREAMBLE, latex_tables, scores_by_size
from ..numbers import kept
from ..table import KEPT, markdown, markdown_table, markdown_text


def write_tables(groups: list[Group], folder: Path) -> list[Path]:
    """Write tables.md, tables.tex, cells.csv, cells.parquet, samples.csv and samples.parquet; return their paths."""
    texts = {
        "tables.md": "\n".join(markdown_group(group) for group in groups),
        "tables.tex": PREAMBLE + "\n".join(latex_tables(pooled(group.frame), group.title) for group in groups),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    frames = {"cells": cells_table(groups), "samples": samples_table(groups)}
    for name, frame in frames.items():
        write_text(folder / f"{name}.csv", frame.to_csv(index=False))
        with replacing(folder / f"{name}.parquet") as draft:
            frame.to_parquet(draft, index=False)
    return [*(folder / name for name in texts), *(folder / f"{n}.{s}" for n in frames for s in ("csv", "parquet"))]


def cells_table(groups: list[Group]) -> pd.DataFrame:
    """Join the cells of all groups in one frame."""
    # No plain values, or said by other columns.
    inner = ["order", "options", "per_layer", "kept", "asked", "definition", "questions"]
    parts = []
    for group in groups:
        tests = against_full(group.frame)[["difference", "low", "high", "p_value", "holm", "broken", "mended"]]
        frame = group.frame.drop(columns=inner).assign(model=group.model)
        for name in ("batch_size", "slots"):  # a number or "auto", which one column of a Parquet file cannot hold
            frame[name] = [str(each) if pd.notna(each) else None for each in frame[name]]
        parts.append(frame.join(tests.add_prefix("against_full_")))
    return pd.concat(parts, ignore_index=True)


def samples_table(groups: list[Group]) -> pd.DataFrame:
    """Join the questions of all cells in one frame, each with its group's task, model and settings."""
    parts = [
        row.questions.reset_index().assign(
            group=group.task, model=group.model, settings=row.settings, series=row.series, size=row.size
        )
        for group in groups
        for row in group.frame.itertuples()
    ]
    return pd.concat(parts, ignore_index=True)[["group", "model", "settings", "series", "size", *QUESTION]]


def markdown_group(group: Group) -> str:
    """Return the table of all cells, and the table of scores by requested share."""
    frame = pooled(group.frame).reset_index(drop=True)
    table = scores_by_size(frame, score_scale(frame))
    rows = table.reset_index().to_numpy().tolist()
    pivot = markdown_table(["method", *table.columns], rows, ["---", *["---:"] * table.shape[1]])
    metric = frame["metric"].iloc[0] or "score"
    about = f"{markdown_text(metric)} by the share that was requested; in brackets the share kept, if it differs:"
    return f"{markdown(frame, group.title)}\n{about}\n\n{pivot}{markdown_tests(frame)}"


def markdown_tests(frame: pd.DataFrame) -> str:
    """Return the table of tests against the full cache; empty if nothing can be compared."""
    tests = against_full(frame).assign(answered=frame["samples"])
    if tests["difference"].isna().all():
        return ""
    header, rows = columns(tests, MARGIN)
    shown = [
        [cell.series, kept(cell.realised, cell.ratio, cell.budget), *row]
        for cell, row in zip(frame.itertuples(), rows, strict=True)
        if cell.method != "full"
    ]
    table = markdown_table(["method", KEPT, *header], shown, ["---", *["---:"] * (len(header) + 1)])
    return f"\nAgainst the full cache:\n\n{table}\n{markdown_text(explanation(tests, MARGIN))}\n"
