"""Which lines of the packages each test runs, and how long it takes: from this `tests.mutate` chooses tests.

    python -m tests.lines_run [--jobs 2] [TEST FILE ...]

A file of tests is run again only where it has changed. What stands in `runs/lines/` names the lines as they stood when
the tests ran: where the code has changed since, unchanged lines are found again.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.forked import ROOT, Job, Workers

FOLDER = ROOT / "runs/lines"
PACKAGES = ("kvcompress", "lmms_eval_plugins", "tiny_vlm")
CHILDREN = "LINES_RUN_BY_CHILDREN"  # names the folder where processes that a test starts leave what they ran


class Tracer:
    """Notes the lines of the packages that run between `start` and `stop`."""

    def __init__(self, root: Path):
        self.prefixes = tuple(f"{root / package}/" for package in PACKAGES)
        self.length = len(f"{root}/")
        self.known: dict[str, bool] = {}
        self.lines: set[tuple[str, int]] = set()

    def start(self) -> None:
        threading.settrace(self._called)
        sys.settrace(self._called)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def _called(self, frame, event, arg):
        file = frame.f_code.co_filename
        ours = self.known.get(file)
        if ours is None:
            ours = self.known[file] = file.startswith(self.prefixes)
        return self._ran if ours else None

    def _ran(self, frame, event, arg):
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._ran

    def by_file(self, lines: set[tuple[str, int]]) -> dict[str, list[int]]:
        found = defaultdict(list)
        for file, line in sorted(lines):
            found[file[self.length :]].append(line)
        return dict(found)


def trace_child() -> None:
    """In a process that a test starts: sitecustomize.py of the copy calls it."""
    folder = os.environ.get(CHILDREN)
    if folder:
        tracer = Tracer(Path(__file__).parents[1])
        tracer.start()
        out = Path(folder) / f"{os.getpid()}.json"
        atexit.register(lambda: (tracer.stop(), out.write_text(json.dumps(tracer.by_file(tracer.lines)))))


class Plugin:
    """pytest's: a line of `out` for each test that passed."""

    def __init__(self, root: Path, children: Path, out: Path):
        self.root, self.children, self.out = root, children, out
        self.tracer = Tracer(root)
        self.of_fixture: dict[int, set] = {}
        self.failed = False

    def hooks(self):
        import pytest

        outer = self

        class Hooks:
            @pytest.hookimpl(wrapper=True)
            def pytest_runtest_protocol(self, item):
                outer.failed = False
                outer.tracer.lines = set()
                start = time.process_time() + sum(os.times()[2:4])
                outer.tracer.start()
                try:
                    return (yield)
                finally:
                    outer.tracer.stop()
                    outer.write(item, time.process_time() + sum(os.times()[2:4]) - start)

            @pytest.hookimpl(wrapper=True)
            def pytest_fixture_setup(self, fixturedef, request):
                """What a shared fixture runs belongs to every test that uses it."""
                if fixturedef.scope == "function":
                    return (yield)
                before, outer.tracer.lines = outer.tracer.lines, set()
                try:
                    return (yield)
                finally:
                    outer.of_fixture.setdefault(id(fixturedef), set()).update(outer.tracer.lines)
                    outer.tracer.lines |= before

            @pytest.hookimpl
            def pytest_runtest_logreport(self, report):
                outer.failed |= not report.passed

        return Hooks()

    def write(self, item, seconds: float) -> None:
        lines = set(self.tracer.lines)
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for definition in definitions:
                lines |= self.of_fixture.get(id(definition), set())
        found = self.tracer.by_file(lines)
        for path in self.children.glob("*.json"):
            for file, more in json.loads(path.read_text()).items():
                found[file] = sorted({*found.get(file, []), *more})
            path.unlink()
        if not self.failed:
            with self.out.open("a") as file:
                print(json.dumps({"test": item.nodeid, "seconds": round(seconds, 2), "lines": found}), file=file)


