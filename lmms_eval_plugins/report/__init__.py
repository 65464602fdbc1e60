"""Reports on cells on disk: `table` for a folder, `metrics` and `grid` to compare, `html` for pages and papers."""
