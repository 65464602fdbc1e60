"""Plot a table of cells: score against the share kept, and score against answers per second."""

import textwrap
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvcompress.files import replacing

from .appearance import colour, markers, score_scale, short_names
from .metrics import on_front

MOST_COLOURED = 12  # series; if there are more, only those on the front are coloured and named
SIZE = (6.6, 4.6)  # inches of the axes with their labels
GREY = "#c4c4c4"


def plain(text: str) -> str:
    """Escape text so that matplotlib finds no formula in it."""
    return text.replace("$", r"\$")


def wrapped(text: str, inches: float, points: float) -> str:
    """Wrap text to lines of about `inches`, at a font size of `points`, escaped as `plain` does."""
    return plain("\n".join(textwrap.wrap(text, max(8, int(72 * inches / (0.6 * points))))))


def plot(frame: pd.DataFrame, title: str, path: Path) -> None:
    """Plot score against the share of KV entries kept, a line per series with standard errors; the full cache is black
    and dashed."""
    frame = _prepared(frame)
    full, compressed = frame[frame["method"] == "full"], frame[(frame["method"] != "full") & (frame["kept"] > 0)]
    compressed = compressed.assign(front=_front(compressed, 1 / compressed["kept"]))
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for row in full.itertuples():
        axes.axhline(row.shown, color="black", linestyle="--", linewidth=1.2, label="full cache")
    styles = _styles(compressed)
    for series, points in compressed.sort_values("kept").groupby("series", sort=True):
        x, y = points["kept"], points["shown"]
        if series in styles:
            label = plain(points["name"].iloc[0])
            error = points["error"]
            axes.errorbar(x, y, yerr=error, capsize=3, linewidth=1.6, label=label, zorder=3, **styles[series])
        else:
            axes.plot(x, y, color=GREY, marker=".", linewidth=0.8, zorder=1)
    if others := _others(compressed, styles):
        axes.errorbar([], [], color=GREY, marker=".", linewidth=0.8, label=others)
    if len(compressed):
        least, most = compressed["kept"].min(), compressed["kept"].max()
        axes.set_xscale("log")
        axes.set_xlim(least / 1.25, most * 1.25)
        round_numbers = [digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5)]
        ticks = [number for number in round_numbers if least / 1.25 <= number <= most * 1.25]
        ticks = ticks if len(ticks) > 1 else sorted({least, most})
        axes.set_xticks(ticks, [f"{number:.3g}" for number in ticks])
        axes.minorticks_off()
    axes.set_xlabel("share of the prompt's KV entries kept, as measured")
    spread = " ± standard error (draws: deviation)" if (frame["draws"] > 1).any() else " ± standard error"
    _finish(figure, axes, frame, title, path, spread if compressed["error"].notna().any() else "")


def plot_throughput(frame: pd.DataFrame, title: str, path: Path) -> None:
    """Plot score against answers per second. Points are labelled with method and share kept; grey rings and a line mark
    the front."""
    frame = _prepared(frame[frame["answers_per_s"].notna()])
    frame = frame.assign(front=_front(frame, frame["answers_per_s"]))
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    styles = _styles(frame)
    for series, points in frame.groupby("series", sort=False):
        x, y = points["answers_per_s"], points["shown"]
        if points["method"].iloc[0] == "full":
            axes.scatter(x, y, marker="*", s=130, color="black", zorder=4, label="full cache")
        elif series in styles:
            axes.scatter(x, y, s=36, zorder=3, label=plain(points["name"].iloc[0]), **styles[series])
        else:
            axes.scatter(x, y, s=14, color=GREY, zorder=2)
    if others := _others(frame, styles):
        axes.scatter([], [], s=14, color=GREY, label=others)
    front = frame[frame["front"]].sort_values("answers_per_s")
    ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none"}
    axes.plot(front["answers_per_s"], front["shown"], color="grey", linewidth=1.4, zorder=1, label="front", **ring)
    axes.set_xlabel("answers per second")
    axes.set_xlim(0.8 * frame["answers_per_s"].min(), 1.2 * frame["answers_per_s"].max())
    is_named = frame["series"].isin(styles) if frame["series"].nunique() <= MOST_COLOURED else frame["front"]
    _finish(figure, axes, frame, title, path, named=frame[is_named | (frame["method"] == "full")])


