"""Flags that several benchmarks have, each declared once. Imports nothing heavy."""

import argparse
from typing import Any

from ..flag_types import device_name, label, new_file, positive, threads, whole
from .shapes import SHAPES

SPEC = "NAME[:OPTION=VALUE...]"  # of a method

FLAGS: dict[str, dict[str, Any]] = {
    "model": {"nargs": "?", "type": label, "help": "hub id or local path"},
    "--shape": {"type": label, "help": f"in place of a model, random weights in the shape of one: {', '.join(SHAPES)}"},
    "--methods": {"nargs": "+", "type": label, "metavar": SPEC},
    "--new": {"type": whole(1), "help": "decode steps of every answer"},
    "--lengths": {"nargs": "+", "type": whole(1), "help": "prompt tokens"},
    "--repeats": {"type": whole(1)},
    "--device": {"type": device_name, "help": "default: cuda where there is one"},
    "--dtype": {"choices": ["float32", "bfloat16", "float16"], "help": "default: bfloat16 on CUDA"},
    "--threads": {"type": threads, "help": "of the CPU (default: torch's own)"},
    "--clock": {"choices": ["wall", "cpu"], "default": "wall", "help": "cpu: the process's own time"},
    "--minutes": {
        "type": positive,
        "default": float("inf"),
        "help": "measure nothing further after these",
    },
    "--questions": {"type": whole(1), "default": 100, "help": "per task (100)"},
    "--out": {"type": new_file, "help": "of the files, without a suffix"},
    "--resume": {"action": "store_true", "help": "keep what is in the .json"},
}


def add_flags(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add some of `FLAGS` to a parser; `defaults`: `new=4` adds `--new` with that default."""
    for name in names:
        parser.add_argument(name, **FLAGS[name])
    for name, default in defaults.items():
        declared = FLAGS[f"--{name}"]
        told = {"help": f"default: {default}"} if declared.get("help", "").startswith("default: ") else {}
        parser.add_argument(f"--{name}", **{**declared, **told, "default": default})
