"""Local data for lmms-eval's own tasks: datasets in folders named as on the hub, videos as lmms-eval unpacks them.

The tasks are unmodified. A row has every field that a task's code reads, with a value by the field's name; FIELDS has
the exceptions."""

import base64
import contextlib
import io
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import lmms_eval.api.task
import lmms_eval.tasks
import pytest
from lmms_eval.tasks.mvbench.utils import DATA_LIST as MVBENCH_FOLDERS
from lmms_eval.utils import load_yaml_config
from PIL import Image

from lmms_eval_plugins.cells import plan
from lmms_eval_plugins.cells.names import index_of, lmms_eval_folder
from lmms_eval_plugins.tasks import BUNDLED_TASKS
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


# The first pattern in a field's name gives its value in row n.
VALUES: list[tuple[str, Callable[[int], Any]]] = [
    (r"^images?_list$|^images$|^image_list$", lambda n: [picture(n), picture(n + 1)]),
    (r"^(question_)?image(_\d+)?$|_image$|^img$", picture),
    (r"^(options|choices|candidates)$", lambda n: ["red", "green", "blue", "grey"]),
    (r"^answers$", lambda n: ["red", "a red sign"]),
    (r"^(answer|gt|label|ground_truth|solution)$", lambda n: "ABCD"[n % 4]),
    (r"^[A-J]$", lambda n: ["red", "green", "blue", "grey"][n % 4]),
    (r"video(ID|_id|_name|_path)?$", lambda n: f"clip{n % 2}"),
    (r"(^|_)(id|index|idx|qid|uid|pid)$", lambda n: n),
    # Of different lengths, so that a batch of them is padded.
    (r"question|query|problem|instruction|prompt|text", lambda n: f"Which colour has sign {n}?" + n * " Look again."),
]

ABSENT = object()  # instead of a value: the row does not have the field

# Pattern of task names -> fields of row n whose values do not follow from their names, or that the code reads under
# another name.
FIELDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "seedbench": lambda n: {"data_type": "video" if n < 2 else "image", "image": [picture(n)] * (2 if n < 2 else 1)},
    "muirbench": lambda n: {"question": f"What do <image> and <image> share{n * ' or not'}?", "answer": "ABC"[n % 3]},
    "gsm8k": lambda n: {"question": f"What is {n}{n * ' + 1'} + 1?", "answer": f"It is one more. #### {n + 1}"},
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
    "gqa": lambda n: {"imageId": f"image{n}", "answer": "red"},
    "mmmu_pro_standard": lambda n: {
        "question": f"Is <image 1> a sign{n * ' or not'}?", "options": "['red', 'green']", "image_1": picture(n),
    },
    # Question and options are in the picture.
    "mmmu_pro_vision": lambda n: {"question": ABSENT, "options": ABSENT},
    "mmmu_val": lambda n: {
        "question": "Which of <image 1> is a sign?", "options": "['red', 'green']", "question_type": "multiple-choice",
        "id": f"validation_Art_{n}", "image_1": picture(n), "image_2": picture(n),
    },
    "flickr30k_test": lambda n: {"img_id": str(n), "caption": ["a red sign", "a sign"]},
    "refcoco_bbox_val": lambda n: {"bbox": [2.0 * n, 3.0, 12.0, 9.5], "answer": ["red sign", "left sign"]},
    "ocrbench": lambda n: {"answer": ["red"], "dataset": "IIIT5K", "question_type": "Regular Text Recognition"},
    "pope": lambda n: {"answer": "yes" if n else "no"},
    # Two questions about each picture.
    "mme": lambda n: {"answer": "Yes" if n % 2 else "No", "category": "color", "question_id": f"color/{n // 2}.png"},
    "vqav2_val": lambda n: {"answers": [{"answer": "red", "answer_id": i} for i in range(10)]},
    "coco2017_cap_val": lambda n: {"question_id": f"{n:012}.jpg", "answer": ["a red sign", "a sign"]},
    "egoschema_subset": lambda n: {
        "video_idx": f"clip{n % 2}", "option": [f"{letter}. {letter} sign" for letter in "ABCDE"], "answer": str(n),
    },
    "nextqa_mc_test": lambda n: {"video": f"clip{n % 2}", "answer": n, **{f"a{i}": f"sign {i}" for i in range(5)}},
    "mlvu_dev": lambda n: {"video_name": f"clip{n % 2}.mp4", "task_type": ("count", "ego", "needle")[n % 3]},
    "perceptiontest_val_mc": lambda n: {"options": ["red", "green", "blue"], "answer_id": str(n % 3)},
    "tempcompass_*": lambda n: {"answer": "A. red", "dim": "action"},
    "mvbench_*": lambda n: {"video": f"clip{n % 2}.mp4", "answer": "green"},
    "blink_*": lambda n: {"image_1": picture(n), "image_2": picture(n + 1), "answer": "(B)"},
    "mmlu_pro_*": lambda n: {
        "question": f"Which colour{n * ' of all'}?", "category": "law", "options": ["red", "green"], "answer": "B",
        "cot_content": "A: Let's think step by step. The answer is (B).",
    },
    "aime24_nofigures_agg8": lambda n: {"problem": f"What is {n} + 1?", "answer": str(n + 1)},
}  # fmt: skip
# Pattern of task names -> folder below HF_HOME, and the names of its videos
# Task -> a further part of its dataset, with its split and row n.
PARTS: dict[str, tuple[str, str, Callable[[int], dict[str, Any]]]] = {
    "gqa": ("testdev_balanced_images", "testdev", lambda n: {"id": f"image{n}", "image": picture(n)}),
}
CLIPS = ("clip0", "clip1")
VIDEOS = {
    "videomme": ("videomme/data", CLIPS),
    "egoschema_*": ("egoschema/videos", CLIPS),
    "nextqa_*": ("nextqa/NExTVideo", CLIPS),
    "mlvu_dev": ("mlvu", CLIPS),
    "perceptiontest_val_mc": ("perceptiontest_val/videos", CLIPS),
    "tempcompass_*": ("tempcompass/videos", CLIPS),
    **{f"mvbench_{part}": (f"mvbench_video/{folder}", CLIPS) for part, folder in MVBENCH_FOLDERS.items()},
    "ovo_forward": ("ovobench/chunked_videos", [f"{n}_{part}" for n in range(4) for part in range(2)]),
}


