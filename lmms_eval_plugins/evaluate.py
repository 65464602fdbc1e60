"""The command behind `scripts/run_eval.sh`: methods x ratios x tasks on one loaded model, through lmms-eval.

    python -m lmms_eval_plugins.evaluate TASK MODEL METHOD RATIO [flags] [key=value ...]

lmms-eval runs in this process. Its own command line exits with 0 when an evaluation fails; this one exits with 0
only where the results of every cell are complete on disk, with 2 for bad input, with 1 where something else is
wrong, with 130 after Ctrl-C.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import math
import os
import platform
import re
import sys
import tempfile
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_line import DEFAULT_SEEDS, Request, UsageError, nearest, parse
from .results import (
    Cell,
    class_identity,
    code_identity,
    files_identity,
    incomplete_reason,
    new_cell,
    overlays_asked,
    write_cell,
)

if TYPE_CHECKING:
    from lmms_eval.api.task import Task
    from lmms_eval.tasks import TaskManager

    from .arguments import ModelArguments
    from .model import KVCompressLM

HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
DEFAULT_DATA_ROOT = Path("data")
# What lmms-eval's own command line takes out of an answer before it is scored.
REASONING_TAGS = '[["<think>", "</think>"], ["<analysis>", "</analysis>"]]'
PACKAGES = ("kvcompress", "torch", "transformers", "lmms-eval", "datasets", "accelerate")


class EvaluationFailed(RuntimeError):
    """The input is fine, but there are no results. The message is one line and says what to do."""


@dataclass(frozen=True)
class Job:
    """A cell, all options of its method, what its numbers depend on (see `fingerprint`), and how long it is."""

    cell: Cell
    options: dict[str, Any]
    folder: Path
    fingerprint: dict[str, Any]
    questions: int

    @property
    def name(self) -> str:
        """`snapkv-0.2-window_size=8`: the cell without its task, model and settings of the run."""
        return replace(self.cell, settings={}).folder(Path()).name

    @property
    def todo(self) -> str | None:
        """Why this cell has to be computed; None where its results are complete."""
        return incomplete_reason(self.folder, self.fingerprint)


# -- methods, options and model arguments


def check_arguments(request: Request) -> tuple["ModelArguments", list[tuple[Cell, dict[str, Any]]]]:
    """The checked model arguments, and every cell with all options of its method.

    Raises KVCompressError or UsageError for an unknown method, option or model argument, or a wrong value of one.
    """
    from kvcompress import KVCompressError, list_methods
    from kvcompress.methods import method_info
    from kvcompress.policy.options import all_options
    from kvcompress.policy.policy import check_tensor_parallel, make_policy

    from .arguments import LEGACY_ARGUMENTS, TINY_MODEL, ModelArguments, parse_arguments

    methods = list({method_info(name).name: method_info(name) for name in request.methods}.values())
    scorer = request.arguments.get("scorer")
    options = {name for info in methods for name in all_options(info, scorer)}
    own = {name: value for name, value in request.arguments.items() if name not in options}
    for name in own:
        if name in ModelArguments.model_fields or name in LEGACY_ARGUMENTS:
            continue
        asked = ", ".join(info.name for info in methods)
        owners = ", ".join(info.name for info in list_methods().values() if name in all_options(info))
        if owners:
            raise KVCompressError(f"{name!r} is an option of {owners}, not of {asked}")
        valid = sorted({*ModelArguments.model_fields, "budget", *options} - {"legacy", "pretrained"})
        raise KVCompressError(f"unknown argument {name!r}{nearest(name, valid)} for {asked}; valid: {', '.join(valid)}")
    model = request.model if request.model == TINY_MODEL else local_or_hub(request.model)
    for name in {"chat_template", "system_prompt"} & own.keys():  # text, or a file of the present working directory
        own[name] = str(Path(own[name]).resolve()) if Path(str(own[name])).is_file() else own[name]
    arguments, _ = parse_arguments(pretrained=model, **own)

    settings = run_settings(arguments, request.flags)
    cells = []
    for task in request.tasks:
        for info in methods:
            defaults = all_options(info, scorer)
            given = {name: value for name, value in request.arguments.items() if name in defaults}
            policy = make_policy(info.name, 1.0, **given)
            if arguments.tp_plan is not None:
                check_tensor_parallel(policy)
            in_force = policy.options
            changed = {name: value for name, value in in_force.items() if value != defaults[name]}
            sizes = [{"ratio": ratio} for ratio in request.ratios] + [{"budget": size} for size in request.budgets]
            for size in [{"ratio": 1.0}] if info.name == "full" else sizes:
                cells.append((Cell(task, model, info.name, **size, options=changed, settings=settings), in_force))
    return arguments, cells


def local_or_hub(model: str) -> str:
    """The absolute path of a local folder; a hub id as it is. Raises UsageError for anything else."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"MODEL {model!r} is a folder without config.json, so not a model")
        return str(path.resolve())
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise UsageError(f"MODEL {model!r} is neither a folder, nor a hub id such as org/name, nor 'tiny'")
    return model


