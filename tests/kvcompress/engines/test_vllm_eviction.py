"""vLLM evicts blocks of a prompt and answers as transformers does without them. Run by scripts/test_engines.sh."""

import pytest
from transformers import AutoProcessor

from tests.kvcompress.engines import tiny_qwen
from tests.kvcompress.engines.compared import EVICTED, FEW_BLOCKS

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

SIZE = 32  # tokens of a block
OWN_METHOD = '''
from dataclasses import dataclass
import kvcompress

@kvcompress.register_method("upwards")
@dataclass(frozen=True)
class Upwards(kvcompress.KVCluster):
    """Keeps the keys and values whose first channels are largest."""
    query_window = 0
    def score(self, queries, keys, values, view):
        return keys[..., 0].float() + values[..., 0].float()
'''


@pytest.fixture(scope="module")
def vllm(vllm_answers) -> dict[str, list[dict]]:
    arguments = [
        {**({"hf_overrides": {"kvcompress": asked}} if asked else {}), "long": True, "block_size": SIZE, **others}
        for asked, others in EVICTED.values()
    ]
    return dict(zip(EVICTED, vllm_answers(arguments), strict=True))


@pytest.fixture(scope="module")
def prompts(checkpoint) -> list[dict]:
    processor = AutoProcessor.from_pretrained(checkpoint)
    return [tiny_qwen.inputs_of(processor, prompt) for prompt in tiny_qwen.long_prompts()]


@pytest.mark.parametrize("engine", [name for name in EVICTED if name != "preempted"])
def test_all_answers_are_those_of_transformers(engine, model, prompts, vllm, own_method, monkeypatch):
    monkeypatch.setenv("KVCOMPRESS_METHODS", own_method)
    wanted = [tiny_qwen.answer_in_blocks(model, inputs, SIZE, EVICTED[engine][0]) for inputs in prompts]
    assert [one["prompt"] for one in vllm[engine]] == [inputs["input_ids"].shape[1] for inputs in prompts]
    assert [one["answer"] for one in vllm[engine]] == [tokens for tokens, _ in wanted]
    assert len({tuple(tokens) for tokens, _ in wanted}) == 20


def test_evicted_blocks_are_free_by_vllms_own_metric(model, prompts, vllm):
    asked, _ = EVICTED["knorm"]
    leave = sum(tiny_qwen.answer_in_blocks(model, inputs, SIZE, asked)[1] for inputs in prompts)
    held, without = vllm["full"][0]["blocks"], vllm["knorm"][0]["blocks"]
    assert leave > max(held) / 3
    assert len(held) == len(without)
    assert all(one - other == leave for one, other in zip(held[2:-3], without[2:-3], strict=True))
    assert (held[-1], without[-1]) == (0, 0)


def test_requests_that_are_preempted_are_answered_and_leave_nothing(vllm):
    assert all(len(one["answer"]) == tiny_qwen.ANSWER for one in vllm["preempted"])
    blocks = vllm["preempted"][0]["blocks"]
    assert max(blocks) > FEW_BLOCKS / 2
    assert blocks[-1] == 0
