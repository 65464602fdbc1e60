"""Tasks and their data: found here, or named with the command that brings them."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from kvcompress.errors import KVCompressError
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import data
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.cells.results import read_cell as read
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.tasks import BUNDLED_TASKS
from tests.support.evaluation import FOUR, error_line

pytestmark = pytest.mark.usefixtures("clean_process", "plots_not_drawn")

CACHE = str(datasets.config.HF_DATASETS_CACHE)
HOME = str(Path(CACHE).parent)


@pytest.fixture
def data_root(tmp_path):
    """A data folder with the official TextVQA's name, filled with the bundled questions."""
    folder = tmp_path / "data" / "lmms-lab-encoder" / "textvqa" / "data"
    folder.mkdir(parents=True)
    shutil.copy(BUNDLED_TASKS / "tiny_textvqa" / "headline.parquet", folder / "validation-00000-of-00001.parquet")
    return tmp_path / "data"


@pytest.mark.slow  # the whole index
def test_tasks_of_include_path_are_found_and_may_not_hide(small_index, tmp_path, capsys):
    task = (BUNDLED_TASKS / "tiny_textvqa" / "tiny_textvqa.yaml").read_text()
    task = task.replace("headline.parquet", str(BUNDLED_TASKS / "tiny_textvqa" / "headline.parquet"))
    (tmp_path / "mine.yaml").write_text(task.replace("task: tiny_textvqa", "task: mine"))
    argv = [*FOUR[1:], "--limit", "1", "--include_path", str(tmp_path)]
    assert evaluate.main(["mine", *argv]) == 0
    assert evaluate.main(["mina", *argv]) == 2
    assert error_line(capsys).startswith("error: unknown task 'mina' (did you mean 'mine'?)")
    (tmp_path / "hidden.yaml").write_text(task)
    assert evaluate.main(["tiny_textvqa", *argv]) == 2
    assert "'tiny_textvqa' of --include_path has the name of another task" in error_line(capsys)


def test_official_task_runs_from_a_local_data_folder(data_root):
    assert evaluate.main(["textvqa_val", *FOUR[1:], "--limit", "2"]) == 0
    results, samples = read(Path("results/textvqa_val/tiny/snapkv-0.2-limit=2"))
    assert 0 <= results["results"]["textvqa_val"]["exact_match,none"] <= 1
    assert len(samples) == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "datasets: No space left on device; HF_HOME="),
        (OSError(errno.EROFS, "Read-only file system", "/cache"), "/cache: Read-only file system; HF_HOME="),
        (OSError(errno.ENOENT, "No such file or directory", HOME), f"{HOME}: No such file or directory; HF_HOME="),
        (OSError(errno.ENOTDIR, "Not a directory", CACHE), f"{CACHE}: Not a directory; HF_HOME="),
    ],
)
def test_a_cache_that_cannot_be_written_is_not_taken_for_damaged_data(error, said, monkeypatch, capsys):
    def unpack(*args, **kwargs):
        raise datasets.exceptions.DatasetGenerationError("An error occurred") from error

    monkeypatch.setattr(datasets, "load_dataset", unpack)
    assert evaluate.main(FOUR) == 1
    line = error_line(capsys)
    assert line.startswith("error: the data of task 'tiny_textvqa' cannot be unpacked into ")
    assert said in line


def test_a_file_of_the_data_that_may_not_be_read_is_named_as_such(monkeypatch, capsys):
    file = str(BUNDLED_TASKS / "tiny_textvqa" / "headline.parquet")

    def unpack(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", file)

    monkeypatch.setattr(datasets, "load_dataset", unpack)
    assert evaluate.main(FOUR) == 2
    assert f"cannot be read from {file}: PermissionError" in error_line(capsys)


def test_replaced_data_changes_its_identity(data_root):
    def identity():
        manager = data.find_tasks(["textvqa_val"], None)
        return [data.data_identity(task) for task in data.load_tasks(manager, "textvqa_val", data_root)]

    before = identity()
    assert identity() == before
    (file,) = data_root.rglob("*.parquet")
    os.utime(file, ns=(1, 1))
    assert identity() != before


def test_data_in_memory_has_the_identity_of_its_content():
    def identity(answers):
        return data.data_identity(SimpleNamespace(eval_docs=datasets.Dataset.from_dict({"answer": answers})))

    assert identity(["a", "b"]) == identity(["a", "b"]) != identity(["a", "c"])


@pytest.mark.parametrize(("limit", "expected"), [(None, 500), (2000, 500), (16, 16), (0.1, 50), (0.0011, 1)])
def test_questions_of_a_cell_are_counted_as_lmms_eval_does(limit, expected):
    assert data.limited(500, limit) == expected


def test_fraction_of_a_task_is_taken_and_of_a_group_refused(small_index, tmp_path):
    (all_of_it,), (half,) = (Plan.of(parse([*FOUR, *limit])).jobs() for limit in ([], ["--limit", "0.5"]))
    assert half.questions == -(-all_of_it.questions // 2) > 0
    group = "group: two\ntask:\n  - tiny_textvqa\n  - tiny_textvqa_color\n"
    (tmp_path / "two.yaml").write_text(group)
    argv = ["two", *FOUR[1:], "--include_path", str(tmp_path), "--limit"]
    with pytest.raises(KVCompressError, match="is a group, which needs a number"):
        evaluate.run(Plan.of(parse([*argv, "0.5"])), [])
