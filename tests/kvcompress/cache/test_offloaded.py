"""Entries in CPU memory, of a device that is pretended."""

import copy

import pytest
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


class Stream:
    """A device's, which cannot be copied."""

    def __reduce_ex__(self, protocol: int) -> None:
        raise TypeError("cannot pickle 'Stream' object")


@pytest.fixture
def storage() -> offloaded.OffloadedStorage:
    states = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    return offloaded.OffloadedStorage(DenseStorage(states, -states, None, None, 3), torch.device("cpu"))


def test_a_copy_makes_a_stream_of_its_own(storage):
    storage.stream, storage.fetched = Stream(), (torch.ones(1),)
    twin = copy.deepcopy(storage)
    assert (twin.stream, twin.fetched) == (None, None), "on a CPU it needs none"
    assert torch.equal(twin.read()[0], storage.inner.read()[0])


def test_what_was_fetched_ahead_does_not_stay_on_the_device_in_a_fork(storage):
    storage.fetched = storage.inner.read()
    assert storage.fork().fetched is storage.fetched is None


def test_selected_rows_are_pinned_again(storage, monkeypatch):
    pinned = []
    monkeypatch.setattr(offloaded.OffloadedStorage, "_pin", lambda self: pinned.append(len(self.inner.keys)))
    storage.select(torch.tensor([1, 1, 0]))
    assert pinned == [3]
