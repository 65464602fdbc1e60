"""Write the generated questions as lmms-eval tasks, each a folder with a YAML and a parquet file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kvcompress.files import replacing, write_text
from lmms_eval_plugins.long_pack import documents, needles
from lmms_eval_plugins.long_pack.documents import Document
from lmms_eval_plugins.long_pack.needles import Haystack
from lmms_eval_plugins.long_pack.prompts import Look, Prompt

MOST_DICTIONARY_BYTES = 2**30  # per row group: stores an image that several questions show only once
DATA_FILE = "questions.parquet"
MAKERS: dict[str, tuple[tuple[str, ...], Callable[..., Haystack | Document]]] = {
    "needle": (needles.KINDS, Haystack),
    "document": (documents.KINDS, Document),
}
KINDS = tuple(kind for kinds, _ in MAKERS.values() for kind in kinds)


@dataclass(frozen=True)
class Pack:
    """The settings of a pack. Equal settings give equal bytes with the same Pillow, pyarrow and datasets.

    Attributes:
        name: prefix of the tasks' names.
        lengths: pictures or pages per prompt.
        questions: questions per kind and length.
        depths: depths of the needle, used in turn; 0 is the first picture or page, 1 the last.
    """

    seed: int = 0
    name: str = "long"
    lengths: tuple[int, ...] = (4, 16, 64)
    questions: int = 20
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    kinds: tuple[str, ...] = KINDS
    look: Look = field(default_factory=Look)

    def tasks(self) -> dict[str, tuple[str, ...]]:
        """Return `needle`, `document`, or both -> their requested kinds of questions."""
        asked = {task: tuple(kind for kind in kinds if kind in self.kinds) for task, (kinds, _) in MAKERS.items()}
        return {task: kinds for task, kinds in asked.items() if kinds}

    @property
    def pictures(self) -> int:
        """The number of pictures and pages in all prompts."""
        return self.questions * sum(self.lengths) * len(self.kinds)

    def groups(self, task: str) -> Iterator[list[Prompt]]:
        """Yield groups of prompts that share their images, one per kind, cycling through lengths and depths."""
        kinds = self.tasks()[task]
        for number in range(self.questions):
            for length in self.lengths:
                depth = self.depths[number % len(self.depths)]
                made = MAKERS[task][1](f"{self.seed}/{task}/{length}/{number}", length, depth, self.look)
                yield [made.prompt(kind) for kind in kinds]


def write(pack: Pack, folder: Path) -> Iterator[tuple[Path, int]]:
    """Write the tasks' folders; yield each task's YAML and how many of its questions are written so far."""
    for task in pack.tasks():
        name = f"{pack.name}_{task}"
        file, count = folder / name / f"{name}.yaml", 0
        with (
            replacing(folder / name / DATA_FILE) as draft,
            pq.ParquetWriter(
                draft,
                _schema(),
                compression="zstd",
                use_dictionary=True,
                dictionary_pagesize_limit=MOST_DICTIONARY_BYTES,
            ) as writer,
        ):
            for group in pack.groups(task):
                writer.write_table(table_of(group, count))
                count += len(group)
                yield file, count
        write_text(file, yaml_of(pack, task, name))


def table_of(prompts: list[Prompt], first: int) -> pa.Table:
    """Return rows of the parquet file, numbered from `first`."""
    rows = []
    for number, prompt in enumerate(prompts, first):
        question = prompt.question
        images = [{"bytes": image, "path": f"{place}.webp"} for place, image in enumerate(prompt.images, 1)]
        rows.append(
            {
                "idx": f"{number:06d}",
                "kind": question.kind,
                "length": question.length,
                "depth": question.depth,
                "places": list(question.places),
                "question": question.text,
                "answer": question.answer,
                "answer_format": question.answer_format,
                "texts": prompt.texts,
                "image_list": images,
            }
        )
    return pa.Table.from_pylist(rows, schema=_schema())


@cache
def _schema() -> pa.Schema:
    """Return the columns, with the metadata from which `datasets` reads that images are images."""
    from datasets import Features, Image, List, Value

    text, number = Value("string"), Value("int64")
    columns = {
        **dict.fromkeys(("idx", "kind"), text),
        "length": number,
        "depth": Value("float64"),
        "places": List(number),
        **dict.fromkeys(("question", "answer", "answer_format"), text),
        "texts": List(text),
        "image_list": List(Image()),
    }
    return Features(columns).arrow_schema


NEEDLE = """output_type: generate_until
doc_to_visual: !function lmms_eval_plugins.tasks.long_pack.doc_to_visual
doc_to_text: !function lmms_eval_plugins.tasks.long_pack.doc_to_text
doc_to_messages: !function lmms_eval_plugins.tasks.long_pack.doc_to_messages
doc_to_target: answer
process_results: !function lmms_eval_plugins.tasks.long_pack.needle_results
lmms_eval_specific_kwargs:
  default:
    pre_prompt: "\\n\\nAnswer the question about the text and the pictures above.\\n"
    post_prompt: "\\nAnswer briefly, with a name or a number."
"""
DOCUMENT = """class: !function lmms_eval_plugins.tasks.official.OfficialTask
official: mmlongbench_doc/mmlongbench_doc.yaml
doc_to_visual: !function lmms_eval_plugins.tasks.long_pack.doc_to_visual
process_results: !function lmms_eval_plugins.tasks.long_pack.document_results
"""
ASKED = {"needle": (NEEDLE, "mmlongbench_acc"), "document": (DOCUMENT, "mmlongbench_doc_acc")}  # how, and the metric


def yaml_of(pack: Pack, task: str, name: str) -> str:
    """Return the text of a task's file."""
    size = pack.look.picture_size if task == "needle" else pack.look.page_size
    what = "pictures" if task == "needle" else "pages"
    kinds = pack.tasks()[task]
    lengths = ", ".join(map(str, pack.lengths))
    how, metric = ASKED[task]
    metrics = "".join(
        f"  - metric: {each}\n    aggregation: mean\n    higher_is_better: true\n" for each in (metric, *kinds)
    )
    return f"""# {pack.questions * len(pack.lengths) * len(kinds)} generated questions about {lengths} {what} of \
{size[0]} x {size[1]} pixels, seed {pack.seed}.
# Written by python -m lmms_eval_plugins.long_pack; docs/long-pack.md has its kinds and columns.
task: {name}
dataset_path: parquet
dataset_kwargs:
  data_files:
    test: {DATA_FILE}
test_split: test
{how}generation_kwargs:
  max_new_tokens: 32
  do_sample: false
metric_list:
{metrics}metadata:
  version: 1.0
"""
