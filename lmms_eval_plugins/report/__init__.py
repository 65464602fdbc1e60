"""Reports of cells on disk: `table` for reading, `metrics` and `grid` for comparing, `html` for pages and papers."""
