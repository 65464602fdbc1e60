"""Break the code on purpose, one line at a time, and see whether the tests notice.

    python -m tests.mutate                               those of tests/named_faults/, each under its tests
    python -m tests.lines_run                            once, before a sample: which test runs which line
    python -m tests.mutate --sample 300 --seed 0         faults of tests/faults.py over both packages, drawn by module
    python -m tests.mutate --sample 300 --seed 0 --again the same, but only what survived

Faults go into copies of the files, never into the files themselves. A sampled fault is met by the tests that run its
line, the nearest and quickest first, up to a minute of them; a line that runs at import by those that run its class or
module. A fault that hangs counts as noticed. Results are written as they come: a run that was cut goes on where it
stopped. Faults that change nothing anyone could notice stand with their reason in tests/mutations_equivalent.json.
"""

import argparse
import collections
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests import faults
from tests.faults import Fault
from tests.forked import ROOT, Job, Workers
from tests.lines_run import Map
from tests.mutations import MUTATIONS, Mutation

LEFT = ("survived", "unrun", "unsure")  # results of faults that no test noticed; unsure: it fails without any fault
OPTIONS = ("-x", "-p", "no:cacheprovider", "--hypothesis-profile=mutate", "--tb=line", "-rfE", "--color=no")
EQUIVALENT: dict[str, str] = json.loads(
    Path(__file__).with_name("mutations_equivalent.json").read_text()
)  # name -> why
NEAREST, MOST_TESTS = 3, 300  # files that come first; tests of one stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="one line per fault; runs/mutations.jsonl, runs/faults-SEED.jsonl")
    parser.add_argument("--only", nargs="+", choices=MUTATIONS, metavar="NAME", help="these named faults alone, again")
    parser.add_argument("--list", action="store_true", help="name the faults and check that each finds its line")
    parser.add_argument("--sample", type=int, metavar="N", help="so many faults, drawn from all that there are")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--under", default="", metavar="PATH", help="sample only files whose path begins like this")
    parser.add_argument("--again", action="store_true", help="run what survived once more, under the tests of today")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for one fault, at most")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.sample:
        out = args.out or ROOT / f"runs/faults-{args.seed}.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        sampled(args, out)
    else:
        out = args.out or ROOT / "runs/mutations.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        named(args, out)


def read(path: Path) -> dict[str, dict]:
    """Results by name; the last of a name counts."""
    return {row["name"]: row for row in map(json.loads, path.read_text().splitlines())} if path.exists() else {}


def write(path: Path, row: dict) -> None:
    print(f"{row['result']:9} {row['seconds']:6.1f} s  {row['name']}", flush=True)
    with path.open("a") as file:
        print(json.dumps(row), file=file)


def result_of(job: Job) -> dict:
    """What a run under a fault says: `survived` where the tests passed, `killed` and by which, or `hang`."""
    failed = failures(job.output)
    result = "hang" if job.stopped else "survived" if job.status in (0, 5) else "killed"
    return {"result": result, "by": failed[0] if failed else "", "seconds": round(job.seconds, 1)}


def failures(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)


# -- the faults of tests/named_faults/


def named(args: argparse.Namespace, out: Path) -> None:
    lost = [name for name, mutation in MUTATIONS.items() if not applies(mutation, ROOT)]
    if args.list:
        for name, mutation in MUTATIONS.items():
            print(f"{name:28} {mutation.path:40} {mutation.breaks}{'  NOT FOUND' if name in lost else ''}")
    if lost:
        sys.exit(f"the line to break does not stand in its file exactly once: {', '.join(lost)}")
    if args.list:
        return
    results = read(out)
    wanted = args.only or [name for name in MUTATIONS if name not in results]
    with Workers(args.jobs) as workers:
        workers.preload(lmms_eval=any("lmms_eval_plugins" in test for n in wanted for test in MUTATIONS[n].tests))
        if wanted and not results:
            tests = sorted({test for name in wanted for test in MUTATIONS[name].tests})
            (job,) = workers.run([Job("", lambda copy: pytest.main([*OPTIONS, *tests]), limit=1800)])
            if job.status:
                sys.exit(f"the tests fail without any fault:\n{job.output[-3000:]}")
        for job in workers.run(job_of(MUTATIONS[name], name, workers.copies[0]) for name in wanted):
            mutation = MUTATIONS[job.name]
            said = {"line": 0, "kind": mutation.breaks, "before": mutation.old, "after": mutation.new}
            results[job.name] = {"name": job.name, "file": mutation.room, **said, **result_of(job)}
            write(out, results[job.name])
    results = {name: row for name, row in results.items() if name in MUTATIONS}
    print(report(results))
    if any(row["result"] == "survived" for row in results.values()):
        sys.exit(1)


