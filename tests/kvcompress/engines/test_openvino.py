"""OpenVINO GenAI on exported settings: which blocks it keeps, found by its log probabilities, beside ours.

Needs an environment with openvino-genai and optimum-intel, whose Python KVCOMPRESS_OPENVINO_PYTHON names;
scripts/test_openvino.sh makes one.
"""

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import kvcompress
from kvcompress import __main__
from kvcompress.clusters.h2o import H2OKVCluster
from kvcompress.clusters.snapkv import SnapKVCluster
from tests.support.families import FAMILIES

PYTHON = os.environ.get("KVCOMPRESS_OPENVINO_PYTHON")
ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="KVCOMPRESS_OPENVINO_PYTHON names no Python with openvino-genai"),
]

TOKENS, STEPS, PROMPTS, BLOCK, RATIO = 300, 6, 4, 32, 128 / 300
FREE = range(1, 8)  # the blocks between the first and the recent one; the tenth is not full
POOLED = 7  # tokens whose largest attention counts, a constant of the engine
OPTIONS = {"h2o": {"recent": 0.25}, "snapkv": {}, "kvcrush": {}, "r-kv": {}}


@pytest.fixture(scope="module")
def model():
    """A model of one layer: its keys do not depend on what was evicted before."""
    return FAMILIES["qwen2"].build(num_hidden_layers=1)


@pytest.fixture(scope="module")
def prompts(model) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def answers(model, prompts, tmp_path_factory) -> dict[str, list[dict]]:
    """Method (or `full`) -> the engine's answer to each prompt, see openvino_worker.py."""
    folder = tmp_path_factory.mktemp("openvino")
    model.save_pretrained(folder / "model")
    (folder / "prompts.json").write_text(json.dumps(prompts.tolist()))
    for method, options in OPTIONS.items():
        given = [f"{name}={value}" for name, value in options.items()]
        line = ["export", method, str(RATIO), *given, "--engine", "openvino", "--tokens", str(TOKENS)]
        assert __main__.main([*line, "--out", str(folder / "settings" / f"{method}.json")]) == 0
    line = [PYTHON, "-m", "tests.kvcompress.engines.openvino_worker", str(folder), str(STEPS)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def log_probabilities(model, prompt: torch.Tensor, answer: list[int], evicted: tuple[int, ...] = ()) -> torch.Tensor:
    """Of the answer's tokens, if these blocks are gone after the first decode step."""
    row = torch.cat([prompt, torch.tensor(answer)])[None]
    seen = torch.ones(row.shape[1], row.shape[1], dtype=torch.bool).tril()
    for block in evicted:
        seen[TOKENS + 1 :, block * BLOCK : (block + 1) * BLOCK] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(row, attention_mask=mask[None, None]).logits[0, TOKENS - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def kept_by(model, prompt: torch.Tensor, answer: dict) -> list[int]:
    """The free blocks that explain the engine's log probabilities; no others may."""
    logs = torch.tensor(answer["logs"])
    gone = max(answer["blocks"]) - min(answer["blocks"])
    far = {
        evicted: (log_probabilities(model, prompt, answer["ids"], evicted) - logs).abs().max().item()
        for evicted in itertools.combinations(FREE, gone)
    }
    best, second = sorted(far, key=far.get)[:2]
    assert far[best] < 1e-4 < 1e-2 < far[second]
    return [block for block in FREE if block not in best]


def generate(model, prompt: torch.Tensor, method: str, **options: object):
    with kvcompress.compress(model, method, RATIO, head_budget="shared", **options):
        return model.generate(prompt[None], max_new_tokens=1, do_sample=False, return_dict_in_generate=True)


def scores_of(model, prompt: torch.Tensor, method: str, cls: type, monkeypatch, **options: object) -> torch.Tensor:
    """Our scores of a prompt's tokens, summed over the KV heads."""
    found, select = [], cls.select
    with monkeypatch.context() as patch:
        patch.setattr(cls, "select", lambda self, scores, view: found.append(scores) or select(self, scores, view))
        generate(model, prompt, method, **options)
    return found[0][0].sum(0)


def best_blocks(scores: torch.Tensor, count: int) -> list[int]:
    sums = scores[BLOCK * FREE.start : BLOCK * FREE.stop].reshape(-1, BLOCK).sum(1)
    return sorted((sums.topk(count).indices + FREE.start).tolist())


def pooled(scores: torch.Tensor) -> torch.Tensor:
    return torch.stack([scores[column : column + POOLED].max() for column in range(len(scores))])


def test_without_eviction_it_answers_as_transformers(model, prompts, answers):
    for prompt, answer in zip(prompts, answers["full"], strict=True):
        assert answer["ids"] == model.generate(prompt[None], max_new_tokens=STEPS, do_sample=False)[0, TOKENS:].tolist()
        far = log_probabilities(model, prompt, answer["ids"]) - torch.tensor(answer["logs"])
        assert far.abs().max() < 1e-4


@pytest.mark.parametrize("method", ["h2o", "snapkv", "kvcrush"])
def test_after_the_first_decode_step_as_many_blocks_stay_as_were_exported(answers, method):
    for answer in answers[method]:
        assert answer["blocks"] == [10, 10, 5, 5, 5, 5]  # four, and the one that is not full


@pytest.mark.parametrize(("method", "cls"), [("h2o", H2OKVCluster), ("snapkv", SnapKVCluster)])
def test_it_keeps_our_scores_best_blocks_but_for_the_named_differences(
    model, prompts, answers, monkeypatch, method, cls
):
    """Sums over blocks of the pooled attention, with the first decode step's; what `differences` names is all."""
    own = OPTIONS[method] | ({"kernel_size": 1} if method == "snapkv" else {})
    same, inside, tokens = 0, 0, 0
    for prompt, answer in zip(prompts, answers[method], strict=True):
        kept = kept_by(model, prompt, answer)
        scores = scores_of(model, prompt, method, cls, monkeypatch, **own)
        step = {"window_size": 1, "kernel_size": 1}  # the step's attention alone
        longer = torch.cat([prompt, torch.tensor(answer["ids"][:1])])
        decoded = scores_of(model, longer, "snapkv", SnapKVCluster, monkeypatch, **step)[:TOKENS]
        queries = 2 * 32 if method == "snapkv" else 2  # our votes are means over a window and a group of two
        group = queries if method == "snapkv" else 1
        assert best_blocks(pooled(scores * group) + pooled(decoded * 2), len(kept)) == kept
        same += len({*best_blocks(scores, len(kept))} & {*kept})
        (ours,) = generate(model, prompt, method, **OPTIONS[method]).past_key_values.kept_indices(0)
        free = [column for column in ours[0].tolist() if column // BLOCK in FREE]
        inside += sum(column // BLOCK in kept for column in free)
        tokens += len(free)
    print(
        f"{method}: {same} of {2 * PROMPTS} blocks without pooling, {inside} of our {tokens} tokens are in kept blocks"
    )


def test_kvcrush_keeps_the_best_block_and_a_representative(model, prompts, answers, monkeypatch):
    for prompt, answer in zip(prompts, answers["kvcrush"], strict=True):
        window = {"window_size": 16, "kernel_size": 1}
        scores = scores_of(model, prompt, "snapkv", SnapKVCluster, monkeypatch, **window)
        (best,) = best_blocks(pooled(scores), 1)
        assert best in kept_by(model, prompt, answer)


def test_adaptive_rkv_ends_with_an_error_on_a_cpu(answers):
    """Once it does not, the difference that openvino.py names is gone."""
    for answer in answers["r-kv"]:
        assert "Token diversity must be registered" in answer["error"]
