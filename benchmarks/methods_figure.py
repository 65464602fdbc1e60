"""Draw the tables of all methods side by side, to show which method works in which regime.

python -m benchmarks.methods_figure        # benchmarks/results/method_table_*.md -> docs/images/methods-compared.png
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcompress.flag_types import path

from .driver import IMAGES, RESULTS, new_parser, save, start

TITLES = {
    "tiny": "a picture",
    "tiny_multi_image": "several pictures",
    "tiny_video": "video",
    "tiny_needle": "long text",
    "tiny_read_all": "long answers",
    "smollm2": "text, SmolLM2",
}


@dataclass(frozen=True)
class Panel:
    """The first table of a task.

    Attributes:
        ratios: the columns' titles.
        rows: method -> accuracy in percent at each ratio, NaN if there is none.
        keeps_more: methods that keep a different share than requested.
    """

    ratios: list[str]
    rows: dict[str, list[float]]
    keeps_more: set[str]

    @classmethod
    def of(cls, table: str) -> "Panel":
        """Parse the first table of a file that `method_table.report` wrote."""
        lines = [
            line.strip("| \n").split(" | ") for line in table.split("\n## ")[1].splitlines() if line.startswith("|")
        ]
        ratios, rows, keeps_more = lines[0][1:-2], {}, set()
        for name, *cells in lines[2:]:
            method = name.split(" (")[0].strip("*")
            found = [cell.split() for cell in (cells + [""] * len(ratios))[: len(ratios)]]
            if any(found):  # the full cache only has a mean
                rows[method] = [float(words[0]) if words else np.nan for words in found]
            if any("(" in cell for cell in cells):
                keeps_more.add(method)
        return cls(ratios, rows, keeps_more)


def draw(panels: dict[str, Panel], path: Path) -> None:
    """Draw a panel for each task, with the same methods from top to bottom, in the order of the first table; methods
    that keep a different share than requested come last."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(method for panel in panels.values() for method in panel.rows))
    methods.sort(key=lambda method: any(method in panel.keeps_more for panel in panels.values()))
    widths = [len(panel.ratios) for panel in panels.values()]
    figure = Figure(figsize=(2 + 0.34 * sum(widths), 1 + 0.19 * len(methods)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)
    for axis, (title, panel) in zip(axes.flat, panels.items(), strict=True):
        none = [np.nan] * len(panel.ratios)
        cells = np.array([panel.rows.get(method, none) for method in methods])
        axis.imshow(cells, cmap="YlGnBu", vmin=0, vmax=100, aspect="auto")
        for (y, x), accuracy in np.ndenumerate(cells):
            if not np.isnan(accuracy):
                color = "white" if accuracy > 60 else "black"
                axis.text(x, y, f"{accuracy:.0f}", ha="center", va="center", fontsize=6, color=color)
        axis.set_title(title, fontsize=8)
        axis.set_xticks(range(len(panel.ratios)), panel.ratios, fontsize=7)
        axis.set_yticks(range(len(methods)), methods, fontsize=7)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    save(figure, path, dpi=110)


def main(argv: list[str]) -> None:
    parser = new_parser("methods_figure", __doc__)
    parser.add_argument("--out", type=path, default=IMAGES / "methods-compared.png", help="the picture")
    out = parser.parse_args(argv).out
    tables = {title: RESULTS / f"method_table_{name}.md" for name, title in TITLES.items()}
    draw({title: Panel.of(file.read_text(encoding="utf-8")) for title, file in tables.items()}, out)


if __name__ == "__main__":
    start(main)
