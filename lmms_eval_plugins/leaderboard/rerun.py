"""Reconstruct the command that computes a cell from its results. The command as typed is not recorded: it may contain
file names and keys, and it computes many cells."""

import json
import shlex
from typing import Any

from ..cells.results import exact
from .protocol import as_text

SCRIPT = "./scripts/run_eval.sh"
# Setting -> the flag that sets it; all others are `key=value`.
FLAGS = {
    "data": "data-root",
    **{name: name for name in ("limit", "offset", "gen_kwargs", "num_fewshot", "seed", "repeats", "reasoning_tags")},
}
SWITCHES = ("predict_only", "fewshot_as_multiturn", "process_with_media", "apply_chat_template")


def command_of(cell: dict[str, Any]) -> str:
    """Return the command as one shell line, to run in the repository's root."""
    protocol, processes = cell["protocol"], cell.get("environment", {}).get("processes", 1)
    size = "-" if protocol["ratio"] is None else exact(protocol["ratio"] or 1.0)  # `blind` has 0 whatever is asked
    words = [SCRIPT, protocol["task"], protocol["model"], protocol["method"], size]
    if protocol["ratio"] is None:
        words.append(f"budget={protocol['budget']}")
    for name, value in protocol["changed_options"].items():
        if name == "server":  # its kind, no option; the environment has its address
            words += ["--server", str(cell.get("environment", {}).get("device")).partition(" at ")[2]]
        else:
            words.append(f"{name}={as_text(value)}")
    for name, value in protocol["settings"].items():
        if name in SWITCHES:
            words.append(f"--{name}")
        elif name == "metadata":
            words += ["--metadata", json.dumps(value)]
        elif name in FLAGS:
            words += [f"--{FLAGS[name]}", as_text(value)]
        else:
            words.append(f"{name}={as_text(value)}")
    before = f"NUM_PROCESSES={processes} " if processes > 1 else ""
    return before + shlex.join(words)
