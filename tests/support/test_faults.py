"""The faults that `tests.mutate` makes: each is valid Python, changes one thing, and spares what no answer depends
on."""

import ast
import textwrap
from pathlib import Path

import pytest

from tests.faults import faults_of, is_new, sample
from tests.forked import ROOT
from tests.mutate import EQUIVALENT, applies
from tests.mutations import FAULTS, MUTATIONS

CODE = '''
    """A docstring: 1 < 2."""

    from abc import abstractmethod


    class Ring:
        size: int = 3

        @property
        def first(self, keys: "Keys" = None) -> "Keys":
            """Not 1."""
            self.count += 1
            if self.count < len(keys) and not self.full:
                return min(keys, self.size)
            print("so many:", 7)
            end = f"{self.size + 1}"
            end = self.cut(keys[: self.size], device="cpu", mode="last")
            if end is None:
                raise ValueError("no 5 of it", 5)
            return end

        @abstractmethod
        def last(self): ...


    if __name__ == "__main__":
        Ring(1)
'''
EXPECTED = {
    ("constant", "size: int = 4"),
    ("constant", "size: int = 2"),
    ("dropped decorator", ""),
    ("constant", "self.count += 2"),
    ("constant", "self.count += 0"),
    ("operator", "self.count -= 1"),
    ("dropped statement", "pass"),
    ("negated condition", "if not (self.count < len(keys) and not self.full):"),
    ("comparison", "if self.count <= len(keys) and not self.full:"),
    ("boolean", "if self.count < len(keys) or not self.full:"),
    ("dropped sign", "if self.count < len(keys) and (self.full):"),
    ("opposite", "return max(keys, self.size)"),
    ("slice", 'end = self.cut(keys[: (self.size) + 1], device="cpu", mode="last")'),
    ("dropped keyword", 'end = self.cut(keys[: self.size], device="cpu")'),
    ("constant", "end = self.cut(keys[: self.size], device=\"cpu\", mode='last_x')"),
    ("negated condition", "if not (end is None):"),
    ("comparison", "if end is not None:"),
}


@pytest.fixture
def module(tmp_path) -> Path:
    (tmp_path / "ring.py").write_text(textwrap.dedent(CODE))
    return tmp_path


def test_faults_are_those_of_the_docstring_and_nothing_that_is_only_said(module):
    found = faults_of(module, "ring.py")
    assert {(fault.kind, fault.after) for fault in found} == EXPECTED
    dropped = [fault.before for fault in found if fault.kind == "dropped statement"]
    assert dropped == [
        "self.count += 1",
        "return min(keys, self.size)",
        'end = self.cut(keys[: self.size], device="cpu", mode="last")',
        'raise ValueError("no 5 of it", 5)',
    ]


def test_every_fault_is_another_program_on_its_own_line(module):
    code = (module / "ring.py").read_bytes()
    for fault in faults_of(module, "ring.py"):
        broken = fault.applied(code)
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(code))
        assert code.decode().splitlines()[fault.line - 1].strip() == fault.before


def test_a_fault_keeps_its_name_where_lines_move(module):
    before = {fault.name for fault in faults_of(module, "ring.py")}
    (module / "ring.py").write_text("import os\n\n" + (module / "ring.py").read_text())
    assert {fault.name for fault in faults_of(module, "ring.py")} == before
    assert len(before) == len(faults_of(module, "ring.py"))


def test_a_sample_has_some_of_every_module_and_is_the_same_again():
    files = [f"kvcompress/clusters/{name}.py" for name in ("h2o", "snapkv", "tova", "full")]
    drawn = sample(ROOT, 20, 0, files, lambda fault: False)
    assert len(drawn) == 20
    assert {fault.file for fault in drawn} == set(files)
    assert all(is_new(ROOT, fault) for fault in drawn)
    assert drawn == sample(ROOT, 20, 0, files, lambda fault: False)
    assert drawn != sample(ROOT, 20, 1, files, lambda fault: False)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_named_fault_finds_its_line(name):
    assert applies(MUTATIONS[name], ROOT)
    assert all((ROOT / test.partition("::")[0]).exists() for test in MUTATIONS[name].tests)


def test_named_faults_differ_in_name_and_each_is_told_and_met_by_tests():
    assert len(FAULTS) == len(MUTATIONS) > 170
    assert all(fault.breaks and fault.tests and fault.old != fault.new for fault in MUTATIONS.values())


@pytest.mark.parametrize("file", sorted({name.partition(" ")[0] for name in EQUIVALENT}))
def test_a_fault_that_nobody_could_notice_still_stands_there(file):
    names = {name for name in EQUIVALENT if name.startswith(f"{file} ")}
    assert names <= {fault.name for fault in faults_of(ROOT, file)}
