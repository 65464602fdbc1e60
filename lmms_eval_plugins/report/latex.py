"""Tables of cells for papers, in LaTeX with booktabs; long ones with longtable."""

from collections.abc import Sequence

import pandas as pd

from .appearance import score_scale, short_names
from .numbers import near, share
from .table import best_of_sizes, by_layer, note, score_text, table_rows, warnings

PREAMBLE = "% needs \\usepackage{booktabs,longtable}\n\n"
MOST_ROWS = 40  # longer tables break over pages

ESCAPED = {**{character: "\\" + character for character in "&%$#_{}"}, "\\": r"\textbackslash{}"}
ESCAPED |= {"^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "±": r"$\pm$"}
ESCAPED |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}


def escaped(text: str) -> str:
    """Escape all characters that are special in LaTeX."""
    return " ".join(text.split()).translate(str.maketrans(ESCAPED))


def latex_tables(frame: pd.DataFrame, title: str) -> str:
    """Return the table of all cells of a frame, and the table of scores by requested share. Options that all rows of a
    method share are listed in the captions."""
    names, shared = short_names(frame)
    frame, title = frame.assign(series=names), "; ".join(filter(None, [title, shared]))
    header, rows = table_rows(frame)
    caption = " ".join([f"{title}.", note(frame), by_layer(frame), *warnings(frame)])
    cells = environment(list(map(escaped, header)), [list(map(escaped, row)) for row in rows], caption)
    return f"{cells}\n{scores(frame, title)}"


def scores(frame: pd.DataFrame, title: str) -> str:
    """Return a table with a row per series and a column per requested ratio or budget; the full cache has its own row.
    The best score of each column is bold, see `best_of_sizes`."""
    scale = score_scale(frame)
    full, compressed = frame[frame["method"] == "full"], frame[frame["method"] != "full"]
    table = scores_by_size(compressed, scale).map(escaped)
    best = frame[best_of_sizes(frame, scale)]
    for series, size in zip(best["series"], best["asked"], strict=True):
        table.loc[series, size] = f"\\textbf{{{table.loc[series, size]}}}"
    rows = table.rename(index=escaped).reset_index().to_numpy().tolist()
    above = [
        f"full cache & \\multicolumn{{{table.shape[1]}}}{{c}}{{{escaped(score_text(row, scale))}}}"
        for row in full.itertuples()
        if table.shape[1]
    ]
    caption = (
        f"{title}: {frame['metric'].iloc[0] or 'score'} by the requested share of the KV entries; in brackets the "
        "share kept, if it differs. Bold: the best of a column among methods that keep the requested share and "
        "answered all questions."
    )
    return environment(["method", *map(escaped, table.columns)], rows, caption, above)


def scores_by_size(frame: pd.DataFrame, scale: int) -> pd.DataFrame:
    """Return scores as text, a row per series and a column per requested ratio or budget, the largest first. The share
    kept follows in brackets if it differs. Missing cells are empty."""
    sizes = {row.asked: (pd.isna(row.ratio), -row.size) for row in frame.itertuples()}  # budgets after ratios
    columns = sorted(sizes, key=lambda size: sizes[size])
    table = pd.DataFrame("", index=list(dict.fromkeys(frame["series"])), columns=columns, dtype=object)
    for row in frame.itertuples():
        other = "" if near(row.realised, row.ratio) else f" ({share(row.realised)})"
        table.loc[row.series, row.asked] = score_text(row, scale) + other
    return table


def environment(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, above: Sequence[str] = ()) -> str:
    """Return a table with booktabs' rules. Only the caption is escaped here. More than 40 rows break over pages.

    Args:
        above: LaTeX rows that come first, separated from the others by a rule.
    """
    columns, head = "l" + "r" * (len(header) - 1), f"\\toprule\n{' & '.join(header)} \\\\\n\\midrule\n"
    body = "".join(f"{row} \\\\\n" for row in above) + "\\midrule\n" * bool(above and rows)
    body += "".join(f"{' & '.join(row)} \\\\\n" for row in rows) + "\\bottomrule\n"
    named = f"\\caption{{{escaped(caption)}}}"
    if len(rows) > MOST_ROWS:
        first = f"{named} \\\\\n{head}\\endfirsthead\n{head}\\endhead\n"
        return f"\\begin{{longtable}}{{{columns}}}\n{first}{body}\\end{{longtable}}\n"
    tabular = f"\\begin{{tabular}}{{{columns}}}\n{head}{body}\\end{{tabular}}\n"
    return f"\\begin{{table}}\n\\centering\n{named}\n{tabular}\\end{{table}}\n"
