"""Draw the bundled questions about one picture: `python -m tiny_vlm.dataset`.

This rebuilds the parquet files of the tasks `tiny_textvqa`, `tiny_textvqa_color` and `tiny_many_*`, byte for byte with
the same Pillow and pyarrow.
"""

from __future__ import annotations

import argparse
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from lmms_eval_plugins.tasks.many import PER_PICTURE
from lmms_eval_plugins.tiny_vlm.dataset import COLOR, HEADLINE, MANY, write_table
from lmms_eval_plugins.tiny_vlm.questions import Example
from tiny_vlm.examples import draw_examples, draw_shared
from tiny_vlm.signs import COLOR_KIND, HEADLINE_KINDS, SIDE

WEBP_QUALITY = 90
SHARED_PICTURES = 40  # of `tiny_many_*`
SCHEMA = pa.schema(
    {
        "image_id": pa.string(),
        "question_id": pa.int64(),
        "question": pa.string(),
        "question_tokens": pa.list_(pa.string()),
        "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        "image_width": pa.int64(),
        "image_height": pa.int64(),
        "flickr_original_url": pa.string(),
        "flickr_300k_url": pa.string(),
        "answers": pa.list_(pa.string()),
        "image_classes": pa.list_(pa.string()),
        "set_name": pa.string(),
        "ocr_tokens": pa.list_(pa.string()),
    }
)


def compress_image(pixels: np.ndarray, quality: int = WEBP_QUALITY) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", quality=quality, method=6)
    return file.getvalue()


def textvqa_table(examples: list[Example], first_id: int = 0, per_picture: int = 1) -> pa.Table:
    """Return a table with TextVQA's columns. All ten annotators agree; `image_classes` holds the kind of question.

    `per_picture`: how many successive examples show the same picture.
    """
    rows = []
    for place, example in enumerate(examples):
        question, number = example.question, first_id + place
        picture = f"signs-{first_id + place // per_picture:05d}"
        rows.append(
            {
                "image_id": picture,
                "question_id": number,
                "question": question.text,
                "question_tokens": question.text.rstrip("?").split(),
                "image": {"bytes": compress_image(example.pixels), "path": f"{picture}.webp"},
                "image_width": SIDE,
                "image_height": SIDE,
                "flickr_original_url": "",
                "flickr_300k_url": "",
                "answers": [question.answer] * 10,
                "image_classes": [question.kind],
                "set_name": "val",
                "ocr_tokens": [],
            }
        )
    return pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({"huggingface": _features()}))


def _features() -> str:
    """Return the metadata from which `datasets` reads column types; without it, images would load as structs."""

    def feature(field: pa.Field) -> dict:
        if field.name == "image":
            return {"_type": "Image"}
        if pa.types.is_list(field.type):
            return {"_type": "List", "feature": {"dtype": "string", "_type": "Value"}}
        return {"dtype": str(field.type), "_type": "Value"}

    return json.dumps({"info": {"features": {field.name: feature(field) for field in SCHEMA}}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    write_table(textvqa_table(draw_examples(500, HEADLINE_KINDS, "validation")), HEADLINE)
    write_table(textvqa_table(draw_examples(100, (COLOR_KIND,), "validation-color"), first_id=10_000), COLOR)
    shared = draw_shared(SHARED_PICTURES, PER_PICTURE, HEADLINE_KINDS, "validation-many")
    write_table(textvqa_table(shared, first_id=20_000, per_picture=PER_PICTURE), MANY, "zstd")
    for file in (HEADLINE, COLOR, MANY):
        print(f"{file}: {pq.read_metadata(file).num_rows} questions, {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
