"""Calibrate every calibrated method on the bundled model: `python -m tiny_vlm.calibrate`.

This writes the files behind `calibration=tiny`, from fresh prompts of every bundled task, none of them a task's
question.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from transformers import BatchFeature, PreTrainedModel

import kvcompress
from kvcompress.calibration import files
from kvcompress.clusters.calibrated import CalibratedKVCluster
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT, TINY_MODEL
from lmms_eval_plugins.tiny_vlm.accuracy import Reader
from tiny_vlm.examples import draw_examples
from tiny_vlm.regimes import REGIMES
from tiny_vlm.regimes.dataset import draw_prompts
from tiny_vlm.signs import HEADLINE_KINDS

PROMPTS = 8  # of each task
SEED = "calibration"


def prompts(reader: Reader) -> Iterator[BatchFeature]:
    for example in draw_examples(PROMPTS, HEADLINE_KINDS, SEED):
        yield reader.inputs([example])
    for regime in REGIMES:
        for shown in draw_prompts(regime, PROMPTS, SEED):
            yield reader.shown_inputs([shown])


def calibrate_all(
    model: PreTrainedModel,
    name: str,
    prompts: Callable[[], Iterable[BatchFeature]],
    data: str,
    out: Path,
    without: tuple[str, ...] = (),
) -> None:
    """Write `out`/METHOD.safetensors for each calibrated method except those in `without` and those that learn nothing
    from these prompts, such as a vision method from text prompts; `name`: the model's name in the files."""
    out.mkdir(parents=True, exist_ok=True)
    for method, info in kvcompress.list_methods().items():
        if not issubclass(info.cls, CalibratedKVCluster) or method in without:
            continue
        try:
            made = kvcompress.calibrate(model, method, prompts(), data=data)
        except kvcompress.KVCompressError as error:
            print(f"{method}: {error}")
            continue
        files.save(replace(made, model=replace(made.model, name=name)), out / f"{method}.safetensors")
        print(f"{method}: {made.tokens} tokens of {made.prompts} prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=files.BUNDLED[TINY_MODEL])
    out = parser.parse_args().out
    reader = Reader(TINY_CHECKPOINT)
    calibrate_all(reader.model, TINY_MODEL, lambda: prompts(reader), f"{PROMPTS} fresh prompts of each task", out)


if __name__ == "__main__":
    main()
