"""Tensor parallel: each process compresses its own KV heads, and together they give what one process gives."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.policy.conflicts import TENSOR_PARALLEL, check_conflicts
from kvcompress.policy.make import make_policy
from kvcompress.scoring.layer_view import Settings
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
    """Those that are left make the same choice for a head whatever the others are: see below."""
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


@dataclasses.dataclass(frozen=True)
class NoRotation:
    def mean_rotation(self, future: int, head_dim: int, padding: object) -> torch.Tensor:
        return torch.eye(head_dim)[None]

    def unrotated(self, states: torch.Tensor) -> torch.Tensor:
        return states.float()

    def rows(self, rows: torch.Tensor) -> "NoRotation":
        return self

    def from_column(self, first: int) -> "NoRotation":
        return self


APART = [
    name
    for name, info in kvcompress.list_methods().items()
    if issubclass(info.cls, kvcompress.KVCluster) and name not in {"full", *CALIBRATED} and not info.cls.mixes_heads
]


@pytest.mark.parametrize("method", APART)
def test_what_a_head_keeps_does_not_depend_on_the_others(method):
    """Unless the heads share a budget. What `mixes_heads` says of a method is true."""
    generator = torch.Generator().manual_seed(0)
    lengths, columns, head_dim = [60, 53], 60, 8
    queries = torch.randn(2, KV_HEADS * GROUPS, columns, head_dim, generator=generator) * 2
    keys, values = torch.randn(2, 2, KV_HEADS, columns, head_dim, generator=generator)
    projection = torch.randn(32, KV_HEADS * GROUPS * head_dim, generator=generator)
    info = kvcompress.list_methods()[method]
    options = {"window_size": 4} if "window_size" in info.options else {}
    policy = make_policy(method, 0.5, head_budget="uniform", **options)
    padding = torch.tensor([[0], [7]])
    column = torch.arange(columns)

    def kept(first: int, last: int) -> list[list[int]]:
        """Of these KV heads, alone in the world: [row * heads][entries]."""
        of_queries, width = slice(first * GROUPS, last * GROUPS), GROUPS * head_dim
        module = torch.nn.Module()
        module.o_proj = torch.nn.Linear(1, 1)
        module.o_proj.weight = torch.nn.Parameter(projection[:, first * width : last * width])
        q, k, v = queries[:, of_queries], keys[:, first:last], values[:, first:last]
        prompt = kvcompress.Prompt(
            0, 1, lengths, [30, 26], head_dim**-0.5, padding, row_seeds=(1, 2), rotary=NoRotation(), module=module,
            vision=(column >= 12) & (column < 48) & (column >= padding), frame_tokens=(9, 9),
            settings=Settings(policy.cluster, head_budget="uniform"),
            received=k.norm(dim=-1) if policy.cluster.second_pass else None,
        )  # fmt: skip
        prompt = dataclasses.replace(prompt, sums=policy.cluster.observe(q, k, prompt))
        indices = policy.cluster.update_kv(q, policy.cluster.as_stored(k), v, prompt).indices
        return [[column for column in head if column >= 0] for head in indices.flatten(0, 1).tolist()]

    together, half = kept(0, KV_HEADS), KV_HEADS // 2
    first, second = kept(0, half), kept(half, KV_HEADS)
    assert together == [*first[:half], *second[:half], *first[half:], *second[half:]]
    assert len({tuple(head) for head in together}) > 1 or method in ("streamingllm", "simlayerkv")


if __name__ == "__main__":
    answer_as_one_of_several(Path(sys.argv[1]))