# Arguments that change neither a score nor a time.
HARMLESS = {"pretrained", "measurements_path", "vision_cache_gb", "prompt_cache_gb"}


def run_settings(arguments: "ModelArguments", flags: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run that differ from the defaults and may change a score or a time."""
    settings = arguments.model_dump(mode="json", exclude_defaults=True, exclude=HARMLESS)
    if flags.seed != DEFAULT_SEEDS:
        settings["seed"] = ",".join(str(seed) for seed in flags.seed)
    if flags.data_root is not None:
        settings["data"] = flags.data_root.name
    for name in ("limit", "gen_kwargs", "num_fewshot", "predict_only"):
        if value := getattr(flags, name):
            settings[name] = value
    return settings


# -- the machine: GPU, network, several processes


def check_device(device: str | None, processes: int) -> None:
    """Raises EvaluationFailed where a GPU is named that is not there, or there are fewer than processes."""
    import torch

    found = torch.cuda.device_count()
    sees = f"torch {torch.__version__} sees {found or 'no'} CUDA GPU{'s' if found > 1 else ''}"
    if device and re.fullmatch(r"cuda(:\d+)?", device) and int(device.partition(":")[2] or 0) >= found:
        raise EvaluationFailed(f"device {device!r} was asked for, but {sees}; device=cpu runs without one")
    if device != "cpu" and 0 < found < processes:
        raise EvaluationFailed(f"NUM_PROCESSES={processes}, but {sees}; device=cpu runs on the CPU")


def set_offline(request: Request) -> None:
    """Tell the hub's client to stay off the network where it is not needed or not there: otherwise it tries for
    more than a minute before it says so. Call before anything imports that client."""
    if "HF_HUB_OFFLINE" not in os.environ and not (needs_hub(request) and hub_is_reachable()):
        os.environ["HF_HUB_OFFLINE"] = "1"


def needs_hub(request: Request) -> bool:
    """False where the model is a folder or the bundled one and every task is bundled."""
    bundled = {path.stem for path in (Path(__file__).parent / "tasks").rglob("*.yaml")}
    is_local = request.model == "tiny" or Path(request.model).expanduser().is_dir()
    return not is_local or not bundled.issuperset(request.tasks)


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_is_reachable(timeout_s: float = 5) -> bool:
    """Whether the hub, or a proxy on the way to it, answers at all."""
    try:
        urllib.request.urlopen(urllib.request.Request(HUB, method="HEAD"), timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def check_model_is_local(arguments: "ModelArguments") -> None:
    """For a run without the hub: raises EvaluationFailed unless the model is a folder or in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    name = arguments.pretrained
    cached = None if Path(name).is_dir() else try_to_load_from_cache(name, "config.json", revision=arguments.revision)
    if not Path(name).is_dir() and not isinstance(cached, str):
        folder = name.split("/")[-1]
        raise EvaluationFailed(
            f"model {name!r} is not on this machine, and {HUB} is not reachable or HF_HUB_OFFLINE is set: where there "
            f"is network run `hf download {name} --local-dir {folder}`, copy the folder here and give its path as MODEL"
        )


def launch_ranks(processes: int, argv: list[str]) -> None:
    """Replace this process by `processes` ranks of the same command. `--multi_gpu` also serves CPU ranks: accelerate's
    `--cpu` would start a single process without a word."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
    launcher += ["--num_processes", str(processes), "--main_process_port", "0"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", __spec__.name]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, *argv])


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)


# -- tasks and their data


def find_tasks(names: list[str], include_path: Path | None) -> "TaskManager":
    """lmms-eval's task manager with all of `names`. Raises KVCompressError or UsageError for an unknown one."""
    from .tasks import BUNDLED_TASKS, task_manager, task_names

    if include_path is None:
        return task_manager(names)
    from lmms_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(BUNDLED_TASKS), str(include_path)])
    for name in names:
        if name not in manager.all_tasks:
            raise UsageError(f"unknown task {name!r}{nearest(name, manager.all_tasks)}")
        # lmms-eval would run its own without a word.
        if name in task_names(include_path) and include_path not in Path(manager.task_index[name]["yaml_path"]).parents:
            raise UsageError(f"task {name!r} of --include_path has the name of another task: rename it")
    return manager


