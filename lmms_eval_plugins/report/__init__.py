"""Reports on cells on disk: `folder` for reading, `metrics` and `grid` for comparing, `html` for pages and papers."""