def applies(mutation: Mutation, root: Path) -> bool:
    path = root / mutation.path
    return path.exists() and path.read_text().count(mutation.old) == 1


def job_of(mutation: Mutation, name: str, copy: Path) -> Job:
    broken = (copy / mutation.path).read_text().replace(mutation.old, mutation.new).encode()
    return Job(name, lambda copy: pytest.main([*OPTIONS, *mutation.tests]), 900, {mutation.path: broken})


# -- sampled faults


class Chosen:
    """pytest's: only these tests, in this order."""

    def __init__(self, tests: list[str]):
        self.rank = {test: rank for rank, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.rank), key=lambda item: self.rank[item.nodeid])


def sampled(args: argparse.Namespace, out: Path) -> None:
    with Workers(args.jobs) as workers:
        root = workers.copies[0]  # of which no line changes while we run
        lines = Map.read(root)
        if not lines.tests:
            sys.exit("which test runs which line is not known yet: python -m tests.lines_run")
        files = [file for file in faults.modules(root) if file.startswith(args.under)]
        drawn = faults.sample(root, args.sample, args.seed, files, partial(needs_a_gpu, lines))
        results = read(out)
        survived = {name for name, row in results.items() if row["result"] in LEFT}
        wanted = [f for f in drawn if f.name not in results or (args.again and f.name in survived - set(EQUIVALENT))]
        workers.preload(lmms_eval=any(fault.file.startswith("lmms_eval_plugins") for fault in wanted))
        by_name = {fault.name: fault for fault in wanted}
        for job in workers.run(jobs_of(wanted, lines, root, args.seconds, out)):
            write(out, row_of(by_name[job.name], result_of(job)))
        results = {name: row for name, row in read(out).items() if name in {fault.name for fault in drawn}}
        by = sorted({row["by"] for row in results.values() if row["by"] in lines.tests})
        (job,) = workers.run([Job("", partial(run_stages, [by], ("--maxfail=0",)), limit=3600)])
    failing = set(failures(job.output))  # also without any fault
    for row in [row for row in results.values() if row["by"] in failing]:
        row["result"] = "unsure"
        write(out, row)
    print(report(results))


def row_of(fault: Fault, result: dict) -> dict:
    of_fault = {"file": fault.file, "line": fault.line, "kind": fault.kind}
    return {"name": fault.name, **of_fault, "before": fault.before, "after": fault.after, **result}


def jobs_of(wanted: list[Fault], lines: Map, root: Path, seconds: float, out: Path) -> Iterator[Job]:
    for fault in wanted:
        stages = stages_for(fault, lines, root, seconds)
        if not stages:
            write(out, row_of(fault, {"result": "unrun", "by": "", "seconds": 0.0}))
            continue
        changes = {fault.file: fault.applied((root / fault.file).read_bytes())}
        limit = 180 + 8 * sum(lines.tests[test] for stage in stages for test in stage)
        yield Job(fault.name, partial(run_stages, stages, ()), limit, changes)


def run_stages(stages: list[list[str]], options: tuple[str, ...], copy: Path) -> int:
    """In a forked process: pytest's exit status, 0 where no stage has a failure."""
    for tests in stages:
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        status = pytest.main([*OPTIONS, *options, *files], plugins=[Chosen(tests)])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return status
    return 0


def needs_a_gpu(lines: Map, fault: Fault) -> bool:
    """A line of a Triton kernel that the interpreter never reached."""
    return fault.file.endswith("_triton.py") and not lines.running(fault.file, *fault.spans[0])