def load_tasks(manager: "TaskManager", name: str, data_root: Path | None) -> list["Task"]:
    """The task, or the tasks of the group, with their data. Raises EvaluationFailed where data is missing."""
    try:
        with working_directory(data_root), one_attempt():
            return leaf_tasks(manager.load_task_or_group([name], "chat"))
    except Exception as error:
        raise EvaluationFailed(data_error(name, error, data_root)) from error


def leaf_tasks(tasks: dict[Any, Any]) -> list["Task"]:
    """The tasks of a task, a group, or a group of groups."""
    nested = [leaf_tasks(task) if isinstance(task, dict) else [task] for task in tasks.values()]
    return [task for tasks in nested for task in tasks]


def data_identity(task: "Task") -> list[str]:
    """The Arrow cache's files: `datasets` derives their names from the source files' paths, sizes and dates."""
    return sorted("/".join(Path(file["filename"]).parts[-5:]) for file in task.eval_docs.cache_files)


@contextlib.contextmanager
def one_attempt() -> Iterator[None]:
    """lmms-eval loads a dataset up to five times and then hides the error in a RetryError; here the first one counts.
    (The hub's client repeats single requests by itself.)"""
    import tenacity
    from lmms_eval.api.task import ConfigurableTask

    retry = ConfigurableTask.download.retry
    saved, retry.stop, retry.reraise = (retry.stop, retry.reraise), tenacity.stop_after_attempt(1), True
    try:
        yield
    finally:
        retry.stop, retry.reraise = saved


def data_error(task: str, error: Exception, data_root: Path | None) -> str:
    """One line: what is missing, and the command that brings it."""
    message = " ".join(str(error).split())
    repository = re.search(r"['\"]([\w.-]+/[\w.-]+)['\"]", message)
    if not (is_offline() and isinstance(error, OSError)):
        return f"the data of task {task!r} could not be loaded: {type(error).__name__}: {message[:300]}"
    absent = f"the data of task {task!r} is not on this machine, and {HUB} is not reachable or HF_HUB_OFFLINE is set: "
    if repository is None:  # videos, which lmms-eval unpacks under HF_HOME
        return absent + "run the command once with --limit 1 where there is network, and copy its HF_HOME folder here"
    name, folder = repository[1], f"{data_root or DEFAULT_DATA_ROOT}/{repository[1]}"
    return absent + (
        f"where there is network run `hf download {name} --repo-type dataset --local-dir {folder}`, and copy the "
        f"folder here to {folder}"
    )


@contextlib.contextmanager
def working_directory(path: Path | None) -> Iterator[None]:
    """`datasets` takes a folder of the working directory that is named like a hub dataset for that dataset."""
    before = Path.cwd()
    os.chdir(path or before)
    try:
        yield
    finally:
        os.chdir(before)