@cache
def official_tasks() -> dict[str, Path]:
    """Return name -> file of every task of the installed lmms-eval."""
    return {name: file for name, (kind, file) in index_of(lmms_eval_folder()).items() if kind == "task"}


def leaves(name: str) -> list[str]:
    """Return the lmms-eval tasks of a group or a tag; a task is its own."""
    if name in official_tasks():
        return [name]
    line = re.compile(rf"^(group|tag): *[\"']?{re.escape(name)}[\"']? *$", re.MULTILINE)
    paths = [path for path in TASKS.rglob("*.yaml") if line.search(path.read_text(encoding="utf-8"))]
    tagged = [task for task, path in official_tasks().items() if path in paths]
    if tagged:
        return tagged
    (path,) = paths
    return [leaf for part in load_yaml_config(str(path), mode="simple")["task"] for leaf in leaves(part)]


def config_of(task: str) -> dict[str, Any]:
    """Return the task's YAML with its includes, without functions."""
    return load_yaml_config(str(official_tasks()[task]), mode="simple")


def row(task: str, number: int) -> dict[str, Any]:
    """Return a document of a task."""
    path = official_tasks()[task]
    yamls = [path, *(file for file in path.parent.iterdir() if file.name.startswith("_default"))]
    text = "".join(file.read_text(encoding="utf-8") for file in yamls)
    code = "".join(
        (path.parent / f"{module}.py").read_text(encoding="utf-8")
        for module in set(re.findall(r"!function (\w+)\.", text))
        if (path.parent / f"{module}.py").is_file()
    )
    names = {name for found in READ.findall(code + text) for name in found if name} | set(FIELD.findall(text))
    fields = _of(task, FIELDS)
    own = fields(number) if fields else {}
    given = {name: own.get(name, _value(name, number)) for name in sorted({*names, *own})}
    return {name: value for name, value in given.items() if value is not ABSENT}


def _of(task: str, table: dict[str, Any]) -> Any:
    """Return a pattern table's value for a task; None if there is none."""
    return next((value for pattern, value in table.items() if fnmatch(task, pattern)), None)


def _value(name: str, number: int) -> Any:
    for pattern, value in VALUES:
        if re.search(pattern, name):
            return value(number)
    return "a"


def write_data(names: list[str], data_root: Path, hf_home: Path, rows: int = 3) -> None:
    """Write the data of tasks: datasets for `--data-root`, and videos below `hf_home`."""
    splits: dict[tuple[str, str | None], dict[str, list[dict[str, Any]]]] = {}
    for task in names:
        config = config_of(task)
        own_splits = {config[key] for key in config if key in ("test_split", "validation_split", "fewshot_split")}
        of_name = splits.setdefault((config["dataset_path"], config.get("dataset_name")), {})
        for split in own_splits:
            is_asked = split in (config.get("test_split"), config.get("validation_split"))
            # Examples are other documents than questions.
            of_name[split] = [row(task, number) for number in (range(rows) if is_asked else range(rows, 3 * rows))]
        if task in PARTS:
            part, split, content = PARTS[task]
            splits[config["dataset_path"], part] = {split: [content(number) for number in range(rows)]}
        if found := _of(task, VIDEOS):
            folder, videos = found
            (hf_home / folder).mkdir(parents=True, exist_ok=True)
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


def manager_of(*names: str) -> lmms_eval.tasks.TaskManager:
    """Return a task manager that has indexed only the folders of these tasks, as all 1900 YAMLs take seconds."""
    folders = sorted({str(official_tasks()[name].parent) for name in names})
    return lmms_eval.tasks.TaskManager(include_defaults=False, include_path=[*folders, str(BUNDLED_TASKS)])


@contextlib.contextmanager
def local_data(root: Path, *names: str, rows: int = 3) -> Iterator[None]:
    """Context manager in which the tasks and the groups next to them are known, with their data below `root`."""
    if not (root / "data").exists():
        write_data(names, root / "data", root / "hf", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "find_tasks", lambda wanted, include_path: manager_of(*names))
        patch.setenv("HF_HOME", str(root / "hf"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(root)
        lmms_eval.api.task._resolve_hf_datasets_cache_dir.cache_clear()
        yield
    lmms_eval.api.task._resolve_hf_datasets_cache_dir.cache_clear()
