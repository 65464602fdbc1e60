"""What our calibration gathers of the recorded states, beside what the authors' code makes of them."""

import pytest
import torch

from kvcompress import LayerView
from kvcompress.clusters import make_cluster

from .recording import load
from .states import RANDOM, states

# Method -> the fixture with its authors' statistics. DuoAttention's gates are learned there, measured here.
FIXTURES = {
    "q-filters": "q_filters",
    "triattention": "triattention",
    "expected-attention": "kvpress_keys",
}


def gathered(method: str, name: str) -> dict[str, torch.Tensor]:
    """What we make of the queries of the states' prompt."""
    cluster, given, prompt = make_cluster(method), states(name), slice(0, states(name).prompt)
    layers = []
    for place in range(given.layers):
        view = LayerView(
            place,
            given.layers,
            [prompt.stop],
            [prompt.stop],
            given.keys.shape[3] ** -0.5,
            rotary=given.rotary(prompt),
        )
        layers.append(cluster.gather(*given.layer(place, prompt), view))
    sums = {key: torch.stack([layer[key].double() for layer in layers]) for key in layers[0]}
    return {key: part.float() for key, part in cluster.known_from(sums).items()}


@pytest.mark.parametrize("method", FIXTURES)
def test_what_is_gathered_is_what_the_authors_code_gathers(method):
    known = {each.states: each.known for each in load(FIXTURES[method]) if each.method == method}
    assert known.keys() >= RANDOM.keys()
    for name, theirs in known.items():
        ours = gathered(method, name)
        assert ours.keys() == theirs.keys()
        # The tables of real states have 16 bits: undoing the rotation divides by their norm, which there is 1.
        loose = (
            {} if name in RANDOM else {"rtol": 5e-3, "atol": 5e-3 * max(part.abs().max() for part in theirs.values())}
        )
        for key, part in theirs.items():
            torch.testing.assert_close(ours[key], part, **(loose or {"rtol": 1e-4, "atol": 1e-4}), msg=f"{name} {key}")
