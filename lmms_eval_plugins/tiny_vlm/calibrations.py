"""What calibrated methods know of the bundled model: `python -m lmms_eval_plugins.tiny_vlm.calibrations`.

It makes the files behind `calibration=tiny`, from fresh prompts of every bundled task; none is a task's question.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import BatchFeature

import kvcompress
from kvcompress.calibration import files
from kvcompress.clusters.calibrated import CalibratedKVCluster
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT, TINY_MODEL
from lmms_eval_plugins.tiny_vlm.accuracy import Reader
from lmms_eval_plugins.tiny_vlm.examples import draw_examples
from lmms_eval_plugins.tiny_vlm.regimes import REGIMES
from lmms_eval_plugins.tiny_vlm.regimes.dataset import draw_asked
from lmms_eval_plugins.tiny_vlm.signs import HEADLINE_KINDS

PROMPTS = 8  # of each task
SEED = "calibration"


def prompts(reader: Reader) -> Iterator[BatchFeature]:
    for example in draw_examples(PROMPTS, HEADLINE_KINDS, SEED):
        yield reader.inputs([example])
    for regime in REGIMES:
        for shown in draw_asked(regime, PROMPTS, SEED):
            yield reader.shown_inputs([shown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=files.BUNDLED[TINY_MODEL])
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    reader = Reader(TINY_CHECKPOINT)
    for method, info in kvcompress.list_methods().items():
        if not issubclass(info.cls, CalibratedKVCluster):
            continue
        made = kvcompress.calibrate(reader.model, method, prompts(reader), data=f"{PROMPTS} fresh prompts of each task")
        made = replace(made, model=replace(made.model, name=TINY_MODEL))
        files.save(made, out / f"{method}.safetensors")
        print(f"{method}: {made.tokens} tokens of {made.prompts} prompts")


if __name__ == "__main__":
    main()
