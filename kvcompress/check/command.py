"""`kvcompress check`: check that your method works correctly in batches, in chunks and while decoding.

kvcompress check my_method.py                 all methods, layer budgets and merges of the file
kvcompress check snapkv window_size=4         one method, with options
"""

import argparse
import inspect
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..command_line import Parser, key_values
from ..errors import KVCompressError, one_line
from ..flag_types import label, whole

if TYPE_CHECKING:
    from .promises import Checked

PROMPTS = 4  # on which a method is calibrated
WITH = "snapkv"  # the method that a file's layer budgets and merges are checked with


def parser() -> argparse.ArgumentParser:
    this = Parser("check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    this.add_argument("what", type=label, metavar="FILE|METHOD", help="a Python file, or a method's name")
    this.add_argument("options", nargs="*", type=label, metavar="OPTION=VALUE", help="of the method or the engine")
    this.add_argument("--seed", type=whole(), default=0, help="seed of the prompts (0)")
    return this


def main(arguments: list[str]) -> int:
    """Check all promises; return 1 if one is broken. Raises KVCompressError for a method that cannot be checked."""
    start = time.perf_counter()  # before the imports, which take longer than most checks
    given = parser().parse_intermixed_args(arguments)
    options = key_values(given.options)
    if size := {"ratio", "budget"} & options.keys():
        raise KVCompressError(f"{size.pop()}= is not for check, which uses its own ratio")
    file = Path(given.what).expanduser().absolute() if given.what.endswith(".py") else None
    from .passed import hash_of, note
    from .promises import PROMISES, NotAsked
    from .token_promises import TOKEN_PROMISES

    broken, content = 0, hash_of(file) if file is not None and file.is_file() else ""  # it may be edited meanwhile
    with tempfile.TemporaryDirectory(prefix="kvcompress-check-") as folder:
        for title, checked, cls in everything_in(file, given.what, options, given.seed, Path(folder)):
            for name, near in unread(cls).items():
                print(f"-       {title}: its {name!r} is not read (did you mean {near!r}?)", flush=True)
            for promise, check in (TOKEN_PROMISES if checked.policy.tokens else PROMISES).items():
                try:
                    reason = failure(check, checked)
                except NotAsked as error:
                    print(f"-       {title}: {promise}: {error}", flush=True)
                    continue
                broken += bool(reason)
                print(f"{'FAILED' if reason else 'ok':7} {title}: {promise}", flush=True)
                if reason:
                    print(f"        {reason}", flush=True)
    if file is not None and not broken and not options:
        try:
            note(file, content)
        except OSError as error:
            print(f"warning: commands will warn of {given.what} all the same: {error}", file=sys.stderr)
    print(f"{given.what}: checked in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return int(broken > 0)


def everything_in(
    file: Path | None, name: str, options: dict[str, str], seed: int, folder: Path
) -> "list[tuple[str, Checked, type]]":
    """Return what is to be checked, with its title and class, and with calibrations in `folder` for methods that need
    one.

    Raises KVCompressError for an unknown method, one that cannot be calibrated, or one that needs a checkpoint."""
    from ..layer_budgets import list_layer_budgets
    from ..methods import FILES, import_file, method_info
    from ..scoring.merging import MERGES
    from .promises import Checked

    if file is None:
        names, parts = [method_info(name).name], []
    else:
        os.environ.pop(FILES, None)  # its files may define methods with the same names
        known = {"layer_budget": set(list_layer_budgets()), "merge": set(MERGES)}
        registered = import_file(file, name)
        now = {"layer_budget": list_layer_budgets(), "merge": MERGES}
        parts = [(kind, part) for kind, before in known.items() for part in now[kind] if part not in before]
        names = [each for each in registered if method_info(each).cls.is_checkable] or ([] if parts else registered)
    found = [(method, checked_method(method, options, seed, folder), method_info(method).cls) for method in names]
    of_methods = {option for method in names for option in method_info(method).options}
    of_part = {option: value for option, value in options.items() if option not in of_methods}
    for kind, part in parts:
        cls = type(list_layer_budgets()[part]) if kind == "layer_budget" else object
        found.append((f"{WITH} {kind}={part}", Checked(WITH, {**of_part, kind: part}, seed), cls))
    return found


def checked_method(method: str, options: dict[str, str], seed: int, folder: Path) -> "Checked":
    """Return a method to check. Raises KVCompressError as `everything_in`."""
    from ..clusters.calibrated import CalibratedKVCluster
    from ..clusters.learned import LearnedKVCluster
    from ..methods import method_info
    from ..tokens import TokenMethod
    from .promises import Checked
    from .token_promises import CheckedTokens

    cls = method_info(method).cls
    if method == "full":
        raise KVCompressError("method 'full' keeps everything: there is nothing to check")
    if issubclass(cls, LearnedKVCluster):
        raise KVCompressError(f"method {method!r} needs a checkpoint, and check's models have none")
    found = (CheckedTokens if issubclass(cls, TokenMethod) else Checked)(method, options, seed)
    if issubclass(cls, CalibratedKVCluster) and cls.needs_calibration:
        if "calibration" in options:
            raise KVCompressError("calibration= is not for check, which calibrates its own models")
        if reason := failure(partial(calibrate_all, folder=folder), found):
            raise KVCompressError(f"method {method!r} cannot be calibrated: {reason}")
    return found


def unread(cls: type) -> dict[str, str]:
    """Return name -> nearest, for what a user's class defines under almost a name of its base class, so in vain."""
    own = {name for each in cls.__mro__ if not each.__module__.startswith("kvcompress.") for name in vars(each)}
    known = {name for each in cls.__mro__ if each.__module__.startswith("kvcompress.") for name in dir(each)}
    near = {name: get_close_matches(name, known - own, n=1, cutoff=0.85) for name in sorted(own - known)}
    return {name: found[0] for name, found in near.items() if found and not name.startswith("_")}


def calibrate_all(checked: "Checked", folder: Path) -> None:
    """Calibrate a method on check's models, each on a few prompts."""
    from ..calibration.collect import calibrate
    from ..calibration.files import save
    from .models import prompts

    for tried in checked.tried:
        shown = (max(tried.shown),)
        drawn = (prompts(tried.name, tried.model, (60,), shown, seed).inputs for seed in range(PROMPTS))
        file = folder / f"{checked.method}-{tried.name}.safetensors"
        save(calibrate(tried.model, checked.method, drawn, **checked.options), file)
        checked.of_model[tried.name] = {"calibration": str(file)}
    checked.options = {**checked.options, **checked.of_model[checked.tried[0].name]}  # where no model is asked


def failure(check: Callable[["Checked"], None], checked: "Checked") -> str:
    """Return why a promise is broken, in one line; an empty string if it is kept."""
    from ..clusters.base import KVCluster
    from ..methods import method_info
    from .promises import Broken, NotAsked

    try:
        check(checked)
    except NotAsked:
        raise
    except (Broken, KVCompressError) as error:
        return str(error)
    except Exception as error:
        cls, frames = method_info(checked.method).cls, traceback.extract_tb(error.__traceback__)
        frame = ([frame for frame in frames if frame.filename == inspect.getfile(cls)] or frames)[-1]
        lasting = "`note` or `observe`" if issubclass(cls, KVCluster) else "`prepare`"
        hint = f": a method holds only options, and its {lasting} what a choice leaves to the next"
        what = one_line(error) + hint * isinstance(error, FrozenInstanceError)
        return f"{type(error).__name__}: {what} ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
