"""Run the planned calls of `lmms_eval_plugins.evaluate`, each in its own process."""

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from kvcompress.command_line import called

from ..cells import machine
from ..cells.errors import EvaluationFailed
from ..cells.names import LM_EVAL_PACKAGE, lm_eval_folder
from ..cells.processes import evaluation
from .plan import PlannedCell, Run


def cannot_run(cell: PlannedCell, run: Run | None) -> str | None:
    """Say why a cell is not tried; None if it is."""
    if run is None:
        return f"needs {cell.benchmark.needs or cell.model.needs}"
    if run.asks_lm_eval and lm_eval_folder() is None:
        return f"needs lm-evaluation-harness: {sys.executable} -m pip install '{LM_EVAL_PACKAGE}'"
    if run.plan.server is not None:  # the model is there
        return None
    if cell.model.gpu and run.plan.arguments.device is None and not torch.cuda.is_available():
        return "needs a GPU, but torch sees none (device=cpu runs it without)"
    if machine.needs_hub(run.plan.request) and not _hub_is_there():
        try:
            machine.check_model_is_local(run.plan.arguments)
        except EvaluationFailed:
            name = run.plan.arguments.pretrained
            return (
                f"needs the model {name}: `hf download {name} --local-dir DIR/{Path(name).name}`, then --model-root DIR"
            )
    return None


@functools.cache
def _hub_is_there() -> bool:
    return not machine.is_offline() and machine.hub_is_reachable()


def run_all(runs: list[Run], failed: dict[tuple[str, ...], str]) -> None:
    """Run the calls one by one; `failed` collects why cells have no result."""
    for number, run in enumerate(runs, 1):
        print(f"[{number} of {len(runs)}] {run.cells[0].model.name}, {run.cells[0].benchmark.name}: ", end="")
        print(f"{called('eval')} {shlex.join(run.argv)}", flush=True)
        code, error = execute(run.argv)
        if code:
            failed |= {cell.key: f"failed: {error}" for cell in run.cells}


def execute(argv: Sequence[str]) -> tuple[int, str]:
    """Run `lmms_eval_plugins.evaluate` in its own process; return its exit code, and its error line if it has one."""
    tail = b""
    with evaluation(argv, stderr=subprocess.PIPE) as process:
        while chunk := os.read(process.stderr.fileno(), 65536):
            os.write(2, chunk)
            tail = (tail + chunk)[-8192:]
        code = process.wait()
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.startswith("error: ")]
    return code, lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
