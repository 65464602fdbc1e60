"""What some methods know of a model beforehand: gathered once over prompts, kept in a file, given as `calibration=`.

`files`: the file and its checks; `collect`: the pass over the model; `published`: reading what authors have published;
`text`: prompts from a text; `command`: `python -m kvcompress calibrate`. What is gathered, and what follows from it, is
the method's: `kvcompress.clusters.calibrated`.
"""
