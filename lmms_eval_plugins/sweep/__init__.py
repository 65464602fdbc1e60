"""Sweeps over tasks, models, methods, ratios and options: docs/sweeps.md.

python -m lmms_eval_plugins.sweep run CONFIG      here, or on a Ray cluster
python -m lmms_eval_plugins.sweep trial --task=... --model=... --method=... --ratio=...   what `wandb agent` runs
"""
