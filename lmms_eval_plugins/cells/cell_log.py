"""Log each complete cell to wandb (`--wandb_args`; offline if no account is set up) and to the hub
(`--hf_hub_log_args`, in repositories named as lmms-eval names them)."""

import hashlib
import inspect
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.errors import nearest, one_line

from .errors import EvaluationFailed, UsageError
from .machine import HUB, hub_is_reachable, is_offline, rank, say
from .plan import Job, Plan
from .results import RESULTS_FILE, SAMPLES_FILE, dumps, read_results, read_samples

if TYPE_CHECKING:
    import wandb
    from huggingface_hub import HfApi

# The values that a cell logs and a sweep may optimise.
METRICS = (
    "accuracy",
    "accuracy_stderr",
    "throughput",
    "ttft_s",
    "tpot_s",
    "kv_bytes",
    "realised_ratio",
    "peak_memory_bytes",
)
DEFAULT_PROJECT = "kvcompress"
MAX_ARTIFACT_NAME = 128  # wandb's
# Arguments that we set ourselves, or that are not text.
OWN = ("config", "settings", "config_exclude_keys", "config_include_keys")
SWITCHES = {"true": True, "false": False}  # values that are not text
DEFAULT_REPOSITORY = "lmms-eval-results"


class CellLog:
    """Logs each complete cell it is called with. A cell that cannot be logged keeps its results and does not stop the
    run; `check` reports it at the end."""

    def __init__(self, plan: Plan):
        """Raises UsageError or EvaluationFailed if nothing could be logged."""
        self.flags, self.failed = plan.request.flags, []
        if self.flags.wandb_args is not None:
            check_wandb(self.flags.wandb_args, len(plan.cells))
        if self.flags.hf_hub_log_args is not None:
            check_hub()

    def __call__(self, job: Job) -> None:
        if rank() != 0:
            return
        try:
            if self.flags.wandb_args is not None:
                log_cell(job, self.flags.wandb_args, self.flags.wandb_log_samples)
            if self.flags.hf_hub_log_args is not None:
                push_cell(job, self.flags.hf_hub_log_args)
        except EvaluationFailed as error:
            say(f"not logged: {job.folder.name}: {error}")
            self.failed.append(job)

    def check(self) -> None:
        """Raise EvaluationFailed if a cell could not be logged."""
        if self.failed:
            raise EvaluationFailed(
                f"{len(self.failed)} complete cells could not be logged, the first is {self.failed[0].folder.name}; "
                "run the same command to try again"
            )


# -- wandb


def check_wandb(arguments: dict[str, str], cells: int) -> None:
    """Raise UsageError for an argument unknown to `wandb.init`, EvaluationFailed if wandb is not installed."""
    try:
        import wandb
    except ImportError:
        raise EvaluationFailed("--wandb_args needs a package: pip install wandb") from None
    valid = [name for name in inspect.signature(wandb.init).parameters if name not in OWN]
    for name in arguments:
        if name not in valid:
            hint = nearest(name, valid) or f"; it has {', '.join(valid)}"
            raise UsageError(f"--wandb_args: wandb.init has no argument {name!r}{hint}")
    if "id" in arguments and cells > 1:
        raise UsageError(f"--wandb_args: id={arguments['id']} names one run, but there are {cells} cells; leave it out")


def log_cell(job: Job, arguments: dict[str, str], with_samples: bool) -> None:
    """Log a complete cell as its own run: its values, protocol and environment, and its answers as a table.

    Logging a cell again updates the same run. Raises EvaluationFailed if wandb fails.
    """
    import wandb

    cell = job.cell
    settings: dict[str, Any] = {
        "project": os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
        "id": hashlib.sha256(dumps(job.fingerprint).encode()).hexdigest()[:16],
        "group": f"{cell.task} {cell.model}",
        "job_type": "evaluation",
        "dir": str(job.plan.request.flags.output_path),
        "mode": _mode(),
        **{name: SWITCHES.get(value.lower(), value) for name, value in arguments.items()},
        "name": "-".join([*filter(None, [arguments.get("name")]), job.folder.name]),
    }
    if "tags" in arguments:
        settings["tags"] = arguments["tags"].split("+")
    try:
        with wandb.init(config={"task": cell.task, "model": cell.model}, **settings) as run:
            log_results(run, job.folder)
            if with_samples:
                run.log({"samples": _samples(job)})
    except (wandb.Error, OSError, ValueError) as error:  # ValueError: an argument's value
        raise EvaluationFailed(f"wandb: {one_line(error)}") from error


def _mode() -> str:
    import wandb

    return os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")


