"""A task that is answered within a second."""

import pytest

from benchmarks.method_cells import Task
from benchmarks.method_tasks import QUERY_AWARE
from tests.support.families import FAMILIES


@pytest.fixture
def task():
    """Four questions in two batches; an answer is right where its first token is even."""
    family = FAMILIES["qwen2"]
    model = family.build()
    prompts = family.inputs(model, [30, 30, 30, 30])
    return Task(
        name="even",
        title="Even tokens",
        identity="even",
        model=model,
        questions=4,
        batch_size=2,
        new_tokens=2,
        inputs=lambda batch: {name: tensor[batch] for name, tensor in prompts.items()},
        right=lambda batch, new: (new[:, 0] % 2 == 0).tolist(),
        protocols=(QUERY_AWARE,),
        has_images=False,
    )
