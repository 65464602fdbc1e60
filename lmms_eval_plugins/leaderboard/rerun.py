"""The command that makes a cell, from what its results say. What was typed is not recorded: it may hold names of files
and keys, and it makes many cells."""

import json
import shlex
from typing import Any

from ..cells.results import exact
from .protocol import as_text

SCRIPT = "./scripts/run_eval.sh"
# Settings that are flags, under the flag's name; all others are `key=value`.
FLAGS = {
    "data": "data-root",
    **{name: name for name in ("limit", "offset", "gen_kwargs", "num_fewshot", "seed", "repeats", "reasoning_tags")},
}
SWITCHES = ("predict_only", "fewshot_as_multiturn", "process_with_media", "apply_chat_template")


def command_of(cell: dict[str, Any]) -> str:
    """One line for a shell, in the root of the repository."""
    protocol, processes = cell["protocol"], cell.get("environment", {}).get("processes", 1)
    size = "-" if protocol["ratio"] is None else exact(protocol["ratio"])
    words = [SCRIPT, protocol["task"], protocol["model"], protocol["method"], size]
    if protocol["ratio"] is None:
        words.append(f"budget={protocol['budget']}")
    for name, value in {**protocol["changed_options"], **protocol["settings"]}.items():
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
