"""Read a sweep file: the part of wandb's schema that works without wandb's server."""

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from kvcompress.errors import MOST, nearest, shown

from ..cells.cell_log import METRICS
from ..cells.errors import UsageError
from ..cells.yaml_files import read_yaml

CONFIGS = Path(__file__).parents[1] / "configs" / "sweeps"  # a link in a checkout, files in a wheel
METHODS = ("grid", "random", "bayes")
# Distribution -> the keys that it needs; wandb's others need its server.
DISTRIBUTIONS = {
    "constant": ("value",),
    "categorical": ("values",),
    "int_uniform": ("min", "max"),
    "uniform": ("min", "max"),
    "log_uniform_values": ("min", "max"),
    "q_uniform": ("min", "max", "q"),
}
LONGEST_NAME = 200  # bytes of a folder name
KEYS = ("name", "description", "project", "entity", "program", "command", "method", "metric", "parameters", "run_cap")


@dataclass(frozen=True)
class SweepConfig:
    """A checked sweep file.

    Attributes:
        name: the file's name without its ending, and the overrides.
        method: grid, random or bayes.
        metric: what is optimised, one of METRICS; goal: `maximize` or `minimize`.
        constants: the parameters with a single value.
        space: the other parameters with their distributions.
        run_cap: the maximum number of trials; None if the file sets none.
    """

    name: str
    method: str
    metric: str
    goal: str
    constants: dict[str, Any]
    space: dict[str, BaseDistribution]
    run_cap: int | None

    def values(self, name: str) -> list[Any]:
        """Return a parameter's possible values: its constant or its choices; [] for a range, [None] if it is absent."""
        if name in self.space:
            return list(self.space[name].choices) if is_choice(self.space[name]) else []
        return [self.constants.get(name)]

    def grid(self, outer: set[str]) -> list[dict[str, Any]]:
        """Return all combinations in the file's order; the parameters in `outer` change least often."""
        names = sorted(self.space, key=lambda name: name not in outer)
        choices = itertools.product(*(self.space[name].choices for name in names))
        return [dict(zip(names, values, strict=True)) for values in choices]

    def corners(self) -> list[dict[str, Any]]:
        """Return one combination per method, with the first choice or smallest value of every other parameter."""
        first = {name: given.choices[0] if is_choice(given) else given.low for name, given in self.space.items()}
        return [{**first, "method": method} for method in self.values("method")]


def read_config(path: Path, overrides: dict[str, Any], name: str | None = None) -> SweepConfig:
    """Read a sweep file; `overrides` replace its parameters by constants, `name` its name. A path without an ending
    names a file of `configs/sweeps`.

    Raises a one-line UsageError for a file that is not a sweep or needs wandb's server.
    """
    if not path.suffix and not path.exists():
        known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
        if str(path) not in known:
            given = f"no sweep {shown(str(path))}{nearest(str(path), known)}"
            raise UsageError(f"{given}; valid: {', '.join(known)}, or a path to a sweep file")
        path = CONFIGS / f"{path}.yaml"
    sweep = read_yaml(path, "sweep file")
    if not isinstance(sweep.get("parameters"), dict):
        raise UsageError(f"{path} is not a sweep file: it has no parameters")
    for key in sweep:
        if key not in KEYS:
            raise UsageError(
                f"{path}: {key!r} is not supported here{nearest(str(key), KEYS)}; valid: {', '.join(KEYS)}"
            )
    method = sweep.get("method")
    if not isinstance(method, str) or method not in METHODS:
        raise UsageError(f"{path}: method {shown(method)} is not one of {', '.join(METHODS)}")
    metric, goal = _metric(path, method, sweep.get("metric"))
    run_cap = sweep.get("run_cap")
    if run_cap is not None and not (_is_int(run_cap) and 0 < run_cap <= MOST):
        raise UsageError(f"{path}: run_cap {shown(run_cap)} is not a positive number of trials")
    specifications = {**sweep["parameters"], **{key: {"value": value} for key, value in overrides.items()}}
    for parameter in specifications:
        if not isinstance(parameter, str):
            raise UsageError(f"{path}: the parameter {shown(parameter)} is not a name")
    distributions = {key: distribution(key, given) for key, given in specifications.items()}
    constants, space = {}, {}
    for parameter, given in distributions.items():
        if is_choice(given) and len(given.choices) == 1:
            constants[parameter] = given.choices[0]
        elif method == "grid" and not is_choice(given):
            raise UsageError(f"parameter {parameter!r}: a grid needs value or values, not a range")
        else:
            space[parameter] = given
    own = "-".join([path.stem, *(f"{parameter}={value}" for parameter, value in overrides.items())])
    name = (name or own).replace("/", "__")
    if name in (".", "..") or len(os.fsencode(name)) > LONGEST_NAME:
        raise UsageError(f"a sweep cannot be called {shown(name)}: give --name, of at most {LONGEST_NAME} bytes")
    return SweepConfig(name, method, metric, goal, constants, space, run_cap)