@dataclass
class Map:
    """tests: test -> CPU seconds; sizes: file of tests -> how many lines its tests run;
    runs: (file, line) -> tests, with lines as the files stand now."""

    tests: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    runs: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def read(cls, root: Path, folder: Path = FOLDER) -> Map:
        found = cls()
        for path in sorted(folder.glob("*.jsonl")):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            moved = {file: _moved(folder, root, file, digest) for file, digest in rows[0]["code"].items()}
            of_all = set()
            for row in rows[1:]:
                if row["test"] == "all":
                    continue
                of_all.update((file, line) for file, lines in row["lines"].items() for line in lines)
                found.tests[row["test"]] = row["seconds"]
                for file in row["lines"].keys() & moved.keys():  # not templates
                    for line in row["lines"][file]:
                        if now := moved[file].get(line):
                            found.runs[file, now].add(row["test"])
            found.sizes[rows[0]["file"]] = len(of_all)
        return found

    @property
    def test_files(self) -> set[str]:
        return {test.partition("::")[0] for test in self.tests}

    def running(self, file: str, first: int, last: int) -> set[str]:
        return set().union(*(self.runs.get((file, line), ()) for line in range(first, last + 1)))


class _Same(dict):
    def get(self, line: int, default: object = None) -> int:
        return line


_MOVED: dict[tuple[str, str], dict[int, int]] = {}


def _moved(folder: Path, root: Path, file: str, digest: str) -> dict[int, int]:
    """line then -> line now."""
    if (file, digest) not in _MOVED:
        now = (root / file).read_text() if (root / file).exists() else ""
        moved: dict[int, int] = _Same()
        if _digest(now) != digest:
            then = (folder / "code" / digest).read_text().splitlines()
            blocks = difflib.SequenceMatcher(None, then, now.splitlines(), autojunk=False).get_matching_blocks()
            moved = {a + n + 1: b + n + 1 for a, b, size in blocks for n in range(size)}
        _MOVED[file, digest] = moved
    return _MOVED[file, digest]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def _out(file: str) -> Path:
    return FOLDER / (file.removeprefix("tests/").removesuffix(".py").replace("/", "-") + ".jsonl")


def is_known(file: str) -> bool:
    """Whether the lines of this file of tests, as it stands, are written down."""
    out = _out(file)
    if not out.exists():
        return False
    rows = out.read_text().splitlines()
    return json.loads(rows[0])["tests"] == _digest((ROOT / file).read_text()) and '"all"' in rows[-1]


def run(file: str, copy: Path) -> int:
    """In a forked process: run a file of tests and write down what each ran. pytest's exit status."""
    import pytest

    out = _out(file)
    out.unlink(missing_ok=True)
    code = {}
    for package in PACKAGES:
        for path in sorted((copy / package).rglob("*.py")):
            text = path.read_text()
            name = str(path.relative_to(copy))
            code[name] = _digest(text)
            (FOLDER / "code" / code[name]).write_text(text)
    head = {"file": file, "tests": _digest((copy / file).read_text()), "code": code}
    out.write_text(json.dumps(head) + "\n")
    with tempfile.TemporaryDirectory() as children:
        os.environ[CHILDREN] = children
        plugin = Plugin(copy, Path(children), out)
        options = ["-p", "no:cacheprovider", "--hypothesis-profile=mutate", "--tb=short", "--color=no"]
        status = pytest.main([*options, file], plugins=[plugin.hooks()])
    with out.open("a") as stream:
        print('{"test": "all"}', file=stream)
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of tests; without: all that have changed")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    (FOLDER / "code").mkdir(parents=True, exist_ok=True)
    wanted = args.files or [file for file in test_files() if not is_known(file)]
    with Workers(args.jobs) as workers:
        for copy in workers.copies:
            (copy / "sitecustomize.py").write_text("from tests.lines_run import trace_child\n\ntrace_child()\n")
        workers.preload(lmms_eval=True)
        for job in workers.run(Job(file, partial(run, file), limit=1800) for file in wanted):
            print(f"{job.seconds:6.1f} s  {job.name}{f'  status {job.status}' if job.status else ''}", flush=True)


if __name__ == "__main__":
    main()
