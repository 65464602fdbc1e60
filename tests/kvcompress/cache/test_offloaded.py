"""Entries in CPU memory, of a device that is pretended."""

import torch

from kvcompress.bench.pretended.device import PretendedCuda
from kvcompress.cache.storage import offloaded
from kvcompress.cache.storage.dense import DenseStorage


def test_what_was_moved_in_inference_mode_takes_tokens_outside_of_it(monkeypatch):
    monkeypatch.setattr(offloaded, "TAIL", 2)
    entries, tokens = torch.randn(2, 1, 2, 8, 4), torch.randn(6, 2, 1, 2, 1, 4)
    with PretendedCuda():
        device = torch.device("cuda", 0)
        inner = DenseStorage(*entries.to(device), None, None, 6)
        with torch.inference_mode():
            storage = offloaded.OffloadedStorage(inner, device)
        for token in tokens:
            storage.append(*token.to(device))
            read = torch.stack([part.cpu() for part in storage.read()])
    assert torch.equal(read, torch.cat([entries, *tokens], dim=3))
