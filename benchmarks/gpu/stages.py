"""The commands of each stage, the most important first, since the last ones are left out if time runs out."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

SHAPE = "qwen2-7b"
METHODS = ("snapkv", "adakv", "knorm")
STATIC = "cache_implementation=static"
# Longest prompt first: differences grow with it.
SHORT, LONG = 8192, 32768
BATCHES = (1, 8, 32)
SMOKE_TIMES = 4


@dataclass(frozen=True)
class Cell:
    """One process.

    Attributes:
        name: name of its result.
        kind: kind of its result, a key of `summary.READERS`.
        arguments: arguments of Python; `{out}` is the file that it writes, without a suffix.
        seconds: its time limit.
    """

    name: str
    kind: str
    arguments: tuple[str, ...]
    seconds: float


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def bench(name: str, seconds: float, arguments: str, smoke: bool, kind: str = "bench", command: str = "bench") -> Cell:
    """Return a cell of `python -m kvcompress bench`, which resumes if it was cut."""
    where = "--shape tiny --device cpu" if smoke else f"--shape {SHAPE} --device cuda --dtype bfloat16"
    return Cell(name, kind, words(f"-m kvcompress {command} {where} --out {{out}} --resume {arguments}"), seconds)


def right(smoke: bool, workers: int) -> list[Cell]:
    """Cells of stage 1."""
    device = "cpu --questions 8" if smoke else "cuda --questions 100"
    counted = "--shape tiny --length 32 --new 5 --methods snapkv" if smoke else f"--shape {SHAPE}"
    spread = f" -n {workers}" if workers else ""
    tests = " ".join(f"tests/gpu/test_{name}.py" for name in ("kernels", "core", "methods"))
    return [
        Cell("tests", "tests", words(f"-m pytest -vv -m gpu --tb=short -p no:cacheprovider{spread} {tests}"), 240),
        Cell("accuracy", "accuracy", words(f"-m benchmarks.gpu.accuracy --out {{out}} --device {device}"), 110),
        Cell("launches", "launches", words(f"-m kvcompress bench launches --out {{out}} {counted}"), 60),
    ]


def fast(smoke: bool) -> list[Cell]:
    """Cells of stage 2."""
    on = "--device cpu --repeats 2" if smoke else "--device cuda --dtype bfloat16 --repeats 6"
    short, long = (64, 128) if smoke else (SHORT, LONG)
    batches = "1 4" if smoke else " ".join(map(str, BATCHES))
    middle = 4 if smoke else 8
    steps = "--new 4 --repeats 1" if smoke else "--new 16 --repeats 3"
    compiled = f"--methods snapkv snapkv:{STATIC} --peers dynamic static --compile --one-prompt {steps}"
    kernels = f"--lengths {'64' if smoke else '2048 8192 32768'} --out {{out}}"
    ragged = "--batches 1 --lengths 64" if smoke else ""
    grid = f"--methods {' '.join(METHODS)} --one-prompt {steps} --batches {batches}"
    return [
        bench("prefill", 70, f"--methods snapkv adakv tova h2o --lengths {short} {steps}", smoke),
        bench(f"static_{short}_1", 180, f"{compiled} --lengths {short} --batches 1", smoke),
        Cell("kernels", "kernels", words(f"-m benchmarks.kernels {on} {kernels}"), 60),
        Cell("ragged", "ragged", words(f"-m benchmarks.ragged_decode {on} --prompt 0 {ragged} --out {{out}}"), 50),
        bench(f"decode_{long}", 90, f"{grid} --lengths {long}", smoke),
        bench(f"decode_{short}", 60, f"{grid} --lengths {short}", smoke),
        bench(f"static_{long}_{middle}", 150, f"{compiled} --lengths {long} --batches {middle}", smoke),
    ]


def buys(smoke: bool) -> list[Cell]:
    """Cells of stage 3."""
    steps = "--new 4 --repeats 1" if smoke else "--new 16 --repeats 2"
    long, many = (128, "4") if smoke else (LONG, "8 32")
    largest = "--memory-limit 1" if smoke else "--largest-batch"
    served = "--requests 6 --prompt 16 --answers 4 12 --kv-gb 0.001 --decode-budget 16"
    if not smoke:  # answers much longer than the budget, as in R-KV's table, and memory for few full caches
        served = "--requests 512 --prompt 128 --answers 512 2048 --kv-gb 4 --decode-budget 256 --minutes 0.6"
    omni = "--device cpu --smoke" if smoke else "--device cuda"
    return [
        bench("vl_cache", 80, f"--methods vl-cache --lengths {long} --batches {many} --one-prompt {steps}", smoke),
        bench(
            "throughput", 170, f"{served} --methods full r-kv --peers padded", smoke, "throughput", "bench throughput"
        ),
        bench("largest", 110, f"--methods full snapkv adakv --lengths {long} --one-prompt {largest} {steps}", smoke),
        Cell("speech", "speech", words(f"-m benchmarks.gpu.speech --out {{out}} {omni}"), 90),
        bench("continuous", 80, f"{served} --methods --peers continuous", smoke, "throughput", "bench throughput"),
    ]


def cells(stage: int, smoke: bool, workers: int = 0) -> list[Cell]:
    """Return the cells of a stage; `workers` processes share the tests."""
    environment = Cell("environment", "environment", words("-m benchmarks.gpu.environment --out {out}"), 60)
    found = [environment, *(right(smoke, workers) if stage == 1 else fast(smoke) if stage == 2 else buys(smoke))]
    # The limits are for a GPU; on a busy CPU, imports alone may take longer.
    return [replace(cell, seconds=SMOKE_TIMES * cell.seconds) for cell in found] if smoke else found


def environment_of(smoke: bool, kind: str) -> dict[str, str]:
    """Return environment variables for a cell's process. Tests have as many processes as the machine has cores."""
    known = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]))
    threads = {"OMP_NUM_THREADS": "1"} if kind == "tests" else {}
    return {**known, **threads, "PYTHONPATH": path, "GPU_TESTS_ON": "cpu" if smoke else "cuda"}
