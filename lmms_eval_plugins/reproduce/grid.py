"""Plan and run the cells of a paper's grid, and write the results beside the paper's."""

import argparse
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvcompress.command_line import called
from kvcompress.files import check_output

from ..cells.errors import UsageError
from ..cells.identity import fingerprint
from ..cells.results import incomplete_reason
from .config import load_config, load_reference
from .plan import PlannedCell, Run, parse_only, plan
from .run import cannot_run, run_all
from .table import SUFFIXES, UNKNOWN, row, write_reference, write_report


def reproduce(flags: argparse.Namespace, extra: list[str]) -> int:
    """Plan the cells, run those that can run, write the table, and return the exit code. `extra` goes to each run."""
    config, path = load_config(flags.name, flags.model_root)
    reference = load_reference(config, path)
    extra += [f"--output_path={flags.output_path}"] + (["--limit", str(flags.limit)] if flags.limit else [])
    cells, runs = plan(config, parse_only(",".join(flags.only), config), extra)
    if not cells:
        raise UsageError(f"--only {','.join(flags.only)}: no cell matches all of these")
    run_of = {cell.key: run for run in runs for cell in run.cells}
    reasons = {cell.key: cannot_run(cell, run_of.get(cell.key)) for cell in cells}
    if flags.dry_run:
        print("\n".join(listing(cells, run_of, reasons)))
        return 0

    name = "-".join(["reproduce", path.stem, *([f"limit={flags.limit}"] if flags.limit else [])])
    check_output(flags.output_path, *(name + suffix for suffix in SUFFIXES))
    if flags.write_reference:
        check_output(flags.write_reference.parent, flags.write_reference.name)
    possible = [run for run in runs if reasons[run.cells[0].key] is None]
    failed: dict[tuple[str, ...], str] = {}
    interruption = None
    if not flags.report_only:
        try:
            run_all(possible, failed)
        except KeyboardInterrupt as error:
            interruption = error
    rows = [
        row(
            cell, reference, reasons[cell.key] or "not run", failed.get(cell.key), asked_now(cell, run_of.get(cell.key))
        )
        for cell in cells
    ]
    for file in write_report(config, rows, flags.output_path / name):
        print(f"written: {file}")
    if flags.write_reference:
        write_reference(rows, flags.write_reference)
        print(f"written: {flags.write_reference}")
    print(f"{sum(row.ours is not None for row in rows)} of {len(rows)} cells have a result")
    if interruption is not None:
        raise interruption
    return int(not flags.report_only and (bool(failed) or len(possible) < len(runs)))


def listing(
    cells: list[PlannedCell], run_of: dict[tuple[str, ...], Run], reasons: dict[tuple[str, ...], str | None]
) -> Iterator[str]:
    """Yield the lines of `--dry-run`: the cells, the commands, and how many cells are in which state."""
    states = {cell.key: state(cell, run_of.get(cell.key), reasons[cell.key]) for cell in cells}
    for key, what in states.items():
        yield f"{', '.join(key)}: {what}"
    for run in {id(run): run for run in run_of.values()}.values():
        reason = reasons[run.cells[0].key]
        yield f"{called('eval')} {shlex.join(run.argv)}" + (f"  # not here: {reason}" if reason else "")
    counts = Counter(states.values()).most_common()
    yield f"{len(cells)} cells; " + "; ".join(f"{what}: {count}" for what, count in counts)


def state(cell: PlannedCell, run: Run | None, reason: str | None) -> str:
    """Say what a run would do with a cell: run it, or nothing, because of `reason` or because its results are on disk.
    The task's data is not loaded, so only a run notices whether it has changed."""
    if run is None or not cell.folder.exists():
        return reason or "to run"
    again = incomplete_reason(cell.folder, asked_now(cell, run), UNKNOWN)
    if again is None and run.plan.request.flags.force:
        again = "--force"
    return "on disk" if again is None else reason or f"to run again ({again})"


def asked_now(cell: PlannedCell, run: Run | None) -> dict[str, Any] | None:
    """Return the fingerprint that a cell's results would have now, but for UNKNOWN; None if there are none."""
    if run is None or not cell.folder.exists():
        return None
    server = run.plan.server
    return fingerprint(
        *(cell.asked[0], run.plan.arguments, cell.asked[1]), data={}, tasks={}, server=server and server.about
    )
