"""vLLM answers with the tokens that transformers answers with, unpruned and pruned. Run by scripts/test_engines.sh."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoProcessor

import kvcompress
from tests.kvcompress.engines import tiny_qwen
from tests.kvcompress.engines.compared import PRUNED

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

OWN_METHOD = '''
from dataclasses import dataclass
import torch
from kvcompress import TokenMethod, register_method

@register_method("loudest")
@dataclass(frozen=True)
class Loudest(TokenMethod):
    """Keeps the longest embeddings, and halves them."""
    sees = "embeddings"
    def layers(self, num_layers):
        return [0]
    def score(self, tokens):
        return tokens.hidden.float().norm(dim=-1)
    def choose(self, scores, tokens):
        return tokens.best(scores), torch.where(tokens.vision[..., None], tokens.hidden / 2, tokens.hidden)
'''
ON_FRAMES = ("evs", "vidcom2", "dycoke")


@pytest.fixture(scope="module", params=tiny_qwen.FAMILIES)
def checkpoint(request, tmp_path_factory) -> str:
    return tiny_qwen.save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def prompts(checkpoint) -> list[dict]:
    processor = AutoProcessor.from_pretrained(checkpoint)
    return [tiny_qwen.inputs_of(processor, prompt) for prompt in tiny_qwen.prompts()]


@pytest.fixture(scope="module")
def vllm(vllm_answers) -> dict[str, list[dict]]:
    """The answers of all engines. `evs` is asked for by the environment, in a process of its own."""
    by_argument = {name: engine for name, engine in PRUNED.items() if name != "evs"}
    arguments = []
    for asked, others in by_argument.values():
        arguments.append({**({"hf_overrides": {"kvcompress": asked}} if asked else {}), **others})
    found = dict(zip(by_argument, vllm_answers(arguments), strict=True))
    asked, others = PRUNED["evs"]
    by_environment = {"KVCOMPRESS_METHOD": asked["method"], "KVCOMPRESS_RATIO": str(asked["ratio"])}
    return {**found, "evs": vllm_answers([others], **by_environment)[0]}


def answers(model, prompts: list[dict], method: str = "full", **options) -> list[list[int]]:
    """The answers under `kvcompress.compress`; a method on frames leaves pictures alone, as in an engine."""
    found = []
    for inputs in prompts:
        is_left_alone = method == "full" or (method in ON_FRAMES and "pixel_values" in inputs)
        with nullcontext() if is_left_alone else kvcompress.compress(model, method, **options):
            found.append(tiny_qwen.answer_of(model, inputs))
    return found


@pytest.mark.parametrize("engine", PRUNED)
def test_all_answers_are_those_of_transformers(engine, model, prompts, vllm, own_method, monkeypatch):
    monkeypatch.setenv("KVCOMPRESS_METHODS", own_method)
    asked, _ = PRUNED[engine]
    with tiny_qwen.text_after_all_frames(model):
        wanted = answers(model, prompts, **asked)
    found = [one["answer"] for one in vllm[engine]]
    assert len({tuple(answer) for answer in wanted}) == 20
    assert found == wanted
    lengths = [one["prompt"] for one in vllm[engine]]
    assert (lengths == [inputs["input_ids"].shape[1] for inputs in prompts]) == (not asked)


def test_unpruned_answers_differ_only_where_text_follows_a_long_video(model, prompts, vllm):
    """The named difference: the position of text after a video whose time runs further than its frames are wide."""
    found = [one["answer"] for one in vllm["unpruned"]]
    differ = [place for place, wanted in enumerate(answers(model, prompts)) if wanted != found[place]]
    assert differ == [place for place, inputs in enumerate(prompts) if is_long(model, inputs)]


def is_long(model, inputs: dict[str, torch.Tensor]) -> bool:
    if "second_per_grid_ts" not in inputs:
        return False
    (frames, height, width), seconds = inputs["video_grid_thw"][0].tolist(), inputs["second_per_grid_ts"][0]
    vision = model.config.vision_config
    return (frames - 1) * seconds * vision.tokens_per_second >= max(height, width) // vision.spatial_merge_size
