"""Break the code on purpose, one line at a time, and see whether the tests notice.

    python -m tests.mutate --out runs/mutations.jsonl

Each fault of tests/mutations.py goes into a copy of the files, never into the files themselves, and the tests that it
names run there until one fails. A run that was cut goes on where it stopped: results are written as they come, and what
stands in `--out` is not run again.
"""

import argparse
import collections
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
PACKAGE = "kvcompress"
COPIED = (PACKAGE, "lmms_eval_plugins", "tests", "benchmarks", "docs", "README.md", "pyproject.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/mutations.jsonl"), help="one line per fault")
    parser.add_argument("--only", nargs="+", choices=MUTATIONS, metavar="NAME", help="these faults alone, again")
    parser.add_argument("--list", action="store_true", help="name the faults and check that each finds its line")
    args = parser.parse_args()
    lost = [name for name, mutation in MUTATIONS.items() if not applies(mutation, ROOT)]
    if args.list:
        for name, mutation in MUTATIONS.items():
            print(f"{name:28} {mutation.file:28} {mutation.breaks}{'  NOT FOUND' if name in lost else ''}")
    if lost:
        sys.exit(f"the line to break does not stand in its file exactly once: {', '.join(lost)}")
    if args.list:
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = {} if not args.out.exists() else read(args.out)
    wanted = args.only or [name for name in MUTATIONS if name not in results]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            take = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            take(ROOT / name, copy / name)
        import_others(copy)
        if wanted and not results:
            check_unbroken(copy, sorted({test for name in wanted for test in MUTATIONS[name].tests}))
        for name in wanted:
            start = time.perf_counter()
            results[name] = {"name": name, **outcome(MUTATIONS[name], copy)}
            results[name]["seconds"] = round(time.perf_counter() - start, 1)
            print(f"{results[name]['result']:9} {results[name]['seconds']:6.1f} s  {name}", flush=True)
            with args.out.open("a") as file:
                print(json.dumps(results[name]), file=file)
    print(report(results))
    if any(result["result"] != "killed" for name, result in results.items() if name in MUTATIONS):
        sys.exit(1)


def read(path: Path) -> dict[str, dict]:
    return {result["name"]: result for result in map(json.loads, path.read_text().splitlines())}


def applies(mutation: Mutation, root: Path) -> bool:
    path = root / PACKAGE / mutation.file
    return path.exists() and path.read_text().count(mutation.old) == 1


def check_unbroken(copy: Path, tests: list[str]) -> None:
    """Without any fault the tests pass: else a failure would say nothing."""
    status, output = run_tests(copy, tests)
    if status:
        sys.exit(f"the tests fail without any fault:\n{output[-3000:]}")


def outcome(mutation: Mutation, copy: Path) -> dict[str, str]:
    """`killed` and by which test, `survived`, or `error` where no test could run."""
    path = copy / PACKAGE / mutation.file
    code = path.read_text()
    path.write_text(code.replace(mutation.old, mutation.new))
    try:
        status, output = run_tests(copy, mutation.tests)
    finally:
        path.write_text(code)
    result = {0: "survived", 1: "killed"}.get(status, "error")
    failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith("FAILED ")]
    return {"result": result, "by": failed[0] if failed else ""}


def run_tests(copy: Path, tests: tuple[str, ...] | list[str]) -> tuple[int, str]:
    """pytest's exit status and output, with fixed examples, so that a fault has the same result each time."""
    options = ["-x", "-p", "no:cacheprovider", "--hypothesis-profile=mutate", "--tb=short", "-rf", "--color=no"]
    output = copy / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(copy, output, [*options, *tests]))
    process.start()
    process.join()
    return process.exitcode, output.read_text()


def _in_child(copy: Path, output: Path, arguments: list[str]) -> None:
    os.chdir(copy)
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        status = pytest.main(arguments)
        sys.stdout.flush()
    os._exit(status)


def import_others(copy: Path) -> None:
    """Import once what the package and its tests import, and forget them: a process that is forked then has torch and
    transformers at hand, whose import takes longer than most tests."""
    sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    sys.dont_write_bytecode = True
    for name in list(sys.modules):
        if name.split(".")[0] in COPIED:
            del sys.modules[name]
    for name in ("kvcompress.hooks.session", "tests.support.families", "tests.support.strategies"):
        importlib.import_module(name)
    for name in list(sys.modules):
        if name.split(".")[0] in COPIED:
            del sys.modules[name]


def report(results: dict[str, dict]) -> str:
    """How many faults were noticed, per room and in all, and which were not."""
    rooms: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for name, result in results.items():
        if name in MUTATIONS:
            rooms[MUTATIONS[name].room][result["result"]] += 1
    total = sum(rooms.values(), collections.Counter())
    lines = [f"{room:16} {n['killed']:3} of {n.total():3} killed" for room, n in sorted(rooms.items())]
    lines.append(f"{'all':16} {total['killed']:3} of {total.total():3} killed ({total['killed'] / total.total():.0%})")
    for name, result in results.items():
        if name in MUTATIONS and result["result"] != "killed":
            lines.append(f"{result['result']}: {name} ({MUTATIONS[name].breaks})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
