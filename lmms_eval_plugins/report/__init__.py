"""Reports of cells on disk: `folder` for reading, `metrics` and `grid` for comparing, `html` for pages and papers."""

from .folder import report
from .headline import headline
from .table import cell_row, note, sweep_frame, table_rows

__all__ = ["cell_row", "headline", "note", "report", "sweep_frame", "table_rows"]
