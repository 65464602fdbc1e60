"""`python -m tests.gpu.rehearse MODULE ARGUMENT...` runs a module as on a machine with a CUDA device.

The device is pretended, and of the installed packages only those in `NEEDED` and their requirements can be imported."""

import os
import re
import runpy
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this on import

NEEDED = ("torch", "triton", "transformers", "pydantic", "pytest", "pytest-xdist", "hypothesis", "pillow")
OWN = {"kvcompress", "lmms_eval_plugins", "tiny_vlm", "tests", "benchmarks"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_what_they_need(packages: tuple[str, ...]) -> set[str]:
    """Return the packages and everything that they require without extras."""
    found, new = set(), {plain(package) for package in packages}
    while new:
        package = new.pop()
        found.add(package)
        try:
            listed = requires(package) or []
        except PackageNotFoundError:
            continue
        names = {plain(re.match(r"[\w.-]+", line)[0]) for line in listed if "extra ==" not in line}
        new |= names - found
    return found


def hidden() -> set[str]:
    """Return the installed top-level modules that a machine with only `NEEDED` would not have."""
    there = with_what_they_need(NEEDED)
    found = packages_distributions()
    return {name for name in found if not {plain(owner) for owner in found[name]} & there} - OWN


class Named:
    """Finds modules like `PathFinder`, except hidden ones."""

    gone = hidden()

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> object:
        return None if name.partition(".")[0] in cls.gone else PathFinder.find_spec(name, path, target)

    invalidate_caches, find_distributions = PathFinder.invalidate_caches, PathFinder.find_distributions


def main() -> None:
    sys.meta_path[sys.meta_path.index(PathFinder)] = Named
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    if module == "pytest":  # the plugin pretends
        sys.argv[1:1] = ["-p", "tests.gpu.pretended"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from kvcompress.bench.pretended.device import PretendedCuda

    with PretendedCuda():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