# -- one cell


def fingerprint(cell: Cell, arguments: "ModelArguments", options: dict, data: dict[str, Any]) -> dict[str, Any]:
    """What a cell's numbers depend on: a cell on disk counts only while all of it is the same."""
    import kvcompress

    plugin = Path(__file__).parent
    core = plugin.parent / "kvcompress"
    model = Path(arguments.pretrained)
    method = kvcompress.list_methods()[cell.method].cls
    return {
        **asdict(cell),
        "options": options,
        "model_files": files_identity(model) if model.is_dir() else arguments.revision,
        "data": data,
        "code": code_identity(
            core, *(plugin / name for name in ("model.py", "media.py", "prepared.py", "llava_next.py", "weights.py"))
        )
        + class_identity(method, but_packages=("kvcompress", "lmms_eval_plugins")),
    }


def evaluate_cell(lm: "KVCompressLM", job: Job, manager: "TaskManager", flags: argparse.Namespace) -> None:
    """Run lmms-eval for one cell and write its folder (rank 0; all ranks call this)."""
    from lmms_eval.evaluator import simple_evaluate

    from .model import summarise
    from .survivors import IMAGES_FOLDER, write_survivors

    cell = job.cell
    lm.set_cell(cell.method, cell.ratio, cell.budget, **job.options)
    lm.overlays = flags.overlays
    lm.reset_rows()
    with new_cell(job.folder) if rank() == 0 else tempfile.TemporaryDirectory() as folder:
        lmms_eval = as_one_process()(simple_evaluate) if lm.args.tp_plan else simple_evaluate
        output = lmms_eval(
            model=lm,
            model_args=lm.args.model_dump(mode="json", exclude_defaults=True),
            tasks=[cell.task],
            task_manager=manager,
            batch_size=lm.batch_size,
            device=str(lm.device),
            limit=flags.limit,
            num_fewshot=flags.num_fewshot,
            gen_kwargs=",".join(f"{name}={value}" for name, value in flags.gen_kwargs.items()) or None,
            predict_only=flags.predict_only,
            verbosity=flags.verbosity,
            datetime_str=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            # Some tasks write side files, such as a test server's submission, under cli_args.output_path.
            cli_args=argparse.Namespace(
                output_path=folder and str(folder), process_with_media=False, reasoning_tags=REASONING_TAGS
            ),
            **dict(zip(SEED_ARGUMENTS, flags.seed, strict=True)),
        )
        rows = lm.gather_rows()
        if rank() != 0:
            return
        survivors = [{"task": r["task"], "doc_id": r["doc_id"], **r.pop("survivors")} for r in rows if "survivors" in r]
        write_survivors(folder, job.folder.parent / IMAGES_FOLDER, flags.overlays, survivors)
        samples = merge_samples(output.pop("samples"), rows, output["n-samples"])
        results = {
            "protocol": protocol(job),
            **{key: value for key, value in output.items() if not key.startswith("git_")},
            "token_counts": output.get("efficiency"),
            "efficiency": summarise(rows),
            "environment": environment(lm),
            "fingerprint": job.fingerprint,
        }
        write_cell(folder, results, samples)
    if job.todo:
        raise EvaluationFailed(f"{job.folder} was written but is not complete: {job.todo}")


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """A tensor-parallel model answers all questions in every process: lmms-eval must not share them out."""
    hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        yield
    finally:
        os.environ.update(hidden)


SEED_ARGUMENTS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


