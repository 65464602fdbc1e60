"""Log each complete cell to wandb and the hub, if requested."""

from .errors import EvaluationFailed
from .hub_upload import check_hub, push_cell
from .machine import rank, say
from .plan import Job, Plan
from .wandb_runs import check_wandb, log_cell


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
