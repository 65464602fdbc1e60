"""Print tables in a terminal. Nothing is truncated: columns that do not fit are left out and named, or wrapped."""

import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

UNBOUNDED = 100_000  # columns: wider than any table
LEAST = 8  # minimum width of the names before other columns are wrapped too


def console() -> Console:
    """Return a console on stdout. If that is a pipe or a file, lines are as long as the tables are wide."""
    return Console(width=None if sys.stdout.isatty() else UNBOUNDED, markup=False, emoji=False)


def fitted(
    width: int,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    caption: str = "",
    names: int = 0,
    droppable: Sequence[str] = (),
    elsewhere: str = "",
) -> Table:
    """Build a table that fits in `width` columns of a terminal.

    If it is wider, columns are left out in the order of `droppable`, and the caption says which. If that is not enough,
    the column of names is wrapped, then the others.

    Args:
        names: the index of the column of names.
        elsewhere: the file that holds all columns.
    """
    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    shown, dropped = list(range(len(header))), []

    def needed(places: Sequence[int]) -> int:
        return sum(widths[place] + 3 for place in places) + 1  # a space on either side, and the lines between

    for name in droppable:
        if needed(shown) <= width:
            break
        if name in header:
            shown.remove(header.index(name))
            dropped.append(name)
    if dropped:
        caption = f"Left out to fit the terminal: {', '.join(dropped)}; for all columns see {elsewhere}. {caption}"
    table = Table(title=title or None, caption=caption or None, title_justify="left", caption_justify="left")
    room = width - needed([place for place in shown if place != names]) - 3
    for place in shown:
        fits = place != names and room >= LEAST
        justify = "left" if place == names else "right"
        table.add_column(header[place], justify=justify, overflow="fold", width=widths[place] if fits else None)
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    return table
