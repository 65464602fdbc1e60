"""Find out which tasks are scored by a judge, a model behind an API that lmms-eval's scorers ask.

lmms-eval does not record this, and most scorers turn a failed request into a score. So we search their code: from the
functions named in a task's YAML through all functions of task folders that they use.
"""

import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

LMMS_EVAL = "lmms_eval"
JUDGE_MODULES = ("openai", "lmms_eval.llm_judge", "anthropic", "google.genai", "reka")
# Environment variables that hold a key, as the code reads them.
KEY_VARIABLE = re.compile(r"""(?:getenv|environ(?:\.get)?)\s*[\[(]\s*["'](\w*_(?:API_)?KEY)["']""")
KEYS_OF_API_TYPE = {"openai": ("OPENAI_API_KEY",), "azure": ("AZURE_API_KEY", "AZURE_OPENAI_API_KEY")}
WITHOUT_KEY = ("bedrock", "local", "dummy")  # API_TYPE of lmms-eval's judges that need none, or AWS's own
# Tasks whose scorers share code with a judge but do not ask it; some only unless a variable is set.
UNJUDGED = re.compile(r"_static$")
UNJUDGED_WITHOUT = {"PROCESSOR": re.compile(r"^aime|^gpqa_.*openai")}
SWITCH = "USE_LLM_JUDGE"  # a global of reasoning tasks, "True" if a judge is asked


def judges_keys(task: Any) -> tuple[str, ...] | None:
    """Return the environment variables, one of which must hold the key of the judge that may score a
    `lmms_eval.api.task.ConfigurableTask`: empty if the judge needs no key, None if the task needs no judge."""
    off = [tasks for name, tasks in UNJUDGED_WITHOUT.items() if name not in os.environ]
    if any(tasks.search(task.config.task) for tasks in (UNJUDGED, *off)):
        return None
    metrics = [task.config.process_results, *task.aggregation().values(), *task._metric_fn_list.values()]
    search = _Search()
    for function in metrics:
        search.visit(function)
    if not search.found:
        return None
    api_type = os.environ.get("API_TYPE", "openai").lower()
    if search.uses_providers and api_type in WITHOUT_KEY:
        return ()
    read = {name for file in search.files for name in KEY_VARIABLE.findall(file.read_text(encoding="utf-8"))}
    if search.uses_providers:
        read.update(KEYS_OF_API_TYPE.get(api_type, ()))
    return tuple(sorted(read))


class _Search:
    """Walks through the code that a function uses.

    Attributes:
        found: whether something asks a judge.
        uses_providers: whether it does so through lmms-eval's own layer, which reads API_TYPE.
        files: the files of task code visited.
    """

    def __init__(self) -> None:
        self.found = self.uses_providers = False
        self.files: set[Path] = set()
        self._seen: set[int] = set()

    def visit(self, value: Any, attributes: tuple[str, ...] = ()) -> None:
        """Search the code of `value`; `attributes` are the names by which the code around it may use its parts."""
        if isinstance(value, MethodType):
            value = value.__func__
        if isinstance(value, ModuleType):
            if _is_judge(value.__name__):
                self._judge(value.__name__)
            for name in attributes if _is_task_code(getattr(value, "__file__", None)) else ():
                self.visit(getattr(value, name, None), attributes)
            return
        if isinstance(value, list | tuple | dict):
            for item in value.values() if isinstance(value, dict) else value:
                if callable(item):
                    self.visit(item)
            return
        if isinstance(value, FunctionType):
            self._function(value)
            return
        if value is None or isinstance(value, str | bytes | int | float):
            return
        cls = value if isinstance(value, type) else type(value)
        if _is_judge(cls.__module__):
            self._judge(cls.__module__)
        elif func := getattr(value, "func", None):  # functools.partial
            self.visit(func)
        else:
            self._class(cls, attributes)

    def _function(self, function: FunctionType) -> None:
        function = getattr(function, "__wrapped__", function)
        code = function.__code__
        if _is_judge(function.__module__ or ""):
            self._judge(function.__module__)
        if id(code) in self._seen or not _is_task_code(code.co_filename):
            return
        self._seen.add(id(code))
        self.files.add(Path(code.co_filename))
        names = tuple(name for part in _codes(code) for name in part.co_names)
        if SWITCH in names and function.__globals__.get(SWITCH) != "True":
            return
        if "requests" in names and "post" in names:
            self.found = True
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        for value in [*(function.__globals__.get(name) for name in names), *cells]:
            self.visit(value, names)
        for name in names:  # imported inside the function
            if _is_judge(name):
                self._judge(name)

    def _class(self, cls: type, attributes: tuple[str, ...]) -> None:
        """Search a class's constructor, and its methods used here or by each other."""
        waiting = ["__init__", "__call__", *attributes]
        while waiting:
            method = getattr(cls, waiting.pop(), None)
            method = getattr(method, "__func__", method)
            if isinstance(method, FunctionType) and id(method.__code__) not in self._seen:
                self._function(method)
                if id(method.__code__) in self._seen:
                    waiting += [name for part in _codes(method.__code__) for name in part.co_names]

    def _judge(self, module: str) -> None:
        self.found = True
        self.uses_providers |= module.startswith(LMMS_EVAL)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_judge(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in JUDGE_MODULES)


def _is_task_code(file: str | None) -> bool:
    """Return whether a file belongs to a task or lmms-eval's verifiers, not to Python or another package."""
    if file is None or not file.endswith(".py"):
        return False
    parts = Path(file).parts
    if LMMS_EVAL in parts:
        return "tasks" in parts[parts.index(LMMS_EVAL) :] or "verifiers" in parts[parts.index(LMMS_EVAL) :]
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return not file.startswith(installed)