def _prepared(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the cells that have a score, adding the plotted values `shown` and `error`, and `name` for the legend."""
    frame, scale = frame[frame["score"].notna()], score_scale(frame)
    shown, error = (scale * frame[name].astype(float) for name in ("score", "stderr"))
    return frame.assign(shown=shown, error=error, name=short_names(frame)[0])


def _front(frame: pd.DataFrame, gains: pd.Series) -> pd.Series:
    """Return which cells are on the front, leaving out `hindsight`, which knows the answer."""
    own = frame["method"] != "hindsight"
    front = pd.Series(False, index=frame.index)
    front[own] = on_front(gains[own], frame["shown"][own] * (-1 if frame["is_lower_better"].any() else 1))
    return front


def _styles(frame: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return colour and marker of the series that are not grey: all of them, or, if there are many, those on the front
    and `hindsight`, the upper bound."""
    own = frame[frame["method"] != "full"].sort_values("series")
    if own["series"].nunique() > MOST_COLOURED:
        own = own[own["series"].isin(own["series"][own["front"]]) | (own["method"] == "hindsight")]
    methods = dict(zip(own["series"], own["method"], strict=True))
    marker = markers(methods)
    return {series: {"color": colour(method), "marker": marker[series]} for series, method in methods.items()}


def _others(frame: pd.DataFrame, styles: dict[str, dict[str, str]]) -> str:
    """Return the legend's label for the grey series; empty if there are none."""
    grey = frame[(frame["method"] != "full") & ~frame["series"].isin(styles)]
    count = grey["series"].nunique()
    what = "other methods" if count == grey["method"].nunique() else "others"
    return f"{count} {what}" if count else ""


def _finish(
    figure: Figure,
    axes: Axes,
    frame: pd.DataFrame,
    title: str,
    path: Path,
    errors: str = "",
    named: pd.DataFrame | None = None,
) -> None:
    """Add the title, what the scores are with `errors`, a legend beside the axes on an enlarged canvas, and labels of
    points; write the file."""
    axes.set_ylabel(plain(frame["metric"].iloc[0]) + (" (%)" if score_scale(frame) == 100 else "") + errors)
    low, high = min(0, frame["shown"].min()), (frame["shown"] + frame["error"].fillna(0)).max()
    high = max(high, 0) if low < 0 else high or 1  # scores of 0 alone need a scale, too
    space = 0.04 * (high - low)
    axes.set_ylim(low - space, high + space)
    lines = [line for part in (title, short_names(frame)[1]) for line in textwrap.wrap(part, 70)]
    axes.set_title(plain("\n".join(lines)), fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    labels = [textwrap.fill(label, 44) for label in labels]
    legend = figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    width, height = (length / figure.dpi for length in legend.get_window_extent().size)
    figure.set_size_inches(SIZE[0] + width, max(SIZE[1] + 0.15 * len(lines), height + 0.3))
    if named is not None:
        figure.get_layout_engine().execute(figure)  # which fixes the positions of the points
        _name_points(axes, named, frame)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format="png")


def _name_points(axes: Axes, frame: pd.DataFrame, every: pd.DataFrame) -> None:
    """Label points with their cells' names inside the axes, moving a label down or up where it would overlap something.

    Args:
        every: all cells whose points are drawn.
    """

    def place(row: tuple) -> tuple[float, float]:  # in points, like the text
        x, y = axes.transData.transform((row.answers_per_s, row.shown)) * 72 / axes.figure.dpi
        return float(x), float(y)

    size, gap = 7, 7
    edge, bottom, top = (pixels * 72 / axes.figure.dpi for pixels in (axes.bbox.x1, axes.bbox.y0, axes.bbox.y1))
    taken = [(x - 4, x + 4, y) for x, y in map(place, every.itertuples())]
    for row in frame.sort_values("shown", ascending=False).itertuples():
        name = row.method if row.method == "full" else f"{row.method} {row.kept:.3g}"
        x, y = place(row)
        width = 0.55 * size * len(name)
        is_right = x + gap + width < edge
        left, right = (x + gap, x + gap + width) if is_right else (x - gap - width, x - gap)

        def is_free(up: int, y: float = y, left: float = left, right: float = right) -> bool:
            beside = [other for start, end, other in taken if start < right and left < end]
            is_inside = bottom + size / 2 < y + up < top - size / 2
            return is_inside and all(abs(y + up - other) >= 1.1 * size for other in beside)

        up = next(filter(is_free, sorted(range(-400, 400), key=lambda up: (abs(up), up > 0))), 0)
        taken.append((left, right, y + up))
        axes.annotate(
            plain(name),
            (row.answers_per_s, row.shown),
            textcoords="offset points",
            xytext=(gap if is_right else -gap, up),
            ha="left" if is_right else "right",
            va="center",
            fontsize=size,
        )
