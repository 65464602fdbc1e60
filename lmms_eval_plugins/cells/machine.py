"""Check what this machine offers: GPUs, the network, the model's files, several processes."""

import gc
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvcompress.command_line import COUNT, SWITCH
from kvcompress.command_line import VARIABLES as CORE_VARIABLES

from ..tasks import BUNDLED_TASKS
from .errors import EvaluationFailed
from .names import index_of
from .request import BUNDLED_MODEL, Request

if TYPE_CHECKING:
    from ..model.arguments import ModelArguments

HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
RANK = r"\d{1,4}"
VARIABLES = {
    **CORE_VARIABLES,
    "NUM_PROCESSES": (COUNT, "a number of processes, from 1 to 9999"),
    "WORLD_SIZE": (COUNT, "a number of processes, from 1 to 9999"),
    "RANK": (RANK, "the number of a process, from 0"),
    "LOCAL_RANK": (RANK, "the number of a process, from 0"),
    "HF_DATASETS_OFFLINE": (SWITCH, "1 or 0"),
    "TRANSFORMERS_OFFLINE": (SWITCH, "1 or 0"),
    "HF_ENDPOINT": (r"https?://\S+", "an address that begins with http:// or https://"),
}


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's garbage collector inside this context: imports create millions of objects that all stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def settled() -> Iterator[None]:
    """Hide all existing objects from the garbage collector inside this context; what a caller has hidden stays so."""
    of_caller = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not of_caller:
            gc.unfreeze()


def number_of_processes() -> int:
    """Return the requested number of ranks."""
    return int(os.environ.get("NUM_PROCESSES") or 1)


def check_device(device: str | None, processes: int) -> None:
    """Raise EvaluationFailed if the device does not exist, or there are fewer GPUs than processes."""
    import torch

    if device == "mps" and not torch.backends.mps.is_available():
        raise EvaluationFailed(
            f"device 'mps' was requested, but torch {torch.__version__} finds none here; device=cpu needs none"
        )
    found = torch.cuda.device_count()
    sees = f"torch {torch.__version__} sees {found or 'no'} CUDA GPU{'s' if found > 1 else ''}"
    if device and re.fullmatch(r"cuda(:\d+)?", device) and int(device.partition(":")[2] or 0) >= found:
        raise EvaluationFailed(f"device {device!r} was requested, but {sees}; device=cpu needs none")
    if device != "cpu" and 0 < found < processes:
        raise EvaluationFailed(f"NUM_PROCESSES={processes}, but {sees}; device=cpu runs on the CPU")


def set_offline(*requests: Request) -> None:
    """Tell the hub's client to stay offline if the network is not needed or not there: otherwise it retries for more
    than a minute before it fails. Call this before anything imports that client."""
    if "HF_HUB_OFFLINE" not in os.environ and not (any(map(needs_hub, requests)) and hub_is_reachable()):
        os.environ["HF_HUB_OFFLINE"] = "1"


def needs_hub(request: Request) -> bool:
    """Return False if the model is a folder or the bundled one, every task is bundled, and nothing is pushed."""
    is_local = request.model == BUNDLED_MODEL or os.path.isdir(os.path.expanduser(request.model))
    is_bundled = index_of(BUNDLED_TASKS).keys() >= set(request.tasks)
    return not (is_local and is_bundled) or request.flags.hf_hub_log_args is not None


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_is_reachable() -> bool:
    """Return whether the hub, or a proxy before it, answers at all."""
    try:
        urllib.request.urlopen(urllib.request.Request(HUB, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, http.client.HTTPException):  # the second: something that does not speak HTTP
        return False
    return True


def check_model_is_local(arguments: "ModelArguments") -> None:
    """Raise EvaluationFailed, for a run without the hub, unless the model is a folder or in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    name = arguments.pretrained
    if Path(name).is_dir():
        return
    if not isinstance(try_to_load_from_cache(name, "config.json", revision=arguments.revision), str):
        folder = name.split("/")[-1]
        raise EvaluationFailed(
            f"model {name!r} is not on this machine, and {HUB} is not reachable or HF_HUB_OFFLINE is set: on a machine "
            f"with network run `hf download {name} --local-dir {folder}`, copy the folder here and use it as MODEL"
        )


def join_processes() -> None:
    """Start the process group if this process is one of several. Do this first: lmms-eval's tasks with videos create an
    Accelerator that, on a machine without a GPU, would take each process for the only one."""
    if "LOCAL_RANK" in os.environ:
        import torch
        from accelerate import Accelerator

        Accelerator(cpu=not torch.cuda.is_available())


def rank() -> int:
    return int(os.environ.get("RANK") or 0)


def say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)
