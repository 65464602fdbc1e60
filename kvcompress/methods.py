"""The registry of methods, with their papers, options and defaults."""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from inspect import get_annotations, isabstract, isdatadescriptor
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from .check.passed import has_passed
from .command_line import called
from .errors import KVCompressError, nearest, one_line, unknown_name, validated

FILES = "KVCOMPRESS_METHODS"  # environment variable: Python files with methods and layer budgets, separated as in PATH
NO_FILE = f" (is the file of your own in {FILES}?)"
OF_FILE = "kvcompress_methods_"  # prefix of such a file's module name
NAME = re.compile(r"\w[\w.+-]*( [\w.+-]+)*")
WORDS = ("all", "all-kv", "all-tokens", "blind", "downsample")  # what stands for methods in an evaluation


class Method:
    """Base class of everything in `list_methods()`: a dataclass whose fields are its options.

    Attributes:
        paper: link to the paper.
        presets: published settings, as options under a name (`preset=`). A preset's `ratio` or `budget`, and the
            `decode_budget` with it, applies only if the user gives neither.
        by_variant: for each value of the option `variant` except the default, the class attributes that it replaces.
            Code reads them by `of_variant(name)` and never compares `variant`, so no variant can run code written for
            another.
        is_checkable: whether `kvcompress check` can check it.
    """

    is_checkable: ClassVar[bool] = False
    paper: ClassVar[str] = ""
    presets: ClassVar[dict[str, dict[str, object]]] = {}
    by_variant: ClassVar[dict[str, dict[str, object]]] = {}

    def of_variant(self, name: str) -> Any:
        """Return a class attribute, or its replacement in the chosen variant."""
        return self.by_variant.get(getattr(self, "variant", None), {}).get(name, getattr(self, name))


@dataclass(frozen=True)
class MethodInfo:
    """An entry of `list_methods()`: a method's class, paper, options with their defaults, and presets.

    The class is a `KVCluster`, or a `kvcompress.tokens.TokenMethod`, whose ratio counts only vision tokens. Presets are
    published settings, as options under a name (`preset=`).
    """

    name: str
    cls: type[Method]
    paper: str
    options: dict[str, object]
    presets: dict[str, dict[str, object]] = field(default_factory=dict)


_METHODS: dict[str, MethodInfo] = {}
_FILES: set[Path] = set()  # files of KVCOMPRESS_METHODS that were imported
MethodClass = TypeVar("MethodClass", bound=type[Method])


def method_name(name: str) -> str:
    """Return the registered spelling: lower case, with `-` instead of `_`."""
    return str(name).lower().replace("_", "-")


def register_method(name: str) -> Callable[[MethodClass], MethodClass]:
    """Class decorator that registers a method's dataclass as `method=name`.

    Raises KVCompressError for a name that is taken, a word of commands, or unfit for folders, lists and
    `NAME:OPTION=VALUE`; and for an option without a default or type."""
    if not isinstance(name, str):
        raise KVCompressError('register_method takes the name of the method: @register_method("value-norm")')

    def register(cls: MethodClass) -> MethodClass:
        key = method_name(name)
        if not NAME.fullmatch(key):
            raise KVCompressError(
                f"{cls.__name__} cannot be method {name!r}: a name has letters, digits, spaces and + - ."
            )
        if key in WORDS:
            raise KVCompressError(f"{cls.__name__} cannot be method {name!r}: evaluations mean something else by it")
        if not (is_dataclass(cls) and issubclass(cls, Method)):
            raise KVCompressError(f"{cls.__name__} is not a dataclass that derives from KVCluster or TokenMethod")
        if isabstract(cls):
            raise KVCompressError(f"{cls.__name__} does not define {' and '.join(sorted(cls.__abstractmethods__))}")
        known = _METHODS.get(key)
        # A notebook cell that runs again may redefine its own class.
        if known and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise KVCompressError(f"method {key!r} is already registered by {known.cls.__qualname__}")
        _check_seen(cls)
        options = {}
        for option in fields(cls):
            default = option.default_factory() if option.default_factory is not MISSING else option.default
            if default is MISSING:
                raise KVCompressError(f"option {option.name!r} of method {key!r} has no default")
            options[option.name] = default
        _check_variants(cls, key, options)
        _METHODS[key] = MethodInfo(key, cls, cls.paper, options, cls.presets)
        return cls

    return register


def _check_seen(cls: type[Method]) -> None:
    """Raise KVCompressError if the dataclass does not see an option, or a new default of one, that the class has."""
    if "__dataclass_fields__" not in vars(cls):
        unseen = [name for name, kind in get_annotations(cls).items() if "ClassVar" not in str(kind)]
        if unseen:
            raise KVCompressError(
                f"{cls.__name__} has the option {unseen[0]!r}, but is no dataclass itself: write "
                "@dataclass(frozen=True) above the class and below @register_method"
            )
    for option in fields(cls):
        given = getattr(cls, option.name, option.default)
        if option.default is not MISSING and given is not option.default and not isdatadescriptor(given):
            raise KVCompressError(
                f"{cls.__name__} gives its option {option.name!r} the default {given!r} without a type, which a "
                f"dataclass does not see: write {option.name}: TYPE = {given!r}"
            )


