"""What counts as the memory of a generation."""

from types import SimpleNamespace

import pytest
import torch

from lmms_eval_plugins.model.answering import Answering


@pytest.mark.parametrize(("device", "held"), [("cpu", 1000), ("meta", 0)])
def test_what_is_kept_for_other_cells_is_told_from_a_generations_memory_where_the_process_is_measured(device, held):
    model = SimpleNamespace(device=torch.device(device))
    assert Answering(model, None, SimpleNamespace(nbytes=1000), None).held == held
