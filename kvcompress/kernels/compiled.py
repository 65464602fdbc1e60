"""C++ of ours, compiled on the machine that runs it, when it is first needed, and kept in the user's cache.

The functions have plain C arguments and are called through ctypes. So a compiler is all that is needed: neither ninja
nor the headers of torch and Python, as torch.utils.cpp_extension does, and a new torch needs no new build. Without a
compiler callers take their plain torch path.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

LOG = logging.getLogger("kvcompress")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")
AVX2 = ("-mavx2", "-mfma")
# By what torch itself uses here; its ATEN_CPU_CAPABILITY so holds for ours, too.
CAPABILITIES = {
    "AVX2": AVX2,
    "AVX512": (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
}
TIME_LIMIT = 300  # seconds


@cache
def library(name: str) -> ctypes.CDLL | None:
    """`name`.cpp of this folder, compiled; None where that cannot be done, which is said once."""
    try:
        return ctypes.CDLL(str(_built(Path(__file__).with_name(f"{name}.cpp"))))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # Path.home raises RuntimeError
        said = getattr(error, "stderr", None) or str(error)
        LOG.warning("kvcompress cannot compile %s.cpp, so plain torch does its work, slower: %s", name, said.strip())
        return None


def _built(source: Path) -> Path:
    """The shared library, compiled unless that was done before. Raises OSError or SubprocessError."""
    flags = (*FLAGS, *CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ()))
    told = "\0".join((source.read_text(), *(each.read_text() for each in sorted(source.parent.glob("*.h"))), *flags))
    target = _folder() / f"{source.stem}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = _compiler()
    LOG.warning("kvcompress compiles %s once, for some seconds, with %s: %s", source.name, compiler, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # others may be compiling the same
        made = Path(folder) / target.name
        command = [compiler, *flags, str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIME_LIMIT)
        os.replace(made, target)
    return target


def _compiler() -> str:
    """The one that `CXX` names, or the first that is there. Raises FileNotFoundError."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        if (path := shutil.which(name)) is not None:
            return path
    raise FileNotFoundError(f"no C++ compiler {named!r} (CXX)" if named else "no C++ compiler: c++, g++ or clang++")


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcompress"
