"""`python -m benchmarks.gpu --stage 1|2|3`, run by scripts/bench_gpu.sh; see docs/bench.md."""

import argparse
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from .runner import Stage
from .stages import cells

STAGES = (1, 2, 3)
WORKERS = 14  # test processes that share the device


def parser() -> argparse.ArgumentParser:
    this = argparse.ArgumentParser(prog="scripts/bench_gpu.sh", description="Measure on a CUDA device, stage by stage.")
    this.add_argument("--stage", type=int, choices=STAGES, required=True, help="1: correctness; 2: speed; 3: gains")
    this.add_argument("--smoke", action="store_true", help="run the same code on a CPU, with tiny shapes")
    this.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="folder for the results")
    this.add_argument("--parts", type=Path, default=Path("runs/gpu"), help="folder for the cells' own output")
    this.add_argument("--minutes", type=float, help="time limit for all cells (default: 7.5, with --smoke 30)")
    this.add_argument("--only", nargs="+", metavar="CELL", help="run only these cells")
    this.add_argument("--force", action="store_true", help="also run finished cells again")
    this.add_argument("--summary", action="store_true", help="run nothing, print the known results")
    return this


def missing(stage: int, smoke: bool) -> list[str]:
    """Return the packages that a stage needs and that are not installed."""
    needed = ["torch", "transformers", "pydantic", *(["pytest", "hypothesis", "PIL"] if stage == 1 else [])]
    on_device = (
        [] if smoke else ["triton", *(["xdist"] if stage == 1 else [])]
    )  # in one process, the tests take too long
    packages = {"PIL": "Pillow", "xdist": "pytest-xdist"}
    return [packages.get(name, name) for name in [*needed, *on_device] if find_spec(name) is None]


def main() -> int:
    given = parser().parse_args()
    if lacking := missing(given.stage, given.smoke):
        print(f"error: not installed: {', '.join(lacking)} (pip install {' '.join(lacking)})", file=sys.stderr)
        return 2
    workers = 0 if given.smoke else min(WORKERS, os.cpu_count() or 1)
    chosen = cells(given.stage, given.smoke, workers)
    if unknown := set(given.only or ()) - {cell.name for cell in chosen}:
        print(f"error: no cell {', '.join(sorted(unknown))}: {', '.join(c.name for c in chosen)}", file=sys.stderr)
        return 2
    minutes = given.minutes or (30 if given.smoke else 7.5)
    stage = Stage(given.stage, given.smoke, given.out, given.parts)
    if not given.summary:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            stage.run([c for c in chosen if not given.only or c.name in given.only], 60 * minutes, given.force)
        except KeyboardInterrupt:
            return 130
    from .summary import summarised  # imported late, since it needs torch

    text = summarised(given.stage, chosen, stage.records)
    stage.file.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return int(any(stage.records.get(cell.name, {}).get("state") != "done" for cell in chosen))


if __name__ == "__main__":
    sys.exit(main())
