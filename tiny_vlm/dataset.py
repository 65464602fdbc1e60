"""Draw the bundled questions about one picture: `python -m tiny_vlm.dataset`.

This rebuilds the parquet files of the tasks `tiny_textvqa` and `tiny_textvqa_color`, byte for byte with the same Pillow
and pyarrow.
"""

from __future__ import annotations

import argparse
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from lmms_eval_plugins.tiny_vlm.dataset import COLOR, HEADLINE, write_table
from lmms_eval_plugins.tiny_vlm.questions import Example
from tiny_vlm.examples import draw_examples
from tiny_vlm.signs import COLOR_KIND, HEADLINE_KINDS, SIDE

WEBP_QUALITY = 90
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


def compress_image(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", quality=WEBP_QUALITY, method=6)
    return file.getvalue()


def textvqa_table(examples: list[Example], first_id: int = 0) -> pa.Table:
    """Return a table with TextVQA's columns. All ten annotators agree; `image_classes` holds the kind of question."""
    rows = []
    for number, example in enumerate(examples, start=first_id):
        question = example.question
        rows.append(
            {
                "image_id": f"signs-{number:05d}",
                "question_id": number,
                "question": question.text,
                "question_tokens": question.text.rstrip("?").split(),
                "image": {"bytes": compress_image(example.pixels), "path": f"signs-{number:05d}.webp"},
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
    for file in (HEADLINE, COLOR):
        print(f"{file}: {pq.read_metadata(file).num_rows} questions, {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
