"""The environment: versions, the device with its copy and matmul speed, and installed packages."""

import json
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.driver import FOLDER, new_parser, start
from kvcompress.bench.grid import copy_bandwidth
from kvcompress.bench.timing import environment, interleaved
from kvcompress.files import write_text

PACKAGES = ("triton", "pydantic", "pytest", "pytest-xdist", "hypothesis", "flash-attn", "optimum-quanto", "hqq")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(argv: list[str]) -> None:
    given = new_parser("gpu.environment", __doc__, out=FOLDER / "gpu" / "environment").parse_args(argv)
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
    write_text(given.out.with_suffix(".json"), json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    start(main)
