"""Runs cells, a process each, within the time limits of cell and stage; each result is written before the next cell."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .stages import Cell, environment_of

LEAST = 20.0  # seconds that must be left to start a cell
GRACE = 5.0  # seconds for a process to end after a signal
TAIL = 25  # lines of output kept with a result


@dataclass
class Stage:
    """The results file of a stage: {"stage", "cells": name -> record}.

    A record has `command`; `state`: "done", "failed", "cut" or "left out"; `seconds`; `tail`, the end of its output;
    and `result`, the JSON that the cell wrote, also if it was cut. Cells of tests write none; theirs is counted from
    their output."""

    number: int
    smoke: bool
    out: Path
    parts: Path

    def __post_init__(self) -> None:
        self.name = f"stage{self.number}" + ("_smoke" if self.smoke else "")
        self.file, self.log = self.out / f"{self.name}.json", self.out / f"{self.name}.log"
        self.out.mkdir(parents=True, exist_ok=True)
        self.parts.mkdir(parents=True, exist_ok=True)
        known = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
        self.records: dict[str, dict[str, Any]] = known.get("cells", {})

    def run(self, cells: list[Cell], seconds: float, force: bool) -> None:
        """Run the cells that are not done yet, or all with `force`, until `seconds` have passed."""
        end = time.monotonic() + seconds
        for cell in cells:
            command, before = shlex.join(cell.arguments), self.records.get(cell.name, {})
            if not force and before.get("state") == "done" and before["command"] == command:
                continue
            left = end - time.monotonic()
            if left < LEAST:
                self.add(cell, {"command": command, "state": "left out"}, keep=True)
                continue
            print(f"== {self.name} {cell.name}: at most {min(left, cell.seconds):.0f} s", file=sys.stderr, flush=True)
            if force or before.get("command") != command:  # what another command wrote is not this one's result
                self.part(cell).unlink(missing_ok=True)
            self.add(cell, {"command": command, **self.measure(cell, min(left, cell.seconds))})

    def part(self, cell: Cell) -> Path:
        """Return the file that a cell writes."""
        return self.parts / f"{self.name}_{cell.name}.json"

    def add(self, cell: Cell, record: dict[str, Any], keep: bool = False) -> None:
        """Record a cell's result. With `keep`, a result of an earlier run stays."""
        if not (keep and "result" in self.records.get(cell.name, {})):
            self.records[cell.name] = record
        draft = self.file.with_suffix(".tmp")
        draft.write_text(json.dumps({"stage": self.number, "cells": self.records}, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.file)

    def measure(self, cell: Cell, seconds: float) -> dict[str, Any]:
        part, output = self.part(cell), self.parts / f"{self.name}_{cell.name}.log"
        arguments = [argument.replace("{out}", str(part.with_suffix(""))) for argument in cell.arguments]
        start, state = time.monotonic(), "done"
        with output.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment_of(self.smoke, cell.kind)},
                start_new_session=True,  # so that its children end with it
            )
            try:
                state = "failed" if process.wait(seconds) else "done"
            except subprocess.TimeoutExpired:
                state = "cut"
            finally:
                end_group(process)
        text = output.read_text(encoding="utf-8", errors="replace")
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"== {cell.name}: {state}\n{text}\n")
        record = {"state": state, "seconds": round(time.monotonic() - start, 1), "tail": text.splitlines()[-TAIL:]}
        if cell.kind == "tests":
            return {**record, "result": counted(text)}
        return {**record, "result": json.loads(part.read_text(encoding="utf-8"))} if part.exists() else record


def end_group(process: subprocess.Popen) -> None:
    """End a process and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def counted(output: str) -> dict[str, Any]:
    """Count passed and skipped tests in the output of `pytest -v`, and list the names of failed ones."""
    counts: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": []}
    for line in output.splitlines():
        line_words = line.split()
        name = next((word for word in line_words if "::" in word), None)
        if name is None or line.startswith(("FAILED ", "ERROR ")):  # pytest's own summary, a second time
            continue
        if "PASSED" in line_words:
            counts["passed"] += 1
        elif "SKIPPED" in line_words:
            counts["skipped"] += 1
        elif "FAILED" in line_words or "ERROR" in line_words:
            counts["failed"].append(name)
    return counts
