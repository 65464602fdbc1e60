"""Read what to reproduce: a file of `configs/reproduce`, and the paper's numbers beside it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from kvcompress.errors import MOST, first_fault, nearest, one_line, shown

from ..cells.errors import UsageError
from ..cells.results import exact
from ..cells.yaml_files import read_yaml
from ..model.arguments import make_compression
from ..model.input_methods import size_of

CONFIGS = Path(__file__).parents[1] / "configs" / "reproduce"  # a link in a checkout, files in a wheel
# (model, benchmark, method, ratio or budget as text) -> the paper's value and its reading error, if that is known
Reference = dict[tuple[str, ...], tuple[float, float | None]]
REFERENCE_COLUMNS = ["model", "method", "ratio_kept", "benchmark", "value", "est_error_abs"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_min_length=1)


class PaperModel(_Strict):
    name: str = Field(description="As in the paper and in the reference.")
    pretrained: str | None = Field(description="MODEL of run_eval.sh; null if it cannot be run.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Model arguments, e.g. max_pixels.")
    gpu: bool = Field(True, description="Skip it on machines without a GPU, unless device= is given.")
    needs: str | None = Field(None, description="Why `pretrained` is null.")

    @model_validator(mode="after")
    def _check(self) -> "PaperModel":
        return _with_reason(self, self.pretrained, "pretrained")


class Benchmark(_Strict):
    name: str = Field(description="As in the paper and in the reference.")
    task: str | None = Field(description="A task of lmms-eval or lm-eval; null if it cannot be run here.")
    flags: list[str] = Field(default_factory=list, description="Flags of run_eval.sh for this task only.")
    metric: str | None = Field(None, description="The task's metric; default: its headline metric.")
    scale: PositiveFloat = Field(100, le=MOST, description="The paper's score for a score of 1.")
    needs: str | None = Field(None, description="Why `task` is null.")
    remark: str | None = Field(None, description="What differs from the paper.")

    @model_validator(mode="after")
    def _check(self) -> "Benchmark":
        return _with_reason(self, self.task, "task")


class PaperMethod(_Strict):
    name: str = Field(description="As in the paper and in the reference.")
    method: str = Field(description="A method, as in an evaluation.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the method.")
    models: list[str] | None = Field(None, description="The models to run it on; default: all.")


class Reproduction(_Strict):
    """A file of `configs/reproduce`."""

    title: str
    paper: str = Field(description="Address of the paper.")
    about: str = Field(description="What is reproduced, and what is not.")
    reference: str | None = Field(None, description="CSV beside the file; see docs/reproduce.md for its columns.")
    source: str | None = Field(None, description="Where the reference is from; shown wherever its numbers are.")
    models: list[PaperModel] = Field(min_length=1)
    benchmarks: list[Benchmark] = Field(min_length=1)
    methods: list[PaperMethod] = Field(min_length=1)
    ratios: list[float] = Field(default_factory=list)
    budgets: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> "Reproduction":
        if bool(self.ratios) == bool(self.budgets):
            raise ValueError("give either ratios or budgets")
        if (self.reference is None) != (self.source is None):
            raise ValueError("reference and source belong together")
        for kind in ("models", "benchmarks"):
            names = [entry.name for entry in getattr(self, kind)]
            if len(names) != len(set(names)):
                raise ValueError(f"duplicate name among {kind}: {', '.join(names)}")
        names = [model.name for model in self.models]
        for method in self.methods:
            for size in self.sizes(method):
                make_compression(method.method, **size, **method.options)
            for name in method.models or []:
                if name not in names:
                    raise ValueError(f"method {method.name}: no model {name!r}{nearest(name, names)}")
        for model in self.models:
            own = [method.name for method in self.methods if method.models is None or model.name in method.models]
            if len(own) != len(set(own)):
                raise ValueError(f"duplicate method for {model.name}: {', '.join(own)}")
        return self

    def sizes(self, method: PaperMethod) -> list[dict[str, Any]]:
        """Return the ratios or budgets at which a method runs; `full` and `blind` have one."""
        if own := size_of(method.method):
            return [own]
        return [{"ratio": ratio} for ratio in self.ratios] + [{"budget": budget} for budget in self.budgets]


def _with_reason(entry: Any, value: str | None, name: str) -> Any:
    if (value is None) != (entry.needs is not None):
        raise ValueError(f"{entry.name}: `needs` says why {name} is null: give it then, and only then")
    return entry


def load_config(name: str, model_root: Path | None = None) -> tuple[Reproduction, Path]:
    """Read a reproduction; return it and the path of its file.

    A model ORG/NAME is taken from the folder NAME in `model_root` if that exists. Raises a one-line UsageError for any
    error in the file.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml"
    if not os.path.isfile(path):
        known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
        hint = nearest(name, known) if path.parent == CONFIGS else ""
        raise UsageError(
            f"no reproduction {shown(name)}{hint}; valid: {', '.join(known)}, or a path that ends in .yaml"
        )
    try:
        config = Reproduction.model_validate(read_yaml(path, "reproduction"))
    except ValidationError as error:
        where, message, _ = first_fault(error)
        raise UsageError(f"{path}: {where + ': ' if where else ''}{message}") from None
    if model_root is None:
        return config, path
    models = [
        model.model_copy(update={"pretrained": str(local)})
        if model.pretrained and (local := model_root / Path(model.pretrained).name).is_dir()
        else model
        for model in config.models
    ]
    return config.model_copy(update={"models": models}), path


def load_reference(config: Reproduction, path: Path) -> Reference:
    """Read the paper's numbers; rows without a value are left out.

    Raises UsageError if the file or a column is missing, or if a row has a name that the configuration lacks.
    """
    if config.reference is None:
        return {}
    file = path.parent / config.reference
    if not os.path.isfile(file):
        raise UsageError(f"{path}: the reference {shown(str(file))} does not exist")
    try:
        frame = pd.read_csv(file)
    except (ValueError, OSError) as error:  # includes pandas' errors and UnicodeDecodeError
        raise UsageError(f"{file} is not a CSV file: {one_line(error, 300)}") from None
    if missing := [column for column in REFERENCE_COLUMNS if column not in frame]:
        raise UsageError(f"{file}: no column {', '.join(missing)}; it needs {', '.join(REFERENCE_COLUMNS)}")
    for column, entries in (("model", config.models), ("benchmark", config.benchmarks), ("method", config.methods)):
        names = [entry.name for entry in entries]
        if unknown := sorted(set(map(str, frame[column])) - set(names)):
            raise UsageError(f"{file}: {column} {unknown[0]!r} is not in {path.name}, which has {', '.join(names)}")
    for column in ("ratio_kept", "value", "est_error_abs"):
        if not pd.api.types.is_numeric_dtype(frame[column]) or not np.isfinite(frame[column].dropna()).all():
            raise UsageError(f"{file}: column {column} has a value that is not a number")
    return {
        (row.model, row.benchmark, row.method, exact(row.ratio_kept)): (
            row.value,
            None if pd.isna(row.est_error_abs) else row.est_error_abs,
        )
        for row in frame.dropna(subset=["ratio_kept", "value"]).itertuples()
    }
