"""Compare the cells of one table with a reference, on the questions that both answered."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pandas as pd

from .numbers import fixed, text_of
from .significance import holm, least_difference, paired_test, questions_needed

MARGIN = 2.0  # points


def against(pairs: Sequence[tuple[pd.DataFrame, pd.DataFrame] | None], margin: float = MARGIN) -> pd.DataFrame:
    """Compare the scores of cells with those of their references.

    Args:
        pairs: the questions of each cell and of its reference, by (task, doc_id), with the columns `score`, `cluster`
            and `tokens_out`; None for a cell without a reference.
        margin: the loss that does not matter, in points, above 0.

    Returns:
        A row per pair, NaN without a reference or a question in common, or if the metric is not a number per question.
        All columns are floats:
        questions, clusters: in common.
        difference, low, high: mean score minus the reference's, with 95 % interval, in points.
        deviation: of a question's difference, see `Comparison`.
        p_value, holm: that it differs; the same corrected by Holm's method for all rows.
        not_worse: 1 if the interval lies above -margin, else 0.
        broken, mended: questions that the reference has right (a score of at least 0.5) and the cell wrong, and the
        other way round; NaN if scores are not in [0, 1].
        tokens_out, reference_tokens_out: mean tokens of an answer.
        detects: the least difference that so many questions show with a power of 80 %, in points.
        needed: questions that show a difference of `margin`, likewise.
    """
    rows = [{} if pair is None else _row(*pair, margin) for pair in pairs]
    frame = pd.DataFrame(rows, columns=COLUMNS).astype(float)
    return frame.assign(holm=holm(frame["p_value"]))


def against_full(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what `against` says of each cell and the first one of the full cache; NaN if there is none, or for a
    metric of which less is better.

    Args:
        frame: of a `groups.Group`.
    """
    first = frame.iloc[0]
    return against(
        [
            (row.questions, first["questions"])
            if first["method"] == "full" and row.method != "full" and not row.is_lower_better
            else None
            for row in frame.itertuples()
        ]
    )


COLUMNS = (
    "questions", "clusters", "difference", "low", "high", "p_value", "deviation", "holm", "not_worse",
    "broken", "mended", "tokens_out", "reference_tokens_out", "detects", "needed",
)  # fmt: skip


def _row(own: pd.DataFrame, reference: pd.DataFrame, margin: float) -> dict[str, float]:
    common = own.index.intersection(reference.index)
    own, reference = own.loc[common], reference.loc[common]
    a, b = own["score"].astype(float), reference["score"].astype(float)
    if not len(common) or a.isna().any() or b.isna().any():
        return {}
    is_share = min(a.min(), b.min()) >= 0 and max(a.max(), b.max()) <= 1
    scale = 100 if is_share else 1
    # A cell of an earlier version does not know the pictures, but the other may.
    clusters = min(own["cluster"], reference["cluster"], key=pd.Series.nunique)
    found = paired_test(a, b, clusters)
    names = ("difference", "low", "high", "deviation")
    found = replace(found, **{name: scale * getattr(found, name) for name in names})
    return {
        **asdict(found),
        "not_worse": float(found.low > -margin),
        "broken": ((b >= 0.5) & (a < 0.5)).sum() if is_share else math.nan,
        "mended": ((a >= 0.5) & (b < 0.5)).sum() if is_share else math.nan,
        "tokens_out": own["tokens_out"].mean(),
        "reference_tokens_out": reference["tokens_out"].mean(),
        "detects": least_difference(found.questions, found.deviation),
        "needed": questions_needed(margin, found.deviation),
    }


def columns(tests: pd.DataFrame, margin: float, has_power: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return header and formatted rows of what `against` returns, `-` where it is NaN.

    Args:
        tests: also with the column `answered`, how many questions the cell answered.
        has_power: whether to show what so many questions detect.
    """
    header = ["questions", "difference", "95 % interval", "p", "p (Holm)", f"not worse by {margin:g}"]
    header += ["broken", "mended", "tokens/answer", *(["detects", f"questions for {margin:g}"] if has_power else [])]
    rows = []
    for row in tests.itertuples():
        if math.isnan(row.questions):
            rows.append(["-"] * len(header))
            continue
        count = f"{row.questions:.0f}" + ("" if row.questions == row.answered else f" of {row.answered}")
        interval = f"[{signed(row.low)}, {signed(row.high)}]"
        cells = [count, signed(row.difference), interval, text_of_p(row.p_value), text_of_p(row.holm)]
        cells.append("yes" if row.not_worse else "not shown")
        cells += [text_of(value, 0) for value in (row.broken, row.mended)]
        cells.append(f"{fixed(row.tokens_out, 1)} ({fixed(row.reference_tokens_out, 1)})")
        if has_power:
            cells += [fixed(row.detects, 1), f"{row.needed:.0f}"] if row.deviation else ["-", "-"]
        rows.append(cells)
    return header, rows


def explanation(
    tests: pd.DataFrame,
    margin: float,
    has_power: bool = False,
    method: str = "the method",
    reference: str = "the reference",
) -> str:
    """Return the text under a table of `columns`, in which `method` is compared with `reference`."""
    known = tests[tests["clusters"].notna()]
    together = known[known["clusters"] < known["questions"]]
    text = (
        "In points, on the questions that both answered. p (Holm): corrected for all rows of the table. "
        f"Not worse by {margin:g}: whether the interval lies above -{margin:g}. Broken: right with {reference}, "
        f"wrong with {method}; mended: the other way round. "
        f"Tokens/answer: mean; in brackets that of {reference}."
    )
    if len(together):
        text += f" Questions about the same belong together: {together['clusters'].min():.0f} clusters."
    if has_power:
        text += f" Detects: the difference found with a power of 80 %; questions for {margin:g}: how many it takes."
    return text


def signed(points: float) -> str:
    return ("+" if points > 0 else "") + fixed(points, 1)


def text_of_p(p_value: float) -> str:
    return "<0.0001" if p_value < 0.0001 else fixed(p_value, 4)
