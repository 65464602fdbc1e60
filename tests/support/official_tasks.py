"""Local data for lmms-eval's own tasks, untouched: datasets in folders named as on the hub, videos as lmms-eval unpacks
them. A row has every field that a task's code reads, filled by the field's name; FIELDS says where that is not enough.
"""

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lmms_eval.tasks
from lmms_eval.utils import load_yaml_config
from PIL import Image

from lmms_eval_plugins.tasks import task_names
from tests.support.checkpoints import write_video

TASKS = Path(lmms_eval.tasks.__file__).parent
READ = re.compile(r"""doc(?:\[|\.get\(\s*)["']([\w\- ]+)["']|\{\{\s*(?:doc\.)?(\w+)""")
FIELD = re.compile(r"^\s*doc_to_(?:text|target|visual): *[\"']?(\w+)[\"']? *$", re.MULTILINE)


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (40 + 4 * number, 32), (60 * number % 256, 90, 200))


def in_base64(image: Image.Image) -> str:
    with io.BytesIO() as file:
        image.save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()


# The first pattern that a field's name contains gives its value in row number n.
VALUES: list[tuple[str, Callable[[int], Any]]] = [
    (r"^images?_list$|^images$|^image_list$", lambda n: [picture(n), picture(n + 1)]),
    (r"^(question_)?image(_\d+)?$|_image$|^img$", picture),
    (r"^(options|choices|candidates)$", lambda n: ["red", "green", "blue", "grey"]),
    (r"^answers$", lambda n: ["red", "a red sign"]),
    (r"^(answer|gt|label|ground_truth|solution)$", lambda n: "ABCD"[n % 4]),
    (r"^[A-J]$", lambda n: ["red", "green", "blue", "grey"][n % 4]),
    (r"video(ID|_id|_name|_path)?$", lambda n: f"clip{n % 2}"),
    (r"(^|_)(id|index|idx|qid|uid|pid)$", lambda n: n),
    (r"question|query|problem|instruction|prompt|text", lambda n: f"Which colour has sign {n}?"),
]

# task -> fields of row number n that differ from what their names say, or that the code reads under another name.
FIELDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "seedbench": lambda n: {"data_type": "video" if n < 2 else "image", "image": [picture(n)]},
    "muirbench": lambda n: {"question": "What do <image> and <image> share?", "answer": "ABC"[n % 3]},
    "gsm8k": lambda n: {"question": f"What is {n} + 1?", "answer": f"It is one more. #### {n + 1}"},
    "scienceqa": lambda n: {"answer": n % 4, "image": None if n == 0 else picture(n)},
    "scienceqa_img": lambda n: {"answer": n % 4},
    "videomme": lambda n: {
        "options": ["A. red", "B. green", "C. blue", "D. grey"], "duration": "short", "domain": "Knowledge",
        "sub_category": "Astronomy", "task_type": "OCR Problems",
    },
    "microvqa": lambda n: {"correct_index": n % 4},
    "ai2d": lambda n: {"answer": str(n % 4)},
    "hrbench4k": lambda n: {"image": in_base64(picture(n))},
    "ovo_forward": lambda n: {
        "task": "REC", "activity": "wave", "id": n, "test_info": [{"realtime": 1, "count": 0}] * 2,
    },
    "mmmu_val": lambda n: {
        "question": "Which of <image 1> is a sign?", "options": "['red', 'green']", "question_type": "multiple-choice",
        "id": f"validation_Art_{n}", "image_1": picture(n), "image_2": picture(n),
    },
    "flickr30k_test": lambda n: {"img_id": str(n), "caption": ["a red sign", "a sign"]},
    "refcoco_bbox_val": lambda n: {"bbox": [2.0 * n, 3.0, 12.0, 9.5], "answer": ["red sign", "left sign"]},
    "aime24_nofigures_agg8": lambda n: {"problem": f"What is {n} + 1?", "answer": str(n + 1)},
}  # fmt: skip
# task -> folder below HF_HOME, and the names of its videos
VIDEOS = {
    "videomme": ("videomme/data", ("clip0", "clip1")),
    "ovo_forward": ("ovobench/chunked_videos", [f"{n}_{part}" for n in range(3) for part in range(2)]),
}


def config_of(task: str) -> dict[str, Any]:
    """The task's YAML with what it includes; functions are left out."""
    return load_yaml_config(str(task_names(TASKS)[task]), mode="simple")


def row(task: str, number: int) -> dict[str, Any]:
    """A document of a task."""
    path = task_names(TASKS)[task]
    yamls = [path, *(file for file in path.parent.iterdir() if file.name.startswith("_default"))]
    text = "".join(file.read_text(encoding="utf-8") for file in yamls)
    code = "".join(
        (path.parent / f"{module}.py").read_text(encoding="utf-8")
        for module in set(re.findall(r"!function (\w+)\.", text))
        if (path.parent / f"{module}.py").is_file()
    )
    names = {name for found in READ.findall(code + text) for name in found if name} | set(FIELD.findall(text))
    own = FIELDS.get(task, lambda n: {})(number)
    return {name: own.get(name, _value(name, number)) for name in sorted({*names, *own})}


def _value(name: str, number: int) -> Any:
    for pattern, value in VALUES:
        if re.search(pattern, name):
            return value(number)
    return "a"


def write_data(tasks: list[str], data_root: Path, hf_home: Path, rows: int = 3) -> None:
    """Write the data of tasks: what `--data-root` takes, and below `hf_home` the videos."""
    splits: dict[tuple[str, str | None], dict[str, list[dict[str, Any]]]] = {}
    for task in tasks:
        config = config_of(task)
        names = {config[key] for key in config if key in ("test_split", "validation_split", "fewshot_split")}
        of_name = splits.setdefault((config["dataset_path"], config.get("dataset_name")), {})
        for split in names:
            of_name[split] = [row(task, number) for number in range(rows)]
        if task in VIDEOS:
            folder, videos = VIDEOS[task]
            (hf_home / folder).mkdir(parents=True)
            for video in videos:
                write_video(hf_home / folder / f"{video}.mp4", frames=8)
    for path in {path for path, _ in splits}:
        header = "configs:\n"
        for (other, config_name), of_name in splits.items():
            if other == path:
                header += f"- config_name: {config_name or 'default'}\n  data_files:\n"
                for split, content in of_name.items():
                    file = f"{config_name or 'default'}-{split}.parquet"
                    (data_root / path).mkdir(parents=True, exist_ok=True)
                    datasets.Dataset.from_list(content).to_parquet(data_root / path / file)
                    header += f"  - split: {split}\n    path: '{file}'\n"
        (data_root / path / "README.md").write_text(f"---\n{header}---\n", encoding="utf-8")
