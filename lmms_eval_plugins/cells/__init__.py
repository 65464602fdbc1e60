"""A cell of a grid, from the command line to its folder: see `Plan` and `Job` in `plan.py`."""
