"""Tables for papers and spreadsheets: Markdown, LaTeX (booktabs), CSV and parquet."""

from pathlib import Path

import pandas as pd

from kvcompress.files import replacing, write_text

from ...cells.results import exact
from ..short_answers import warning
from ..table import markdown, markdown_table, markdown_text, note, score_scale, table_rows
from .groups import Group, cells_table, samples_table


def write_tables(groups: list[Group], folder: Path) -> list[Path]:
    """Write tables.md, tables.tex, cells.csv, cells.parquet, samples.csv and samples.parquet; returns them."""
    texts = {
        "tables.md": "\n".join(markdown_group(group) for group in groups),
        "tables.tex": "% needs \\usepackage{booktabs}\n\n" + "\n".join(latex_group(group) for group in groups),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    frames = {"cells": cells_table(groups), "samples": samples_table(groups)}
    for name, frame in frames.items():
        write_text(folder / f"{name}.csv", frame.to_csv(index=False))
        with replacing(folder / f"{name}.parquet") as draft:
            frame.to_parquet(draft, index=False)
    return [*(folder / name for name in texts), *(folder / f"{n}.{s}" for n in frames for s in ("csv", "parquet"))]


def by_size(group: Group) -> pd.DataFrame:
    """Scores with one row per method and one column per ratio or budget, largest first; `full` has one score."""
    frame, scale = group.frame, score_scale(group.frame)
    scores = [
        f"{scale * row.score:.1f}" + (f" ± {scale * row.stderr:.1f}" if pd.notna(row.stderr) else "")
        if pd.notna(row.score)
        else "-"
        for row in frame.itertuples()
    ]
    shown = frame.assign(shown=scores)
    table = shown.pivot_table(index="series", columns="size", values="shown", aggfunc="first", sort=False)
    table = table[sorted(table.columns, reverse=True)].fillna("")
    table.columns = [exact(size) for size in table.columns]
    return table.reset_index().rename(columns={"series": "method"})


def markdown_group(group: Group) -> str:
    """The table of all cells, and that of the scores by ratio."""
    table = by_size(group)
    alignment = ["---", *["---:"] * (table.shape[1] - 1)]
    pivot = markdown_table(list(table.columns), table.values.tolist(), alignment)
    metric = group.frame["metric"].iloc[0] or "score"
    return f"{markdown(group.frame, group.title)}\n{markdown_text(metric)} by what is kept:\n\n{pivot}"


def latex_group(group: Group) -> str:
    """The same two tables in LaTeX, with booktabs' rules."""
    header, rows = table_rows(group.frame)
    return (
        latex(pd.DataFrame(rows, columns=header), f"{group.title}. {note(group.frame)} {warning(group.frame)}".strip())
        + "\n"
        + latex(by_size(group), f"{group.title}: {header[2]} by what is kept.")
    )


def latex(frame: pd.DataFrame, caption: str) -> str:
    """A table environment; text is escaped."""
    names = {name: _escaped(str(name)) for name in frame.columns}
    style = frame.rename(columns=names).style.hide(axis="index").format(escape="latex")
    text = style.to_latex(
        hrules=True,
        column_format="l" + "r" * (frame.shape[1] - 1),
        caption=_escaped(caption),
        position_float="centering",
    )
    return text.replace("±", "$\\pm$")


LATEX = {**{character: "\\" + character for character in "&%$#_{}"}, "\\": r"\textbackslash "}
LATEX |= {"^": r"\textasciicircum ", "~": r"\textasciitilde "}


def _escaped(text: str) -> str:
    return " ".join(text.split()).translate(str.maketrans(LATEX))
