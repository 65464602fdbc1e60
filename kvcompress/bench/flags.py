"""Flags that several benchmarks share. Imports nothing heavy."""

import argparse
from pathlib import Path
from typing import Any

from ..flag_types import device_name, label, new_file, positive, threads, whole
from .shapes import SHAPES

SPEC = "NAME[:OPTION=VALUE...]"  # a method
SUFFIXES = (".json", ".md", ".png")  # of output files


def results_file(text: str) -> Path:
    """Parse the path of output files, with one of `SUFFIXES` or none; without one it is the JSON's."""
    found = new_file(text)
    return found if found.suffix in SUFFIXES else found.with_name(f"{found.name}.json")


FLAGS: dict[str, dict[str, Any]] = {
    "model": {"nargs": "?", "type": label, "help": "hub id or local path"},
    "--shape": {"type": label, "help": f"instead of a model, random weights in the shape of one: {', '.join(SHAPES)}"},
    "--methods": {"nargs": "+", "type": label, "metavar": SPEC, "help": "methods, with their options"},
    "--new": {"type": whole(1), "help": "decode steps per answer"},
    "--lengths": {"nargs": "+", "type": whole(1), "help": "prompt tokens"},
    "--repeats": {"type": whole(1), "help": "rounds in which all take turns"},
    "--device": {"type": device_name, "help": "default: cuda if available"},
    "--dtype": {"choices": ["float32", "bfloat16", "float16"], "help": "default: bfloat16 on CUDA"},
    "--threads": {"type": threads, "help": "CPU threads (default: torch's own)"},
    "--clock": {"choices": ["wall", "cpu"], "default": "wall", "help": "cpu: the process's CPU time (wall)"},
    "--minutes": {
        "type": positive,
        "default": float("inf"),
        "help": "start no further measurement after this time",
    },
    "--questions": {"type": whole(1), "default": 100, "help": "per task (100)"},
    "--out": {"type": results_file, "help": "output files, without a suffix"},
    "--resume": {"action": "store_true", "help": "keep the results that are already in the .json"},
}


def add_flags(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add some of `FLAGS` to a parser; `new=4` in `defaults` adds `--new` with that default, which its help names."""
    for name in names:
        parser.add_argument(name, **FLAGS[name])
    for name, default in defaults.items():
        declared = FLAGS[f"--{name}"]
        told = " ".join(map(str, default)) if isinstance(default, list) else default
        is_only_default = declared["help"].startswith("default: ")
        meaning = f"default: {told}" if is_only_default else f"{declared['help']} ({told})"
        parser.add_argument(f"--{name}", **{**declared, "help": meaning, "default": default})
