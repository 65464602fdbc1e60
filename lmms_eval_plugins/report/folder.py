"""Write the table and plots of a folder of cells (results/<task>/<model>).

Only cells with the same run settings (limit, dtype, ...) are comparable, so each set of settings gets its own
table and plots, written beside the cells as `report[-key=value...].md` and `.png`, and `throughput[-...].png`.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from kvcompress.files import locked, write_text

from ..cells.results import load_cells, settings_name
from . import terminal
from .draws import pooled
from .plots import plot, plot_throughput
from .short_answers import warning
from .table import markdown, print_warning, sweep_frame, terminal_table


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
    with locked(folder):  # if two runs share it, the last report covers all cells
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
    for name, frame in pooled(sweep_frame(cells, metric, metric_filter)).groupby("settings"):
        protocol = cells[0]["protocol"]
        title = f"{protocol['task']}, {protocol['model']}" + (f" ({frame['settings_text'].iloc[0]})" if name else "")
        table_path = folder / ("-".join(filter(None, ["report", name])) + ".md")
        write_text(table_path, markdown(frame, title))
        console.print(terminal_table(frame, title, console.width, table_path.name))
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
