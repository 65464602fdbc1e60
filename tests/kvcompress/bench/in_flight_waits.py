"""`python -m tests.kvcompress.bench.in_flight_waits METHOD...`: waits of each step of requests in flight, as JSON.

The output maps method -> [waits of each step] on a pretended device. It needs a process of its own, since Triton reads
the interpreter's variable on import."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this on import

import torch

import kvcompress
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
    with PretendedCuda() as gpu:
        model = FAMILIES["llama"].build().to("cuda")
        found = {
            name: waits_of_steps(gpu, model, MethodSpec.parse(name, None if name == "full" else 0.3))
            for name in sys.argv[1:]
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
