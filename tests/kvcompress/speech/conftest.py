"""Sound in few steps, and a short prompt."""

from collections.abc import Iterator

import pytest
import torch

from kvcompress.speech import streaming
from kvcompress.speech.prompts import SpeechPrompt, model_inputs


@pytest.fixture(autouse=True)
def steps() -> Iterator[None]:
    """A stream takes as few steps from noise to sound as `omni`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "STEPS", 2)
        yield


@pytest.fixture
def hello(omni) -> dict[str, torch.Tensor]:
    model, processor = omni
    return model_inputs(processor, SpeechPrompt("Hello, who are you?"), model.device)
