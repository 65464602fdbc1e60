"""`--wandb_args`: log a wandb run for each cell, offline if no account is set up."""

import hashlib
import inspect
import os
from typing import TYPE_CHECKING, Any

from kvcompress.errors import nearest

from .command_line import literal
from .errors import EvaluationFailed, UsageError
from .plan import Job
from .results import dumps, read_samples

if TYPE_CHECKING:
    import wandb

# Arguments that we set ourselves, or that are not text.
OWN = ("config", "settings", "config_exclude_keys", "config_include_keys")


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

    from ..sweep.trial import DEFAULT_PROJECT, log_results

    cell = job.cell
    settings: dict[str, Any] = {
        "project": os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
        "id": hashlib.sha256(dumps(job.fingerprint).encode()).hexdigest()[:16],
        "group": f"{cell.task} {cell.model}",
        "job_type": "evaluation",
        "dir": str(job.plan.request.flags.output_path),
        "mode": _mode(),
        **{name: literal(value) for name, value in arguments.items()},
        "name": "-".join([*filter(None, [arguments.get("name")]), job.folder.name]),
    }
    if "tags" in arguments:
        settings["tags"] = arguments["tags"].split("+")
    try:
        with wandb.init(config={"task": cell.task, "model": cell.model}, **settings) as run:
            log_results(run, job.folder)
            if with_samples:
                run.log({"samples": _samples(job)})
    except (wandb.Error, OSError) as error:
        raise EvaluationFailed(f"wandb: {' '.join(str(error).split())}") from error


def _mode() -> str:
    import wandb

    return os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")


def _samples(job: Job) -> "wandb.Table":
    import wandb

    samples = read_samples(job.folder)
    scores = [name for name, value in samples[0].items() if isinstance(value, int | float) and name != "doc_id"]
    names = ["task", "doc_id", "input", "target", "filtered_resps", *scores]
    rows = [[_plain(sample.get(name)) for name in names] for sample in samples]
    return wandb.Table(columns=names, data=rows)


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) or value is None else dumps(value)
