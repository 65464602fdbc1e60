"""`python -m tests.kvcompress.bench.in_flight_waits METHOD...`: how often each step of requests in flight waits for a
pretended device, as JSON: method -> [waits of each step]. A process of its own: Triton is told of its interpreter at
the start.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # Triton asks when it is imported

import torch

import kvcompress
from kvcompress.bench.contenders import MethodSpec
from kvcompress.bench.pretended.device import PretendedCuda
from tests.support.families import FAMILIES

SLOTS, NEW = 2, 9


def waits_of_steps(gpu: PretendedCuda, model: torch.nn.Module, method: MethodSpec) -> list[int]:
    """Of those steps that answer no request and begin none."""
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
