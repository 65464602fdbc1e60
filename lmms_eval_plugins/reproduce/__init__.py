"""Run a paper's grid and tabulate the results beside the paper's: `config`, `plan`, `run`, `table`."""
