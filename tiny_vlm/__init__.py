"""How the bundled model was made: its rendered scenes, architecture, curriculum and training.

`python -m tiny_vlm.train` trains it, `python -m tiny_vlm.calibrate` computes its calibrations, `python -m
tiny_vlm.dataset` and `python -m tiny_vlm.regimes.dataset` draw its questions. `lmms_eval_plugins/tiny_vlm/` loads the
model and reads the questions.
"""
