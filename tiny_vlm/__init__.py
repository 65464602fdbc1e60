"""How the bundled model was made: its architecture, its curriculum, its training.

`python -m tiny_vlm.train` trains it, `python -m tiny_vlm.calibrate` gathers its calibrations. What it is asked, and the
checkpoint, are `lmms_eval_plugins/tiny_vlm/`.
"""
