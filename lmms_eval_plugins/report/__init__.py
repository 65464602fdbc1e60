"""Reports of cells on disk: `table` for reading, `metrics` and `grid` for comparing, `html` for pages and papers."""

from .table import cell_row, headline_metric, note, report, sweep_frame, table_rows

__all__ = ["cell_row", "headline_metric", "note", "report", "sweep_frame", "table_rows"]
