"""The omni model for tests of speech, loaded once; fixed shapes as on CUDA; a registry of a test's own."""

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import pytest
import torch
from transformers import ProcessorMixin, Qwen2_5OmniForConditionalGeneration

from kvcompress import layer_budgets, methods
from kvcompress.cache.storage.static import StaticStorage
from kvcompress.inflight.pool import SlotPool
from kvcompress.scoring import merging
from kvcompress.speech import answering
from kvcompress.speech.prompts import bundled_prompts, model_inputs
from tests.support.omni import save_checkpoint


@pytest.fixture(scope="session")
def omni_checkpoint(tmp_path_factory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="session")
def omni(omni_checkpoint) -> tuple[Qwen2_5OmniForConditionalGeneration, ProcessorMixin]:
    """Model and processor, which no test may change.

    token2wav takes one step from noise to sound in place of nine, which were three quarters of an answer's time.
    """
    model, processor = answering.load(omni_checkpoint, "float32", torch.device("cpu"))
    model.token2wav.forward = partial(model.token2wav.forward, num_steps=2)
    return model, processor


@pytest.fixture(scope="session")
def omni_inputs(omni) -> dict[str, torch.Tensor]:
    """A prompt with a picture and sound."""
    model, processor = omni
    return model_inputs(processor, bundled_prompts(16_000, [])[-1], model.device)


@pytest.fixture
def registry(monkeypatch) -> Iterator[None]:
    """Forgets the methods, layer budgets, merges and files of methods that a test adds."""
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    monkeypatch.setattr(methods, "_FILES", set())
    monkeypatch.setattr(layer_budgets.base, "_RULES", dict(layer_budgets.base._RULES))
    with patch.dict(merging.MERGES):
        yield


@pytest.fixture
def as_on_cuda(monkeypatch) -> None:
    """Let static storages and slots of fixed shapes attend in place, by the operator's plain form."""

    def patch(kind: type, is_fixed: Callable[..., bool]) -> None:
        make = kind.__init__

        def init(self: object, *arguments: object) -> None:
            make(self, *arguments)
            if is_fixed(self):
                self.decodes_in_place = True

        monkeypatch.setattr(kind, "__init__", init)

    patch(StaticStorage, lambda storage: True)
    patch(SlotPool, lambda pool: pool.is_fixed)
