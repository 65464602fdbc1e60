"""Reports of cells on disk: `table` for reading, `metrics` and `grid` for comparing, `html` for pages and papers."""

from .headline import headline
from .table import cell_row, note, report, sweep_frame, table_rows

__all__ = ["cell_row", "headline", "note", "report", "sweep_frame", "table_rows"]
