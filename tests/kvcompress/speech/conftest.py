"""Sound in few steps, and a short prompt."""

import pytest
import torch

from kvcompress.speech import streaming
from kvcompress.speech.prompts import SpeechPrompt, model_inputs


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """A stream takes as few steps from noise to sound as `omni`."""
    monkeypatch.setattr(streaming, "STEPS", 2)


@pytest.fixture
def hello(omni) -> dict[str, torch.Tensor]:
    model, processor = omni
    return model_inputs(processor, SpeechPrompt("Hello, who are you?"), model.device)
