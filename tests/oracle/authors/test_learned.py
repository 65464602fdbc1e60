"""What learned methods predict, against the recordings of the authors' modules."""

import numpy as np
import pytest
import torch

import kvcompress

from .learned import FOLDER


@pytest.mark.parametrize("name", ["kvzap-linear", "kvzap-mlp", "fastkvzip"])
def test_ours_predicts_what_the_authors_module_does(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        given = {key: torch.from_numpy(file[key]) for key in file.files}
    weights = {key.removeprefix("weights/"): part for key, part in given.items() if key.startswith("weights/")}
    cluster = kvcompress.make_cluster(name.partition("-")[0])
    scores = cluster.scores_of(given["hidden"], weights)
    torch.testing.assert_close(scores, given["scores"], rtol=1e-4, atol=1e-6)
