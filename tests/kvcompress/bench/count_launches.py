"""`python -m tests.kvcompress.bench.count_launches OUT LAUNCHES IN_FLIGHT`: of caches, two lists in JSON.

Writes OUT_5 (of five steps), OUT_9 (of caches that evict, with eight layers) and OUT_rows (of two rows, of caches that
do not) as `kvcompress bench launches` does, and prints in JSON the waits of each step of requests in flight: {method:
[waits]}.
One process of its own for all, since Triton reads the interpreter's variable on import."""

import contextlib
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this on import

import torch

import kvcompress
from kvcompress.__main__ import main as command
from kvcompress.bench.contenders import MethodSpec
from kvcompress.bench.pretended.device import PretendedCuda
from tests.support.families import FAMILIES

SLOTS, NEW = 2, 9


def waits_of_steps(gpu: PretendedCuda, model: torch.nn.Module, method: MethodSpec) -> list[int]:
    """Return the waits of steps in which no request ends or begins."""
    requests = [FAMILIES["llama"].inputs(model, [length]) for length in (80, 21)]
    waits = []
    with kvcompress.compress(model, method.name, method.ratio, **method.options) as session:
        steps = session.generate_many(requests, slots=SLOTS, max_new_tokens=NEW).by_step()
        for _ in range(SLOTS):  # in each of which one begins
            next(steps)
        for _ in range(NEW - 4):
            with gpu.counting() as counts:
                done = next(steps)
            assert not done, [a.error for a in done]
            waits.append(counts.waits)
    return waits


def main() -> None:
    out, launches, in_flight = sys.argv[1], *map(json.loads, sys.argv[2:])
    sizes = ["--shape", "tiny", "--length", "96", "--ratio", "0.4"]  # more than a window, so that heads are uneven
    with contextlib.redirect_stdout(sys.stderr):
        for evicts, name, new, batch in ((False, "5", "5", "1"), (True, "9", "9", "1"), (False, "rows", "5", "2")):
            caches = [cache for cache in launches if ("decode_budget" in cache) == evicts]
            of_run = ["--out", f"{out}_{name}", "--new", new, "--batch", batch, *(["--layers", "8"] if evicts else [])]
            assert not command(["bench", "launches", *sizes, *of_run, "--methods", *caches])
    with PretendedCuda() as gpu:
        model = FAMILIES["llama"].build().to("cuda")
        found = {
            name: waits_of_steps(gpu, model, MethodSpec.parse(name, None if name == "full" else 0.3))
            for name in in_flight
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