def merge_samples(
    samples: dict[str, list[dict]], rows: list[dict[str, Any]], expected: dict[str, dict[str, int]]
) -> list[dict[str, Any]]:
    """lmms-eval's samples in the order of the documents, each with its measurement.

    Args:
        samples: task -> samples; one document has several where a task has several answer filters.
        rows: measurements, with `task` and `doc_id`.
        expected: task -> {"effective": number of documents}.

    Raises:
        EvaluationFailed: a document was not answered, or not measured.
    """
    measured = {(row["task"], row["doc_id"]): row for row in rows}
    merged = []
    for task, of_task in samples.items():
        answered = {sample["doc_id"] for sample in of_task}
        if len(answered) != expected[task]["effective"]:
            raise EvaluationFailed(f"{task}: {len(answered)} of {expected[task]['effective']} questions were answered")
        for sample in sorted(of_task, key=lambda sample: sample["doc_id"]):
            row = measured.get((task, sample["doc_id"]))
            if row is None:
                raise EvaluationFailed(f"{task}: the answer to question {sample['doc_id']} was not measured")
            arguments = sample["arguments"]
            scores = {key: value for key, value in sample.items() if key not in ("doc_hash", "arguments")}
            merged.append({"task": task, "input": arguments[0] if arguments else None, **scores, "measurement": row})
    return merged


def protocol(job: Job) -> dict[str, Any]:
    """What was compressed how: what a reader must know to compare the numbers with others."""
    return {
        **{key: value for key, value in asdict(job.cell).items() if key != "options"},
        "options": job.options,
        "changed_options": job.cell.options,
        # `full` drops nothing, so it has no scope and no denominator.
        **{name: job.options.get(name) for name in ("scope", "ratio_of", "first_token")},
    }


def environment(lm: "KVCompressLM") -> dict[str, Any]:
    import torch

    on_gpu = lm.device.type == "cuda"
    return {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(lm.device) if on_gpu else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "attn_implementation": lm.model.config._attn_implementation,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
    }


# -- the run


def run(request: Request, argv: list[str]) -> None:
    """Evaluate every cell that is not complete on disk, then report."""
    flags = request.flags
    data_root = find_data_root(flags)
    processes = int(os.environ.get("NUM_PROCESSES", 1))

    arguments, cells = check_arguments(request)
    check_device(arguments.device, processes)
    if is_offline():
        check_model_is_local(arguments)
    if processes > 1 and "LOCAL_RANK" not in os.environ:
        launch_ranks(processes, argv)

    quiet(flags.verbosity)
    manager, jobs = find_jobs(request, arguments, cells, data_root)
    pending = [job for job in jobs if flags.force or job.todo or overlays_asked(job.folder) < flags.overlays]
    if skipped := len(jobs) - len(pending):
        say(f"{skipped} of {len(jobs)} cells are complete and skipped (--force computes them again)")
    for job in pending:
        if job.folder.exists():
            say(f"computed again: {job.folder.name} ({job.todo or ('--force' if flags.force else '--overlays')})")
    if pending:
        evaluate_cells(load_model(arguments), pending, manager, flags, data_root)
    if rank() == 0:
        from .report import report

        for folder in dict.fromkeys(job.folder.parent for job in jobs):
            report(folder, jobs[0].cell.settings)


def evaluate_cells(
    lm: "KVCompressLM", jobs: list[Job], manager: "TaskManager", flags: argparse.Namespace, data_root: Path | None
) -> None:
    """Evaluate cells one after the other, and say how far they are."""
    from .progress import Grid

    grid, task = Grid([job.questions for job in jobs]), None
    lm.progress_bar = partial(grid.bar, disable=rank() != 0)
    for number, job in enumerate(jobs):
        if job.cell.task != task:
            task = job.cell.task
            say(measured_line(lm, job, sum(other.cell.task == task for other in jobs)))
        grid.begin(number, job.name)
        with working_directory(data_root):
            evaluate_cell(lm, job, manager, flags)


def measured_line(lm: "KVCompressLM", job: Job, cells: int) -> str:
    """What the next cells measure, and on what."""
    found = {key: value for key, value in environment(lm).items() if key not in ("versions", "python")}
    facts = {**job.cell.settings, **found, "batch_size": lm.batch_size}
    listed = " ".join(f"{key}={value}" for key, value in facts.items())
    return f"measuring {job.cell.task} with {job.cell.model}: {cells} cells of {job.questions} questions; {listed}"


