"""Read the bundled questions with long answers, and about several pictures, clips and long texts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from lmms_eval_plugins.tasks import BUNDLED_TASKS
from lmms_eval_plugins.tiny_vlm.questions import Question, Shown


def file_of(regime: str) -> Path:
    return BUNDLED_TASKS / f"tiny_{regime}" / "questions.parquet"


def read_prompts(file: Path) -> list[Shown]:
    """Read the prompts of a bundled file, with the pixels after image compression."""
    return [_shown(row) for row in pq.read_table(file).to_pylist()]


def _shown(row: dict[str, Any]) -> Shown:
    pictures = [
        np.asarray(Image.open(io.BytesIO(picture["bytes"])).convert("RGB")) for picture in row["image_list"] or ()
    ]
    frames = None
    if row["video"] is not None:
        with av.open(io.BytesIO(row["video"]["bytes"])) as container:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    question = Question(row["task"], row["question"], row["answer"])
    return Shown([question], pictures, frames=frames, text=row["context"])
