"""The cells of a grid, from the command line to the results folder; start with `Plan` and `Job` in `plan.py`."""