def find_data_root(flags: argparse.Namespace) -> Path | None:
    """The folder given, or `data` where there is one."""
    return flags.data_root or (DEFAULT_DATA_ROOT if DEFAULT_DATA_ROOT.is_dir() else None)


def find_jobs(
    request: Request,
    arguments: "ModelArguments",
    cells: list[tuple[Cell, dict[str, Any]]],
    data_root: Path | None,
) -> tuple["TaskManager", list[Job]]:
    """The tasks with their data, and a job for every cell of `check_arguments`.

    Raises KVCompressError or UsageError for an unknown task, EvaluationFailed where data is missing.
    """
    flags, output = request.flags, request.flags.output_path.resolve()
    manager, data, questions = find_tasks(request.tasks, flags.include_path), {}, {}
    for name in request.tasks:
        tasks = load_tasks(manager, name, data_root)
        if len(tasks) > 1 and isinstance(flags.limit, float):
            # lmms-eval turns the fraction into a number on the first task and uses that for the others.
            raise UsageError(f"--limit {flags.limit:g}: {name!r} is a group, which needs a number of questions")
        data[name] = {task.config.task: data_identity(task) for task in tasks}
        questions[name] = sum(limited(len(task.eval_docs), flags.limit) for task in tasks)
    jobs = [
        Job(
            cell,
            options,
            cell.folder(output),
            fingerprint(cell, arguments, options, data[cell.task]),
            questions[cell.task],
        )
        for cell, options in cells
    ]
    return manager, jobs


def limited(questions: int, limit: float | int | None) -> int:
    """How many questions `--limit` leaves, as lmms-eval counts."""
    if limit is None:
        return questions
    return math.ceil(questions * limit) if limit < 1 else min(questions, int(limit))


def load_model(arguments: "ModelArguments") -> "KVCompressLM":
    """Raises EvaluationFailed where transformers cannot find, read or place the checkpoint."""
    import torch

    from .arguments import TINY_MODEL, ModelArguments
    from .model import KVCompressLM

    if arguments.pretrained == ModelArguments(pretrained=TINY_MODEL).pretrained and "OMP_NUM_THREADS" not in os.environ:
        # Its layers are too small to share: two threads mostly wait for each other, on a busy machine for seconds.
        torch.set_num_threads(1)
    try:
        return KVCompressLM(**arguments.model_dump(exclude_unset=True))
    except (OSError, ImportError) as error:
        message = " ".join(str(error).split())
        raise EvaluationFailed(f"model {arguments.pretrained} could not be loaded: {message[:500]}") from error


def quiet(verbosity: str) -> None:
    """One progress bar per cell, the model's, is enough: hide lmms-eval's, and its log below `verbosity`."""
    import datasets
    import lmms_eval.api.task
    import lmms_eval.evaluator
    from loguru import logger
    from tqdm import tqdm

    def no_bar(*args: Any, **kwargs: Any) -> tqdm:
        return tqdm(*args, **{**kwargs, "disable": True})

    logger.remove()
    logger.add(sys.stderr, level=verbosity)
    datasets.disable_progress_bars()
    lmms_eval.api.task.tqdm = lmms_eval.evaluator.tqdm = no_bar


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return evaluate(argv)
    except KeyboardInterrupt:
        return fail("interrupted; finished cells are kept, the same command goes on from there", 130)
    except Exception as error:
        traceback.print_exc()
        return fail(f"{type(error).__name__}: {error}", 1)


def evaluate(argv: list[str]) -> int:
    """The exit code, where nothing unforeseen happens."""
    try:
        request = parse(argv)
    except UsageError as error:
        return fail(error, 2)
    set_offline(request)
    from kvcompress import KVCompressError  # takes seconds: torch and transformers come with it

    try:
        run(request, argv)
    except (UsageError, KVCompressError) as error:
        return fail(error, 2)
    except EvaluationFailed as error:
        return fail(error, 1)
    return 0


def fail(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