def untyped(cls: type, name: str) -> str:
    """Return a hint for an error about an option, if a class has an attribute of its name that lacks a type."""
    if name.startswith("_") or callable(getattr(cls, name, print)):
        return ""
    if any(name in get_annotations(each) for each in cls.__mro__):
        return ""
    return f" ({cls.__name__}.{name} has no type, so it is no option)"


def _check_variants(cls: type[Method], method: str, options: dict[str, object]) -> None:
    """Raise KVCompressError unless each variant except the default has its own changes in `by_variant`."""
    names = get_args(get_type_hints(cls).get("variant")) if "variant" in options else ()
    changes = {name: cls.by_variant.get(name) for name in names if name != options["variant"]}
    if strange := set(cls.by_variant) - set(changes):
        raise KVCompressError(f"method {method!r}: by_variant has {min(strange)!r}, which is not a variant")
    if missing := [name for name, changed in changes.items() if not changed]:
        raise KVCompressError(f"method {method!r}: by_variant does not say what variant {missing[0]!r} changes")
    for name, changed in changes.items():
        for attribute, value in changed.items():
            if not hasattr(cls, attribute) or getattr(cls, attribute) == value:
                raise KVCompressError(
                    f"method {method!r}: variant {name!r} gives {attribute!r} in by_variant, which the class "
                    f"{'has with the same value' if hasattr(cls, attribute) else 'does not have'}"
                )
        if other := [other for other in changes if other != name and changes[other] == changed]:
            raise KVCompressError(f"method {method!r}: variants {name!r} and {other[0]!r} change the same")
    for base in cls.__mro__ if names else ():
        for name, function in vars(base).items():
            function = getattr(function, "fget", function)  # a property's
            if "variant" in getattr(getattr(function, "__code__", None), "co_names", ()) and not name.startswith("__"):
                raise KVCompressError(
                    f"method {method!r}: {base.__name__}.{name} reads `variant`; list what a variant changes in "
                    "by_variant, and read self.of_variant(NAME)"
                )


def _import_all() -> None:
    """Import this package's methods and the files that KVCOMPRESS_METHODS names, each once.

    Raises KVCompressError for a file that cannot be imported, and warns about one whose present content never passed
    `kvcompress check`."""
    for package in ("clusters", "tokens"):
        importlib.import_module(f"{__package__}.{package}")
    for name in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        path = Path(name).expanduser().absolute()
        if path not in _FILES:
            try:
                names = import_file(path, name)
            except KVCompressError as error:
                raise KVCompressError(f"{FILES}: {error}") from error
            checkable = any(_METHODS[each].cls.is_checkable for each in names)
            if checkable and not has_passed(path) and os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"warning: {name} was not checked in its present form: {called('check')} {name}", file=sys.stderr)


def import_file(path: Path, name: str) -> list[str]:
    """Import a file with methods, layer budgets or merges, and return the names of its methods.

    Raises KVCompressError, in which the file is called `name`."""
    from .layer_budgets import list_layer_budgets
    from .scoring.merging import MERGES

    if path.suffix != ".py" or not path.is_file():
        raise KVCompressError(f"there is no Python file {name}")
    if path.stem in {other.stem for other in _FILES}:  # the file name is the module name, which identifies a method
        raise KVCompressError(f"{name}: another file there has the same name; rename one")
    spec = importlib.util.spec_from_file_location(f"{OF_FILE}{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    before, parts = set(_METHODS), (set(list_layer_budgets()), set(MERGES))
    _FILES.add(path)  # first, because the file may list the existing methods
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
        if set(_METHODS) == before and (set(list_layer_budgets()), set(MERGES)) == parts:
            raise KVCompressError("it registers no method, no layer budget and no merge")
    except (Exception, SystemExit) as error:
        _FILES.discard(path)
        what = "" if isinstance(error, KVCompressError) else f"{type(error).__name__}: "
        raise KVCompressError(f"{name}: {what}{one_line(error)}") from error
    return sorted(set(_METHODS) - before)


def list_methods() -> dict[str, MethodInfo]:
    """Return all registered methods by name, with class, paper, and options with their defaults.

    Includes methods from files named in the environment variable KVCOMPRESS_METHODS; raises KVCompressError if one
    cannot be imported."""
    _import_all()
    return dict(sorted(_METHODS.items()))


def method_info(name: str | None) -> MethodInfo:
    """Return the entry of a method; None means `full`. Raises KVCompressError with the valid names."""
    _import_all()
    key = method_name("full" if name is None else name)
    if key not in _METHODS:
        raise no_method(name, _METHODS)
    return _METHODS[key]


def no_method(name: object, valid: Iterable[str]) -> KVCompressError:
    """Return the error for a method that is not there. If no file of methods is named, it asks about that."""
    hint = nearest(name, valid) or (NO_FILE if not os.environ.get(FILES) else "")
    return unknown_name("there is no method", name, valid, hint)


def name_of(cls: type[Method]) -> str:
    """Return the name of a registered class."""
    return next(info.name for info in _METHODS.values() if info.cls is cls)


def make_method(method: str | None, **options: object) -> Method:
    """Create a method with validated options. Raises KVCompressError."""
    info = method_info(method)
    for option in options:
        if option not in info.options:
            raise unknown_name(f"method {info.name!r} has no option", option, info.options, untyped(info.cls, option))
    return validated(info.cls, f"method {info.name!r}: option", {**info.options, **options})
