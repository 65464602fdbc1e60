"""Reports on cells on disk: `table` for a folder of them, `metrics` and `grid` for comparing, `html` for pages and papers."""
