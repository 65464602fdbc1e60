"""How the bundled model was made: its rendered world, its architecture, its curriculum, its training.

`python -m tiny_vlm.train` trains it, `python -m tiny_vlm.calibrate` gathers its calibrations, `python -m
tiny_vlm.dataset` and `python -m tiny_vlm.regimes.dataset` draw its questions. What loads it and reads them is
`lmms_eval_plugins/tiny_vlm/`.
"""
