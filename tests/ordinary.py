"""The ordinary run, pytest without a path, -k or -m, is a sample of the tests that takes under four minutes:

- of a parametrised test with more than `MOST` cases, the first and one in `EACH`;
- none of the long tests and files, which `tests/ordinary_without.txt` names.

`--every-case` runs all of them. To find the long ones anew:

    ./scripts/run_tests.sh --every-case --junitxml=report.xml && python -m tests.ordinary report.xml
"""

import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest

MOST, EACH = 3, 4
LONG, LONG_FILE = 0.7, 1.5  # seconds per case of a test, and of a file, whose tests may share what takes long
LIST = Path(__file__).with_name("ordinary_without.txt")


def is_part(config: pytest.Config) -> bool:
    """Whether only some tests were asked for, all of which then run."""
    is_chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return is_chosen or bool(config.option.keyword) or config.option.markexpr != "not slow and not gpu"


def sample(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of the ordinary run, and the others."""
    long = set(LIST.read_text(encoding="utf-8").split())
    cases = Counter(map(function_of, items))
    run, left = [], []
    begun = set()
    for item in items:
        name = function_of(item)
        is_drawn = cases[name] <= MOST or name not in begun or zlib.crc32(item.nodeid.encode()) % EACH == 0
        begun.add(name)
        is_long = name in long or file_of(name) in long
        (run if is_drawn and not is_long else left).append(item)
    return run, left


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def file_of(name: str) -> str:
    return name.partition("::")[0]


def main(report: str) -> None:
    """Write down the long tests of a run, given its JUnit report."""
    seconds = defaultdict(list)  # of each case, for tests and for files
    for case in ElementTree.parse(report).iter("testcase"):
        path = f"{case.attrib['classname'].replace('.', '/')}.py"
        for name in (path, f"{path}::{case.attrib['name'].partition('[')[0]}"):
            seconds[name].append(float(case.attrib["time"]))
    long = {name for name, each in seconds.items() if fmean(each) > (LONG if "::" in name else LONG_FILE)}
    long = sorted(name for name in long if name == file_of(name) or file_of(name) not in long)
    LIST.write_text("".join(f"{name}\n" for name in long), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
