"""The registry of methods: by name, with paper, options and their defaults."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from .check.passed import has_passed
from .command_line import called
from .errors import KVCompressError, unknown_name, validated

FILES = "KVCOMPRESS_METHODS"  # environment variable: Python files with methods, separated as in PATH
OF_FILE = "kvcompress_methods_"  # the module of such a file begins so


class Method:
    """What has a name in `list_methods()`: a dataclass; its fields are its options.

    `paper`: where it comes from. `presets`: settings that were published, as options under a name (`preset=`); a
    `ratio` or `budget` among them holds where neither is given, and a `decode_budget` beside it with it. `by_variant`:
    for each value of the option `variant` but the default, the class attributes that it replaces. Code asks
    `of_variant(name)` for them and never compares `variant`, so that no variant can run what was written for another.
    """

    paper: ClassVar[str] = ""
    presets: ClassVar[dict[str, dict[str, object]]] = {}
    by_variant: ClassVar[dict[str, dict[str, object]]] = {}

    def of_variant(self, name: str) -> Any:
        """A class attribute, or what the chosen variant has in its place."""
        return self.by_variant.get(getattr(self, "variant", None), {}).get(name, getattr(self, name))


@dataclass(frozen=True)
class MethodInfo:
    """An entry of `list_methods()`: the class, its paper, its options with their defaults, and its presets: settings
    that were published, as options under a name (`preset=`).

    The class is a `KVCluster`, or a `kvcompress.tokens.TokenMethod`, whose ratio counts vision tokens only.
    """

    name: str
    cls: type[Method]
    paper: str
    options: dict[str, object]
    presets: dict[str, dict[str, object]] = field(default_factory=dict)


_METHODS: dict[str, MethodInfo] = {}
_FILES: set[Path] = set()  # those of KVCOMPRESS_METHODS that were imported
MethodClass = TypeVar("MethodClass", bound=type[Method])


def method_name(name: str) -> str:
    """The registered spelling: lower case, `-` where the user wrote `_`."""
    return str(name).lower().replace("_", "-")


def register_method(name: str) -> Callable[[MethodClass], MethodClass]:
    """Class decorator: makes a method's dataclass usable as `method=name` everywhere. The name must be free."""

    def register(cls: MethodClass) -> MethodClass:
        key = method_name(name)
        if not (is_dataclass(cls) and issubclass(cls, Method)):
            raise KVCompressError(f"{cls.__name__} is not a dataclass that derives from KVCluster or TokenMethod")
        known = _METHODS.get(key)
        # A notebook cell that is run again may redefine its own class.
        if known and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise KVCompressError(f"method {key!r} is already registered by {known.cls.__qualname__}")
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


def _check_variants(cls: type[Method], method: str, options: dict[str, object]) -> None:
    """Raises KVCompressError unless each variant but the default says in `by_variant` what it changes, and no two
    change the same."""
    names = get_args(get_type_hints(cls).get("variant")) if "variant" in options else ()
    changes = {name: cls.by_variant.get(name) for name in names if name != options["variant"]}
    if strange := set(cls.by_variant) - set(changes):
        raise KVCompressError(f"method {method!r}: by_variant has {min(strange)!r}, which is no variant to choose")
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
                    f"method {method!r}: {base.__name__}.{name} reads `variant`; it should name in by_variant what a "
                    "variant changes, and read self.of_variant(NAME)"
                )


def _import_all() -> None:
    """Import the methods of this package, and what KVCOMPRESS_METHODS names, each file once. Raises KVCompressError for
    one that cannot be; says so of one that never passed `kvcompress check` as it stands."""
    for package in ("clusters", "tokens"):
        importlib.import_module(f"{__package__}.{package}")
    for name in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        path = Path(name).expanduser().absolute()
        if path not in _FILES:
            names = import_file(path, name)
            if names and not has_passed(path) and os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"warning: {name} was never checked as it stands: {called('check')} {name}", file=sys.stderr)


def import_file(path: Path, name: str) -> list[str]:
    """Import a file with methods or layer budgets, which messages call `name`. Returns the names of its methods. Raises
    KVCompressError."""
    from .layer_budgets import list_layer_budgets

    if path.suffix != ".py" or not path.is_file():
        raise KVCompressError(f"{FILES}: there is no Python file {name}")
    if path.stem in {other.stem for other in _FILES}:  # its module, by which a method is known, has that name
        raise KVCompressError(f"{FILES}: {name}: another file there has the same name; rename one")
    spec = importlib.util.spec_from_file_location(f"{OF_FILE}{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    before, rules = set(_METHODS), set(list_layer_budgets())
    _FILES.add(path)  # at once, for the file may ask for the methods that are there
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
        if set(_METHODS) == before and set(list_layer_budgets()) == rules:
            raise KVCompressError("it registers no method and no layer budget")
    except (Exception, SystemExit) as error:
        _FILES.discard(path)
        what = "" if isinstance(error, KVCompressError) else f"{type(error).__name__}: "
        raise KVCompressError(f"{FILES}: {name}: {what}{' '.join(str(error).split())}") from error
    return sorted(set(_METHODS) - before)


def list_methods() -> dict[str, MethodInfo]:
    """All registered methods: name -> class, paper, options with defaults. Those of the files that the environment
    variable KVCOMPRESS_METHODS names are among them; raises KVCompressError where one cannot be imported."""
    _import_all()
    return dict(sorted(_METHODS.items()))


def method_info(name: str | None) -> MethodInfo:
    """The entry of a method name; None is `full`. Raises KVCompressError with the valid names."""
    _import_all()
    key = method_name("full" if name is None else name)
    if key not in _METHODS:
        raise unknown_name("there is no method", name, _METHODS)
    return _METHODS[key]


def name_of(cls: type[Method]) -> str:
    """The name of a class that is registered."""
    return next(info.name for info in _METHODS.values() if info.cls is cls)


def make_method(method: str | None, **options: object) -> Method:
    """The method with the given options, validated. Raises KVCompressError."""
    info = method_info(method)
    for option in options:
        if option not in info.options:
            raise unknown_name(f"method {info.name!r} has no option", option, info.options)
    return validated(info.cls, f"method {info.name!r}: option", {**info.options, **options})
