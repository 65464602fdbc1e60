"""`--hf_hub_log_args`: push results and answers to the hub, in repositories named as lmms-eval names them."""

from typing import TYPE_CHECKING, Any

from .errors import EvaluationFailed
from .machine import HUB, hub_is_reachable, is_offline
from .plan import Job
from .results import RESULTS_FILE, SAMPLES_FILE

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_REPOSITORY = "lmms-eval-results"


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
        message = " ".join(str(error).split())[:300]
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
