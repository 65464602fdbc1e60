"""Where it runs: versions, the device, what it copies and multiplies at, and which packages are there."""

import argparse
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvcompress.bench.grid import copy_bandwidth
from kvcompress.bench.standalone import synchronise
from kvcompress.bench.timing import environment, interleaved
from kvcompress.files import write_text

PACKAGES = ("triton", "pydantic", "pytest", "pytest-xdist", "hypothesis", "flash-attn", "optimum-quanto", "hqq")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="without a suffix")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {**environment(device), "packages": {name: installed(name) for name in PACKAGES}}
    found["copy_gb_per_s"] = copy_bandwidth(device) / 1e9
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    factor = torch.randn(size, size, device=device, dtype=dtype)
    taken = interleaved({"matmul": lambda: factor @ factor}, 5, device)["matmul"]["median"]
    found["matmul_tflops"] = 2 * size**3 / taken / 1e9
    if device.type == "cuda":
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found["cuda"] = torch.version.cuda
        found["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
    synchronise(device)
    write_text(given.out.with_suffix(".json"), json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
