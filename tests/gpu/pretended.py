"""`pytest -p tests.gpu.pretended -m gpu tests/gpu`: these tests as on a CUDA device, on one that is pretended, but for
those of `LEFT_OUT`.

`PRETENDED_EVERY=40` runs one of forty, of which `PRETENDED_FIRST` says where they begin, and those that
`PRETENDED_ALSO` names a part of.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton asks when it is imported

import pytest

from kvcompress.bench.pretended.device import PretendedCuda

GPU = PretendedCuda()
LEFT_OUT = {  # part of a test's name -> why it does not run here
    **dict.fromkeys(("criticalkv", "defensivekv"), "refuse weights of a type of their own"),
    "quanto": "its tensors are of a type of their own",
    "compiles_static": "nothing is compiled for a device that is none",
    "benchmarked_ways": "asks the driver",
    "peaks_below": "a quarter of an hour: 32,768 tokens on a CPU",
    "columns_are_summed": "minutes in the interpreter, where tests/kvcompress/kernels runs it smaller",
}


def pytest_configure() -> None:
    GPU.__enter__()


def pytest_unconfigure() -> None:
    GPU.__exit__(None, None, None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    can_run = [item for item in items if not any(part in item.name for part in LEFT_OUT)]
    first, step = int(os.environ.get("PRETENDED_FIRST", "0")), int(os.environ.get("PRETENDED_EVERY", "1"))
    also = os.environ.get("PRETENDED_ALSO")
    items[:] = [
        item for at, item in enumerate(can_run) if at % step == first % step or (also is not None and also in item.name)
    ]
