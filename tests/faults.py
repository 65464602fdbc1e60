"""Single-line faults over all of `kvcompress/` and `lmms_eval_plugins/`, found in the syntax tree.

Operators (comparison, arithmetic, bits, boolean), constants (numbers, True and False, names written as strings),
negated conditions, dropped statements, swapped arguments, dropped keywords and decorators, slices off by one, and
functions taken for their opposite (min and max, any and all).

Left out, as no answer depends on it:

- docstrings, type annotations, `TYPE_CHECKING` and `__main__` guards, `__all__`;
- what is said: the text of errors, logging, printing and warnings, help and descriptions of options, f-strings, and
  every string with a space;
- `frozen=True`, and decorators that only declare (`abstractmethod`, `overload`);
- numbers below 1e-4, which guard a division;
- arguments swapped where order does not matter (`min`, `transpose`);
- `device=`, `non_blocking=` and `pin_memory=`, where one device is all there is; `indent=` of JSON;
- what needs a GPU: `torch.cuda`, and lines of Triton kernels that the interpreter does not reach (`tests.mutate` knows
  them by its map).
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("kvcompress", "lmms_eval_plugins", "tiny_vlm")
COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
ARITHMETIC = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|", "|": "&", "<<": ">>", ">>": "<<",
}  # fmt: skip
OPPOSITES = {"min": "max", "any": "all", "argmin": "argmax", "amin": "amax", "floor": "ceil", "tril": "triu"}
OPPOSITES |= {f"{name}_": f"{other}_" for name, other in OPPOSITES.items()}
OPPOSITES |= {other: name for name, other in OPPOSITES.items()}
SAID = {"print", "warn", "warning", "info", "debug", "say_once"}
COMMUTATIVE = {"min", "max", "transpose", "equal", "gcd"}
LEFT = {"frozen", "device", "non_blocking", "pin_memory", "indent"}
TEXT = {"help", "description", "epilog", "metavar", "title", "match", "message"}
DECLARING = {"abstractmethod", "overload", "runtime_checkable"}
EPSILON = 1e-4


@dataclass(frozen=True)
class Fault:
    """One span of a file, replaced.

    Attributes:
        file: below the repository.
        where: the function or class around it, `Class.method`.
        kind: what was done, in a word or two.
        start, end: of the span in the file's bytes.
        new: what takes its place.
        before, after: the first line that differs, without and with the fault ("" where it is gone).
        line: its number.
        spans: first and last line of the statement, where it runs in a function, and of what is around it, widening.
        again: how many equal faults stand before it in `where`.
    """

    file: str
    where: str
    kind: str
    start: int
    end: int
    new: str
    before: str
    after: str
    line: int
    spans: tuple[tuple[int, int], ...]
    again: int = 0

    @property
    def name(self) -> str:
        """Says which fault it is for as long as its line stands, wherever in the function."""
        again = f" #{self.again}" if self.again else ""
        return f"{self.file} {self.where}: {self.before} -> {self.after}{again}"

    def applied(self, code: bytes) -> bytes:
        return code[: self.start] + self.new.encode() + code[self.end :]


def modules(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for package in PACKAGES for path in (root / package).rglob("*.py"))


def faults_of(root: Path, file: str) -> list[Fault]:
    """Every fault of a module, in the order of its lines. A few are no Python, or no change: `is_new` knows them."""
    code = (root / file).read_bytes()
    finder = _Finder(code)
    finder.visit(ast.parse(code))
    found = []
    counts: dict[tuple, int] = {}
    for start, end, new, kind, where, spans in sorted(set(finder.found)):
        first, last = code.rfind(b"\n", 0, start) + 1, code.find(b"\n", end - 1)
        before = code[first:last].decode()
        after = (code[first:start] + new.encode() + code[end : max(last, end)]).decode()
        pairs = list(itertools.zip_longest(before.split("\n"), after.split("\n"), fillvalue=""))
        line = next((line for line, (a, b) in enumerate(pairs) if a.strip() != b.strip()), 0)
        texts = tuple(text.strip() for text in pairs[line])
        counts[(where, *texts)] = again = counts.get((where, *texts), -1) + 1
        number = code.count(b"\n", 0, first) + 1 + line
        found.append(Fault(file, where, kind, start, end, new, *texts, number, spans, again))
    return found


def is_new(root: Path, fault: Fault) -> bool:
    """Whether the broken file is Python, and another program."""
    code = (root / fault.file).read_bytes()
    try:
        return ast.dump(ast.parse(fault.applied(code))) != ast.dump(ast.parse(code))
    except (SyntaxError, ValueError):
        return False


def sample(root: Path, count: int, seed: int, files: list[str], skip: Callable[[Fault], bool]) -> list[Fault]:
    """`count` faults: at least one of every module, where there are as many, the others in proportion.

    A fault's rank in its module depends on nothing but the seed and its name: a changed line leaves the others' draws.
    """
    ranked = {}
    for file in files:
        faults = [fault for fault in faults_of(root, file) if not skip(fault)]
        ranked[file] = sorted(faults, key=lambda fault: hashlib.sha256(f"{seed} {fault.name}".encode()).hexdigest())
    ranked = {file: faults for file, faults in ranked.items() if faults}
    order = sorted(ranked, key=lambda file: hashlib.sha256(f"{seed} {file}".encode()).hexdigest())
    shares = dict.fromkeys(order[:count], 1)
    rest, total = count - len(shares), sum(map(len, ranked.values()))
    if rest > 0:
        exact = {file: rest * len(ranked[file]) / total for file in order}
        for file in order:
            shares[file] += int(exact[file])
        left = count - sum(shares.values())
        for file in sorted(order, key=lambda file: exact[file] % 1, reverse=True)[:left]:
            shares[file] += 1
    drawn = [
        fault
        for file, share in shares.items()
        for fault in itertools.islice((fault for fault in ranked[file] if is_new(root, fault)), share)
    ]
    return sorted(drawn, key=lambda fault: hashlib.sha256(f"{seed} {fault.name}".encode()).hexdigest())


class _Finder(ast.NodeVisitor):
    """Collects (start, end, new text, kind, where, spans) of every fault."""

    def __init__(self, code: bytes):
        self.code = code
        self.starts = [0]
        for line in code.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[int, int, str, str, str, tuple]] = []
        self.scope: list[str] = []
        self.assigned: list[set[str]] = [set()]
        self.depth = 0  # of blocks in the function
        self.around: list[tuple[int, int]] = [(1, len(self.starts))]  # lines of the module, of a class, of a function
        self.statement: tuple[int, int] | None = None  # lines of the one that is looked at, in a function

    # -- positions

    def begin(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def stop(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.code[self.begin(node) : self.stop(node)].decode()

    def add(self, start: int, end: int, new: str, kind: str) -> None:
        spans = (*([self.statement] if self.statement else []), *reversed(self.around))
        self.found.append((start, end, new, kind, ".".join(self.scope) or "module", spans))

    def replace(self, node: ast.AST, new: str, kind: str) -> None:
        self.add(self.begin(node), self.stop(node), new, kind)

    def between(self, left: ast.AST, right: ast.AST, swaps: dict[str, str], kind: str) -> None:
        """The operator that stands between two operands."""
        start, end = self.stop(left), self.begin(right)
        gap = re.sub(rb"#.*", lambda comment: b" " * len(comment[0]), self.code[start:end]).decode("latin-1")
        operators = sorted(swaps, key=len, reverse=True)
        pattern = "|".join(rf"\b{o}\b".replace(" ", r"\s+") if o[0].isalpha() else re.escape(o) for o in operators)
        if match := re.search(pattern, gap):
            new = swaps[re.sub(r"\s+", " ", match[0])]
            self.add(start + match.start(), start + match.end(), new, kind)

    # -- definitions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        statement, self.statement = self.statement, None
        self.scope.append(node.name)
        self.around.append((node.lineno, node.end_lineno))
        self.decorators(node)
        for default in [*arguments.defaults, *arguments.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.assigned.append({argument.arg for argument in named})
        depth, self.depth = self.depth, 0
        for inner in node.body:
            self.in_function(inner)
        self.depth = depth
        self.assigned.pop()
        self.around.pop()
        self.scope.pop()
        self.statement = statement

    visit_AsyncFunctionDef = visit_FunctionDef

    def in_function(self, node: ast.stmt) -> None:
        before = self.statement
        body = getattr(node, "body", None)
        self.statement = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno)
        self.visit(node)
        self.statement = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        statement, self.statement = self.statement, None
        self.scope.append(node.name)
        self.around.append((node.lineno, node.end_lineno))
        self.decorators(node)
        for keyword in node.keywords:
            self.visit(keyword.value)
        self.assigned.append(set())
        for inner in node.body:
            self.visit(inner)
        self.assigned.pop()
        self.around.pop()
        self.scope.pop()
        self.statement = statement

    def decorators(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            name = self.text(decorator).partition("(")[0].rpartition(".")[2]
            if name in DECLARING:
                continue
            line = self.starts[decorator.lineno - 1]
            self.add(line, self.starts[decorator.end_lineno], "", "dropped decorator")
            self.visit(decorator)

    # -- statements

    def block(self, body: list[ast.stmt]) -> None:
        self.depth += 1
        for node in body:
            self.in_function(node) if self.statement else self.visit(node)
        self.depth -= 1

    def drop(self, node: ast.stmt) -> None:
        self.replace(node, "pass", "dropped statement")

    def visit_If(self, node: ast.If) -> None:
        text = self.text(node.test)
        if "TYPE_CHECKING" in text or "__name__" in text:
            return
        self.condition(node.test)
        self.block(node.body)
        self.block(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit_If(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.block(node.body)
        self.block(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
        self.block(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        for body in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
            self.block(body)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call) and self.called(node.value) in SAID:
            return
        if self.text(node).startswith("torch.cuda."):
            return
        self.drop(node)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        if "__all__" in names:
            return
        stored = [target for target in node.targets if isinstance(target, (ast.Attribute, ast.Subscript))]
        if stored or set(names) <= self.assigned[-1]:
            self.drop(node)
        self.visit(node.value)
        for target in stored:
            self.generic_visit(target)
        self.assigned[-1].update(names)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.assigned[-1].add(node.target.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.drop(node)
        self.between(node.target, node.value, {f"{o}=": f"{n}=" for o, n in ARITHMETIC.items()}, "operator")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if self.depth:
            self.drop(node)
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.drop(node)

    def visit_Continue(self, node: ast.stmt) -> None:
        self.drop(node)

    visit_Break = visit_Continue

    def visit_Delete(self, node: ast.Delete) -> None:
        self.drop(node)

    def visit_Import(self, node: ast.stmt) -> None:
        pass

    visit_ImportFrom = visit_Assert = visit_Global = visit_Nonlocal = visit_Import

    # -- expressions

    def condition(self, test: ast.expr) -> None:
        self.replace(test, f"not ({self.text(test)})", "negated condition")
        self.visit(test)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for test in node.ifs:
            self.condition(test)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right in itertools.pairwise(operands):
            self.between(left, right, COMPARISONS, "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in itertools.pairwise(node.values):
            self.between(left, right, {"and": "or", "or": "and"}, "boolean")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)  # which have no other operator
        sides = (node.left, node.right)
        if not any(isinstance(side, texts) or isinstance(getattr(side, "value", None), str) for side in sides):
            self.between(node.left, node.right, ARITHMETIC, "operator")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.UAdd):
            self.replace(node, f"({self.text(node.operand)})", "dropped sign")
        self.visit(node.operand)

    def visit_Slice(self, node: ast.Slice) -> None:
        for end in (node.lower, node.upper):
            if end is not None and not isinstance(end, ast.Constant):
                self.replace(end, f"({self.text(end)}) + 1", "slice")
        self.generic_visit(node)

    def called(self, node: ast.Call) -> str:
        return getattr(node.func, "attr", getattr(node.func, "id", ""))

    def visit_Call(self, node: ast.Call) -> None:
        name = self.called(node)
        if name in SAID:
            return
        if name in OPPOSITES:
            end = self.stop(node.func)
            self.add(end - len(name), end, OPPOSITES[name], "opposite")
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        plain = [] if name in COMMUTATIVE else plain
        for left, right in itertools.pairwise(plain):
            if self.text(left) != self.text(right):
                gap = self.code[self.stop(left) : self.begin(right)].decode()
                self.add(
                    self.begin(left), self.stop(right), self.text(right) + gap + self.text(left), "swapped arguments"
                )
        given = sorted([*node.args, *node.keywords], key=self.begin)
        for place, argument in enumerate(given):
            if isinstance(argument, ast.keyword) and argument.arg not in {None, *LEFT, *TEXT}:
                start = self.stop(given[place - 1]) if place else self.begin(argument)
                end = self.stop(argument) if place or len(given) == 1 else self.begin(given[1])
                self.add(start, end, "", "dropped keyword")
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in {*LEFT, *TEXT}:
                self.visit(keyword.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.replace(node, str(not value), "constant")
        elif isinstance(value, int):
            self.replace(node, str(value + 1), "constant")
            if value > 0:
                self.replace(node, str(value - 1), "constant")
        elif isinstance(value, float) and (value == 0 or abs(value) >= EPSILON):
            self.replace(node, repr(2 * value or 1.0), "constant")
        elif isinstance(value, str) and not re.search(r"\s", value):
            self.replace(node, repr(value + "_x"), "constant")
