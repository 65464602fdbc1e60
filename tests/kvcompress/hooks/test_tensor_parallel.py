"""Tensor parallel: each process compresses its own KV heads, and together they give what one process gives."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.policy.conflicts import TENSOR_PARALLEL, check_conflicts
from kvcompress.policy.make import make_policy
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES
from tests.support.strategies import LEARNED

CALIBRATED = {name for name, info in kvcompress.list_methods().items() if getattr(info.cls, "needs_calibration", False)}
PROCESSES, KV_HEADS, GROUPS, NEW = 2, 4, 2, 5
CASES = {
    "full": {"method": "full"},
    "snapkv": {"method": "snapkv", "ratio": 0.3, "window_size": 4},
    "h2o": {"method": "h2o", "ratio": 0.3},
    "keydiff": {"method": "keydiff", "budget": 9, "first_token": "compressed"},
    "pyramidkv": {"method": "pyramidkv", "ratio": 0.5, "window_size": 2},
    "criticalkv": {"method": "criticalkv", "ratio": 0.3, "window_size": 4},  # reads its part of the output projection
    "expected-attention": {"method": "expected-attention", "ratio": 0.3},
    "look-m": {"method": "look-m", "ratio": 0.3},  # merges
    "evicting": {"method": "snapkv", "ratio": 0.3, "window_size": 4, "decode_budget": 8, "decode_interval": 2},
    "in chunks": {"method": "snapkv", "ratio": 0.3, "window_size": 4, "prefill_chunk": 16},
    "static": {"method": "snapkv", "ratio": 0.3, "window_size": 4, "cache_implementation": "static"},
}


def answers(model: torch.nn.Module) -> dict[str, tuple]:
    """Of each case the new tokens, their logits, and what is kept: [layer][row][KV head of this process]."""
    inputs = FAMILIES["qwen2"].inputs(model, (40, 33), None, 0)
    results = {}
    for name, arguments in CASES.items():
        with kvcompress.compress(model, max_new_tokens=NEW, **arguments) as session:
            tokens, logits = generate(model, inputs, NEW)
        kept = [session.cache.kept_indices(layer) for layer in range(len(session.cache.layers))]
        results[name] = tokens, logits, kept
    return results


def answer_as_one_of_several(folder: Path) -> None:
    """What each process runs: the checkpoint in `folder`, its answers into a file there."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=PROCESSES)).eval()
    results = answers(model)
    with pytest.raises(kvcompress.KVCompressError, match="head_budget='shared' does not go with tensor"):
        kvcompress.compress(model, "tova", 0.3)
    cache = kvcompress.CompressedCache(model.config, "adakv", 0.3)
    with (
        pytest.raises(kvcompress.KVCompressError, match="head_budget='adaptive' does not go with tensor"),
        kvcompress.attach(model),
    ):
        model.generate(torch.full((1, 40), 30), past_key_values=cache)
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_keep_and_answer_what_one_does(tmp_path):
    model = FAMILIES["qwen2"].build(3, KV_HEADS * GROUPS, KV_HEADS)
    model.save_pretrained(tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    command = [sys.executable, *launch, "-m", __spec__.name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = answers(model)
    heads = KV_HEADS // PROCESSES
    for rank in range(PROCESSES):
        results = torch.load(tmp_path / f"{rank}.pt")
        assert list(results) == list(CASES)
        for name, (tokens, logits, kept) in expected.items():
            assert torch.equal(results[name][0], tokens), name
            torch.testing.assert_close(results[name][1], logits, atol=1e-4, rtol=0)
            for ours, whole in zip(results[name][2], kept, strict=True):
                for our_row, row in zip(ours, whole, strict=True):
                    own = row[rank * heads : (rank + 1) * heads]
                    assert [head.tolist() for head in our_row] == [head.tolist() for head in own], name


# -- which methods need the other heads


def test_every_other_method_is_refused():
    """Those that are left score a head whatever the others are, as test_invariants.py tests."""
    refused = set()
    for name in kvcompress.list_methods():
        try:
            check_conflicts(make_policy(name, 1.0), TENSOR_PARALLEL)
        except kvcompress.KVCompressError:
            refused.add(name)
    shared = {"tova", "chunkkv", "entropy-gated-chunkkv", "tgv-kv", "prefixkv"}
    adaptive = {"adakv", "adamixkv", "defensivekv", "kvzip", "lava"}
    measured = {"cake", "d2o", "simlayerkv", "vl-cache", "meda", "aircache", "kvcompose"}
    tokens = {name for name, info in kvcompress.list_methods().items() if issubclass(info.cls, kvcompress.TokenMethod)}
    assert (
        refused
        == shared | adaptive | measured | tokens | {"random", "cam", "compactor", "kvcrush", *LEARNED} | CALIBRATED
    )


@pytest.mark.parametrize("scorer", ["aircache", "tgv-kv", "random"])
def test_a_scorer_that_needs_the_other_heads_is_refused(scorer):
    with pytest.raises(kvcompress.KVCompressError, match="chooses for all heads together"):
        check_conflicts(make_policy("snapkv", 0.3, scorer=scorer), TENSOR_PARALLEL)


def test_heads_that_would_be_split_are_refused(monkeypatch):
    model = FAMILIES["qwen2"].build()
    monkeypatch.setattr(model, "_tp_size", 4)
    with pytest.raises(kvcompress.KVCompressError, match="2 KV heads are not divisible by 4 processes"):
        kvcompress.compress(model, "snapkv", 0.3)


def test_a_calibration_is_refused_as_it_is_of_all_heads():
    policy = make_policy("q-filters", 0.3, **calibration_of("q-filters", FAMILIES["qwen2"].build()))
    with pytest.raises(kvcompress.KVCompressError, match="calibration= does not go with tensor parallelism"):
        check_conflicts(policy, TENSOR_PARALLEL)


if __name__ == "__main__":
    answer_as_one_of_several(Path(sys.argv[1]))
