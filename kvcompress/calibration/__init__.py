"""Calibration: statistics of a model that some methods need, gathered once over prompts and saved in a file.

The file is the option `calibration=`. `files` defines it and its checks, `collect` gathers the statistics, `published`
reads files that authors published, `text` makes prompts from a text, and `command` is `python -m kvcompress calibrate`.
What is gathered and computed is up to the method: `kvcompress.clusters.calibrated`.
"""
