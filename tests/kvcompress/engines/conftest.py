"""A tiny Qwen2.5-VL, and what vLLM answers of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.kvcompress.engines import tiny_qwen

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return tiny_qwen.save("qwen2.5-vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def model(checkpoint) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def own_method(request, tmp_path_factory) -> str:
    """A file with the module's OWN_METHOD; a process may import only one of each name."""
    module = request.module
    file = tmp_path_factory.mktemp("methods") / f"own_{module.__name__.rpartition('.')[2]}.py"
    file.write_text(module.OWN_METHOD)
    return str(file)


@pytest.fixture(scope="module")
def vllm_answers(checkpoint, own_method, tmp_path_factory) -> Callable[..., list[list[dict]]]:
    """Calls vllm_answers.py with engines' arguments and further environment variables."""

    def run(engines: list[dict], **variables: str) -> list[list[dict]]:
        result = tmp_path_factory.mktemp("answers") / "answers.json"
        command = [sys.executable, "-m", "tests.kvcompress.engines.vllm_answers", checkpoint, str(result)]
        environment = {**os.environ, "KVCOMPRESS_METHODS": own_method, **variables}
        done = subprocess.run(
            [*command, *map(json.dumps, engines)], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(result.read_text())

    return run