def _samples(job: Job) -> "wandb.Table":
    import wandb

    samples = read_samples(job.folder)
    scores = {name: None for sample in samples for name, value in sample.items() if isinstance(value, int | float)}
    names = ["task", "doc_id", "input", "target", "filtered_resps", *(name for name in scores if name != "doc_id")]
    rows = [[_plain(sample.get(name)) for name in names] for sample in samples]
    return wandb.Table(columns=names, data=rows)


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) or value is None else dumps(value)


def cell_values(results: dict[str, Any]) -> dict[str, float]:
    """Return the METRICS of a cell's results.json and its `samples`, leaving out missing ones.

    `accuracy` is the task's headline metric, whatever its name. Times, bytes and memory are medians over questions.
    `throughput` is `tokens_per_s`, which is missing where a prefix cache spared prefills.
    """
    from ..report.table import cell_row

    row = cell_row(results)
    values = {
        "accuracy": row["score"],
        "accuracy_stderr": row["stderr"],
        "throughput": row["tokens_per_s"],
        "ttft_s": row["ttft_s"],
        "tpot_s": row["tpot_s"],
        "kv_bytes": row["kv_bytes"],
        "realised_ratio": row["realised"],
        "peak_memory_bytes": results["efficiency"].get("peak_memory_bytes", {}).get("median"),
        "samples": row["samples"],
    }
    return {name: value for name, value in values.items() if value is not None}


def log_results(run: "wandb.Run", folder: Path) -> dict[str, float]:
    """Log a complete cell to a wandb run: its values, protocol, environment and files. Returns the values."""
    results = read_results(folder)
    values = cell_values(results)
    run.config.update(
        {"protocol": results["protocol"], "environment": results["environment"], "results": str(folder)},
        allow_val_change=True,
    )
    run.log(values)
    run.log_artifact(results_artifact(folder))
    return values


def results_artifact(folder: Path) -> "wandb.Artifact":
    """Return an artifact with a cell's results and samples under their path in the results folder, so that artifacts
    downloaded into one folder form a results folder. A cell's artifact keeps its name; later results are new versions.
    """
    import wandb

    place = Path(*folder.parts[-3:]).as_posix()
    digest = hashlib.sha256(place.encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", place.replace("/", "-"))
    artifact = wandb.Artifact(f"{readable[: MAX_ARTIFACT_NAME - 1 - len(digest)]}-{digest}", type="results")
    for file in (RESULTS_FILE, SAMPLES_FILE):
        # Upload in place: offline, wandb would otherwise copy each file into the user's home.
        artifact.add_file(str(folder / file), f"{place}/{file}", policy="immutable", skip_cache=True)
    return artifact


# -- the hub


def check_hub() -> None:
    """Raise EvaluationFailed if nothing could be pushed for lack of a token or a network."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise EvaluationFailed("--hf_hub_log_args: no hub token is set: set HF_TOKEN, or run `hf auth login`")
    if is_offline() or not hub_is_reachable():
        raise EvaluationFailed(f"--hf_hub_log_args: {HUB} is not reachable, or HF_HUB_OFFLINE is set")


def push_cell(job: Job, arguments: dict[str, Any]) -> None:
    """Push a complete cell under its path relative to the results' root. Raises EvaluationFailed if the hub refuses."""
    from huggingface_hub import HfApi

    root = job.plan.request.flags.output_path.resolve()
    try:
        api = HfApi()
        for kind, file in (("results", RESULTS_FILE), ("samples", SAMPLES_FILE)):
            if arguments.get(f"push_{kind}_to_hub"):
                repository = _repository(api, arguments, kind)
                api.upload_file(
                    path_or_fileobj=job.folder / file,
                    path_in_repo=(job.folder.relative_to(root) / file).as_posix(),
                    repo_id=repository,
                    repo_type="dataset",
                    commit_message=f"{job.cell.task}: {job.folder.name}",
                )
    except Exception as error:  # errors of the client, its HTTP library and the system share no base class
        message = one_line(error, 300)
        raise EvaluationFailed(f"the hub refused the upload: {type(error).__name__}: {message}") from error


def _repository(api: "HfApi", arguments: dict[str, Any], kind: str) -> str:
    """Create the repository of the results or the samples if needed, and return its id."""
    owner = arguments.get("hub_results_org") or api.whoami()["name"]
    both = arguments.get("hub_repo_name")
    details = both or arguments.get("details_repo_name") or DEFAULT_REPOSITORY
    name = details if kind == "samples" else both or arguments.get("results_repo_name") or details
    is_public = bool(arguments.get("public_repo"))
    repository = f"{owner}/{name}" if is_public else f"{owner}/{name}-private"
    api.create_repo(repository, repo_type="dataset", private=not is_public, exist_ok=True)
    if kind == "samples" and arguments.get("gated"):
        api.update_repo_settings(repository, gated="auto", repo_type="dataset")
    return repository