def _metric(path: Path, method: str, metric: Any) -> tuple[str, str]:
    if metric is None and method != "bayes":
        return "accuracy", "maximize"
    if not isinstance(metric, dict) or not {"name"} <= metric.keys() <= {"name", "goal"}:
        raise UsageError(f"{path}: metric {shown(metric)} is not a name and a goal")
    name, goal = metric["name"], metric.get("goal", "minimize")  # wandb's default
    if not isinstance(name, str) or name not in METRICS:
        raise UsageError(f"{path}: no trial logs the metric {shown(name)}; valid: {', '.join(METRICS)}")
    if goal not in ("maximize", "minimize"):
        raise UsageError(f"{path}: metric goal {shown(goal)} is neither maximize nor minimize")
    return name, goal


def is_choice(given: BaseDistribution) -> bool:
    return isinstance(given, CategoricalDistribution)


def distribution(name: str, given: Any) -> BaseDistribution:
    """Convert wandb's specification of a parameter to optuna's. Raises UsageError."""
    if not isinstance(given, dict):
        raise UsageError(f"parameter {name!r}: {shown(given)} is not value:, values:, or min: and max:")
    kind = given.get("distribution", _default_kind(given))
    if not isinstance(kind, str) or kind not in DISTRIBUTIONS:
        raise UsageError(
            f"parameter {name!r}: distribution {shown(kind)} is not supported here; valid: {', '.join(DISTRIBUTIONS)}"
        )
    keys = given.keys() - {"distribution"}
    if keys != set(DISTRIBUTIONS[kind]):
        takes, found = ", ".join(DISTRIBUTIONS[kind]), ", ".join(sorted(map(str, keys))) or "nothing"
        raise UsageError(f"parameter {name!r}: {kind} takes {takes}, not {found}")
    if kind in ("constant", "categorical"):
        return _categorical(name, [given["value"]] if kind == "constant" else given["values"])
    return _range(name, kind, given)


def _default_kind(given: dict[str, Any]) -> str:
    """Return wandb's default distribution for a parameter that names none."""
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical"
    return "int_uniform" if all(_is_int(given.get(key)) for key in ("min", "max")) else "uniform"


def _categorical(name: str, values: Any) -> CategoricalDistribution:
    if not isinstance(values, list) or not values:
        raise UsageError(f"parameter {name!r}: values {shown(values)} is not a non-empty list")
    for value in values:
        if value is not None and not isinstance(value, bool | int | float | str):
            raise UsageError(
                f"parameter {name!r}: value {shown(value)} is neither text, a number, true, false nor null"
            )
        if not isinstance(value, str | None) and not abs(value) <= MOST:
            raise UsageError(f"parameter {name!r}: value {shown(value)} is not a number between -{MOST} and {MOST}")
    if len(set(values)) < len(values):
        raise UsageError(f"parameter {name!r}: values {shown(values)} has duplicates")
    return CategoricalDistribution(values)


def _range(name: str, kind: str, given: dict[str, Any]) -> BaseDistribution:
    numbers = {key: given[key] for key in DISTRIBUTIONS[kind]}
    is_whole = all(_is_int(number) for number in numbers.values())
    for key, number in numbers.items():
        if kind == "int_uniform" and not _is_int(number):
            raise UsageError(f"parameter {name!r}: {key} {shown(number)} is not a whole number")
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= MOST:
            raise UsageError(f"parameter {name!r}: {key} {shown(number)} is not a number")  # YAML reads 1e-3 as text
    low, high, step = given["min"], given["max"], given.get("q")
    if low > high:
        raise UsageError(f"parameter {name!r}: min {low:g} is above max {high:g}")
    if kind == "log_uniform_values" and low <= 0:
        raise UsageError(f"parameter {name!r}: min {low:g} of log_uniform_values is not above 0")
    if kind == "q_uniform" and (step <= 0 or any(not _is_multiple(bound, step) for bound in (low, high))):
        raise UsageError(f"parameter {name!r}: min {low:g} and max {high:g} are not multiples of q {step:g}")
    if kind == "int_uniform" or (kind == "q_uniform" and is_whole):
        return IntDistribution(low, high, step=step or 1)
    return FloatDistribution(low, high, log=kind == "log_uniform_values", step=step)


def _is_int(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _is_multiple(number: float, step: float) -> bool:
    return math.isclose(number / step, round(number / step), abs_tol=1e-9)