def stages_for(fault: Fault, lines: Map, root: Path, seconds: float) -> list[list[str]]:
    """Tests that may notice: those of the nearest files, for at most a third of the seconds, then the others."""
    found: set[str] = set()
    for span in fault.spans:
        found = lines.running(fault.file, *span)
        if found:
            break
    if not found:  # it runs at import: what imports it may notice, and tests that bear its name
        name = module_name(fault.file)
        for file in faults.modules(root):
            if re.search(rf"^\s*(from|import) .*\b{name}\b", (root / file).read_text(), re.MULTILINE):
                found |= lines.running(file, 1, 10_000)
        found |= {test for test in lines.tests if re.search(rf"[^a-z]{name}[^a-z]", test.replace("-", "_"))}
    if len(fault.spans) < 3:  # a class's or a module's, which the first test that imports it runs, if any
        about = {file for file in lines.test_files if nearness(root, file, fault.file)}
        found |= {test for test in lines.tests if test.partition("::")[0] in about}
    test_files = {test.partition("::")[0] for test in found}
    near = sorted(test_files, key=lambda file: (-nearness(root, file, fault.file), lines.sizes[file]))[:NEAREST]
    first = quickest({test for test in found if test.partition("::")[0] in near}, lines, seconds / 3)
    others = quickest(found - set(first), lines, seconds * 2 / 3)
    return [tests for tests in (first, others) if tests]


def nearness(root: Path, test_file: str, file: str) -> int:
    """2 where a file of tests imports the module itself, 1 where it is about it, else 0."""
    imports = rf"^(from|import) .*\b{module_name(file)}\b"
    return 2 if re.search(imports, (root / test_file).read_text(), re.MULTILINE) else int(is_about(test_file, file))


def is_about(test_file: str, file: str) -> bool:
    """Whether a file of tests has the module's place or name."""
    return Path(test_file).parent == Path("tests", file).parent or module_name(file) in Path(test_file).stem


def module_name(file: str) -> str:
    path = Path(file)
    return path.parent.name if path.stem == "__init__" else path.stem


def quickest(tests: set[str], lines: Map, seconds: float) -> list[str]:
    """As many as there is time for, the quickest case of every test function before the second of any; file by file, as
    tests of a file share what takes long to set up."""
    cases: collections.Counter = collections.Counter()
    order = []
    for test in sorted(tests, key=lambda test: (lines.tests[test], test)):
        function = test.partition("[")[0]
        order.append((cases[function], lines.tests[test], test))
        cases[function] += 1
    by_file: dict[str, list[str]] = {}
    for _, cost, test in sorted(order)[:MOST_TESTS]:
        seconds -= cost
        if seconds < 0 and by_file:
            break
        by_file.setdefault(test.partition("::")[0], []).append(test)
    return [test for tests in by_file.values() for test in tests]


def report(results: dict[str, dict]) -> str:
    """How many faults were noticed, per module and in all, and which were not."""
    modules: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for name, row in results.items():
        survived = row["result"] in LEFT
        modules[row["file"]]["equivalent" if survived and name in EQUIVALENT else row["result"]] += 1
    modules["all"] = total = sum(modules.values(), collections.Counter())
    rows = []
    for module, n in modules.items():
        noticed = n["killed"] + n["hang"]
        rows.append(f"{module:48} {noticed:3} of {n.total() - n['equivalent']:3} noticed, {n['equivalent']} equivalent")
    noticed = total["killed"] + total["hang"]
    rates = noticed / max(total.total(), 1), noticed / max(total.total() - total["equivalent"], 1)
    rows.append(f"{rates[0]:.1%} of all, {rates[1]:.1%} without those that are equivalent ({total['hang']} by hanging)")
    for name, row in sorted(results.items()):
        if row["result"] in LEFT and name not in EQUIVALENT:
            rows.append(
                f"\n{row['result']}: {row['file']}:{row['line']} ({row['kind']})\n- {row['before']}\n+ {row['after']}"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
