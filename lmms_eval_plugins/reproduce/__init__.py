"""A paper's grid, run here, in a table beside the paper's numbers: `config`, `plan`, `run`, `table`."""
