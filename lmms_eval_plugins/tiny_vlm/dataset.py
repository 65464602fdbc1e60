"""Read the bundled questions about one picture, in TextVQA's columns, or export them in the hub layout of TextVQA.

`python -m lmms_eval_plugins.tiny_vlm.dataset --as-textvqa DIR` exports the headline questions, so that lmms-eval's
unmodified `textvqa_val` runs on them when started in DIR.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from kvcompress.files import replacing
from lmms_eval_plugins.tasks import BUNDLED_TASKS
from lmms_eval_plugins.tiny_vlm.questions import Example, Question

HEADLINE = BUNDLED_TASKS / "tiny_textvqa" / "headline.parquet"
COLOR = BUNDLED_TASKS / "tiny_textvqa" / "color.parquet"
MANY = BUNDLED_TASKS / "tiny_many" / "questions.parquet"  # successive questions share a picture
TEXTVQA = Path("lmms-lab-encoder/textvqa/data/validation-00000-of-00001.parquet")


def read_examples(file: Path) -> list[Example]:
    """Read the questions of a bundled file, with the pixels after image compression."""
    examples = []
    for row in pq.read_table(file).to_pylist():
        image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
        question = Question(row["image_classes"][0], row["question"], row["answers"][0])
        examples.append(Example(np.array(image), question))
    return examples


def write_table(table: pa.Table, file: Path, compression: str = "snappy") -> None:
    with replacing(file) as draft:
        pq.write_table(table, draft, compression=compression)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--as-textvqa", type=Path, required=True, metavar="DIR", help="write DIR/" + str(TEXTVQA))
    file = parser.parse_args().as_textvqa / TEXTVQA
    write_table(pq.read_table(HEADLINE), file)
    print(file)


if __name__ == "__main__":
    main()
