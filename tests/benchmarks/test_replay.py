"""A replayed prompt pass is the real one: same kept sets, same tokens."""

import pytest
import torch

import kvcompress
from benchmarks.method_table import is_replayable
from benchmarks.replay import Recording
from tests.families import FAMILIES

CONTEXT = {"scope": "context", "context_tokens": -6}
COMPRESSED = {"first_token": "compressed"}
METHODS = [name for name in kvcompress.list_methods() if is_replayable(name) and name != "full"]


@pytest.mark.parametrize(
    ("family", "images", "options"),
    [
        ("qwen2", None, {}),
        ("llava-onevision", [1, 0], {**CONTEXT, **COMPRESSED}),
        pytest.param("llava-onevision", [1, 0], COMPRESSED, marks=pytest.mark.slow),
        pytest.param("qwen2", None, CONTEXT, marks=pytest.mark.slow),
    ],
)
def test_a_replay_has_the_kept_sets_and_the_tokens_of_the_ordinary_path(family, images, options):
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, [31, 44], images)
    columns = inputs["input_ids"].shape[1]
    recording = Recording(model, inputs)

    def of_prompt(cache, layer):
        end = columns - (options.get("first_token") == "compressed")  # the last token is fed again
        return [[head[head < end].tolist() for head in row] for row in cache.kept_indices(layer)]

    for method in METHODS:
        with kvcompress.compress(model, method, 0.3, **options) as session:
            tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)[:, columns:]
        cache = recording.cache(method, 0.3, **options)
        for layer in range(3):
            assert of_prompt(cache, layer) == of_prompt(session.cache, layer), method
        assert torch.equal(recording.generate(cache, 3), tokens), method


def test_the_answers_first_token_on_the_full_cache_is_known():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [20, 9])
    recording = Recording(model, inputs)
    expected = model.generate(**inputs, max_new_tokens=1, do_sample=False)[:, -1:]
    assert torch.equal(recording.generate(recording.cache("knorm", 0.5), 1), expected)
