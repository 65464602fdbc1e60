"""A tiny model with a tokenizer, and a text to learn from."""

import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcompress.train.run import Run
from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    return save_checkpoint("qwen2", tmp_path_factory.mktemp("train") / "tiny")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A few words in random order."""
    path = tmp_path_factory.mktemp("train") / "text.txt"
    path.write_text(random_text(1200, seed=0), encoding="utf-8")
    return path


def random_text(words: int, seed: int) -> str:
    letters, order = random.Random(1), random.Random(seed)
    known = ["".join(letters.choice("abcdefghij") for _ in range(letters.randint(2, 7))) for _ in range(30)]
    return " ".join(order.choice(known) for _ in range(words))


@pytest.fixture
def run(tiny, text, tmp_path) -> Run:
    """A training of the tiny model, loaded."""
    this = Run(tmp_path / "out", text, 0, {})
    this.model = AutoModelForCausalLM.from_pretrained(tiny).eval().requires_grad_(False)
    this.tokenizer = AutoTokenizer.from_pretrained(tiny)
    return this
