"""Draw the bundled questions of each regime: `python -m tiny_vlm.regimes.dataset`.

This rebuilds the parquet files of the tasks `tiny_read_all`, `tiny_multi_image`, `tiny_video` and `tiny_needle`, byte
for byte with the same Pillow, PyAV and pyarrow, except that the H.264 encoding of a few clips may differ.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import av
import numpy as np
import pyarrow as pa

from lmms_eval_plugins.tiny_vlm.dataset import write_table
from lmms_eval_plugins.tiny_vlm.questions import Shown
from lmms_eval_plugins.tiny_vlm.regimes import file_of
from tiny_vlm.dataset import compress_image
from tiny_vlm.regimes import KINDS, REGIMES, needle

QUESTIONS = 500  # per regime
WEBP_QUALITY = 75
CLIP_FPS = 4
CLIP_QUALITY = "24"  # x264's constant rate factor: lower is better and larger
MEDIA = pa.struct({"bytes": pa.binary(), "path": pa.string()})
# MuirBench's columns, with MMLongBench's context, and the video itself where other tasks have its file name.
SCHEMA = pa.schema(
    {
        "idx": pa.string(),
        "task": pa.string(),
        "context": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "image_list": pa.list_(MEDIA),
        "video": MEDIA,
    }
)
VALUE = "Value"
FEATURES = {
    **{name: {"dtype": "string", "_type": VALUE} for name in ("idx", "task", "context", "question", "answer")},
    "image_list": {"_type": "List", "feature": {"_type": "Image"}},
    # Not decoded by `datasets`: the model takes a file and chooses the frames.
    "video": {"bytes": {"dtype": "binary", "_type": VALUE}, "path": {"dtype": "string", "_type": VALUE}},
}


def draw_prompts(regime: str, count: int, name: str) -> list[Shown]:
    """Draw `count` prompts with one question each, cycling through its kinds; `name` is the seed, unlike training's."""
    prompts: list[Shown] = []
    attempt = 0
    while len(prompts) < count:
        rng = Random(f"{name}/{regime}/{attempt}")
        attempt += 1
        shown = REGIMES[regime](rng)
        kind = KINDS[regime][len(prompts) % len(KINDS[regime])]
        possible = [question for question in shown.questions if question.kind == kind]
        if possible and (regime != "needle" or needle.fits(shown)):
            prompts.append(replace(shown, questions=[rng.choice(possible)]))
    return prompts


def table_of(regime: str, prompts: Sequence[Shown]) -> pa.Table:
    rows = []
    for number, shown in enumerate(prompts):
        (question,) = shown.questions
        name = f"{regime}-{number:04d}"
        rows.append(
            {
                "idx": name,
                "task": question.kind,
                "context": shown.text,
                "question": question.text,
                "answer": question.answer,
                "image_list": [
                    {"bytes": compress_image(pixels, WEBP_QUALITY), "path": f"{name}-{place}.webp"}
                    for place, pixels in enumerate(shown.pictures)
                ],
                "video": None if shown.frames is None else {"bytes": mp4(shown.frames), "path": f"{name}.mp4"},
            }
        )
    features = json.dumps({"info": {"features": FEATURES}})
    return pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({"huggingface": features}))


def mp4(frames: np.ndarray) -> bytes:
    """Encode H.264 with full colour resolution: signs are small, and subsampled colours would blur together."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=CLIP_FPS, options={"crf": CLIP_QUALITY, "preset": "slow"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv444p"
        stream.thread_count = 1  # the number of threads changes the bytes
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    for regime in REGIMES:
        write_table(table_of(regime, draw_prompts(regime, QUESTIONS, "validation")), file_of(regime), "zstd")
        print(f"{file_of(regime)}: {QUESTIONS} questions, {file_of(regime).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
