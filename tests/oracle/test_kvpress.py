"""The same kept sets as kvpress (https://github.com/NVIDIA/kvpress) per layer and head, on the states that
`make_kvpress_fixtures.py` recorded. Every comparison runs alone and in a left-padded batch with another prompt."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvcompress
from kvcompress.layer_budgets.base import layer_budget
from kvcompress.scoring.layer_view import Settings
from kvcompress.scoring.rotary import Rotary

FIXTURES = np.load(Path(__file__).with_name("kvpress.npz"))
array = cache(FIXTURES.__getitem__)  # a file is read anew at each access
PROMPTS = {"qwen2-301": 301, "qwen2-150": 150, "llama-203": 203, "qwen2-1030": 1030}

# kvpress's press in the fixtures -> our method and its options.
SNAPKV = {"window_size": 8, "kernel_size": 5, "pooling": "avg"}
ADAPTIVE = {"head_budget": "adaptive-kvpress", "safeguard": 0.2}
SAME = {
    "streamingllm": ("streamingllm", {}),
    "knorm": ("knorm", {}),
    "keydiff": ("keydiff", {}),
    "tova": ("tova", {"variant": "kvpress"}),
    "value-norm": ("vnorm", {"variant": "kvpress"}),
    "snapkv-8-5": ("snapkv", SNAPKV),
    "snapkv-16-7": ("snapkv", {"window_size": 16, "kernel_size": 7}),
    "snapkv-64-5": ("snapkv", {"window_size": 64, "kernel_size": 5}),
    "lagkv-128": ("lagkv", {"sinks": 4, "lag": 128}),
    "lagkv-64": ("lagkv", {"sinks": 4, "lag": 64}),
    "lagkv-16": ("lagkv", {"sinks": 4, "lag": 16}),
    "cur": ("cur", {}),
    "cur-key": ("cur", {"leverage": "key"}),
    "cur-avg": ("cur", {"leverage": "kv_avg", "window_size": 10}),
    "cur-global": ("cur", {"window_size": 0}),
    "chunkkv-8-5": ("chunkkv", SNAPKV),
    "chunkkv-8-5-by-7": ("chunkkv", {**SNAPKV, "chunk_size": 7}),
    "criticalkv-8-5": ("criticalkv", SNAPKV),
    "critical-adakv-8-5-safe": ("criticalkv", SNAPKV | ADAPTIVE | {"safeguard": 0.9}),
    "critical-adakv-8-5": ("criticalkv", SNAPKV | ADAPTIVE),
    "expected-attention": ("expected-attention", {}),
    "expected-attention-eps": ("expected-attention", {"epsilon": 0.01}),
    "expected-attention-mean": ("expected-attention", {"covariance": False, "future": 64}),
    "adakv-expected-attention-eps": ("expected-attention", {"epsilon": 0.01} | ADAPTIVE),
    "adakv-snapkv-8-5": ("adakv", SNAPKV | ADAPTIVE),
    "adakv-snapkv-8-5-half": ("snapkv", SNAPKV | ADAPTIVE | {"safeguard": 0.5}),
    "adakv-cur": ("cur", ADAPTIVE),
    "adakv-keydiff": ("keydiff", ADAPTIVE),
    "capkv": ("capkv", {}),
    "leverage": ("leverage", {"variant": "kvpress"}),
    "non-causal": ("non-causal-attention", {"variant": "kvpress"}),
    "non-causal-64": ("non-causal-attention", {"variant": "kvpress", "chunk_size": 64}),
    "compactor": ("compactor", {"variant": "kvpress"}),
    "finch-8": ("finch", {"window_size": 8}),
    # Under kvpress's own budgets per layer; what they are is a test of its own.
    "pyramidkv-64-5": ("snapkv", {"window_size": 64}),
    "pyramidkv-8-5": ("snapkv", SNAPKV),
    "pyramidkv-8-5-beta-3": ("snapkv", SNAPKV),
}


def recorded(prompt: str, press: str) -> dict[int, torch.Tensor]:
    """Entries asked for -> what kvpress kept: bool (layers, kv_heads, length)."""
    start = f"{prompt}/{press}/"
    return {
        int(name.removeprefix(start)): torch.from_numpy(
            np.unpackbits(array(name), axis=-1, count=PROMPTS[prompt]).astype(bool)
        )
        for name in FIXTURES.files
        if name.startswith(start)
    }


def is_too_short(press: str, prompt: str) -> bool:
    """Whether the press finds nothing to score: lagkv needs sinks and two partitions."""
    return press == "lagkv-128" and PROMPTS[prompt] < 4 + 2 * 128


def states(prompts: list[str], layer: int) -> list[torch.Tensor]:
    """queries, keys, values of one layer, the prompts padded on the left to one batch. Pads hold what would win every
    comparison if it were looked at."""
    width = max(PROMPTS[prompt] for prompt in prompts)
    batch = []
    for name in ("queries", "keys", "values"):
        rows = [torch.from_numpy(array(f"{prompt}/{name}")[layer]) for prompt in prompts]
        batch.append(
            torch.stack([torch.nn.functional.pad(row, (0, 0, width - row.shape[1], 0), value=9.0) for row in rows])
        )
    return batch


def rotation(prompt: str, positions: torch.Tensor) -> Rotary:
    """How the prompt's model rotates columns at these positions (batch, columns)."""
    inv_freq = torch.from_numpy(array(f"{prompt}/inv_freq"))
    angles = (positions[..., None] * inv_freq).repeat(1, 1, 2)
    return Rotary(angles.cos(), angles.sin(), positions, inv_freq)


def output_projection(prompt: str, layer: int) -> torch.nn.Linear:
    weight = torch.from_numpy(array(f"{prompt}/o_proj")[layer])
    linear = torch.nn.Linear(*weight.shape, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear


def kept(method: str, options: dict, prompts: list[str], layer: int, budgets: list[int]) -> list[torch.Tensor]:
    """What our method keeps of one layer: bool (kv_heads, length) for each prompt of the batch."""
    options = dict(options)
    engine = {name: options.pop(name) for name in ("head_budget", "safeguard") if name in options}
    lengths = [PROMPTS[prompt] for prompt in prompts]
    queries, keys, values = states(prompts, layer)
    padding = torch.tensor([[max(lengths) - length] for length in lengths])
    rotary = rotation(prompts[0], torch.arange(max(lengths)) - padding)
    prompt = kvcompress.Prompt(
        place=layer,
        num_layers=array(f"{prompts[0]}/keys").shape[0],
        lengths=lengths,
        budgets=budgets,
        scaling=keys.shape[-1] ** -0.5,
        padding=padding if padding.any() else None,
        row_seeds=tuple(range(len(prompts))),
        module=SimpleNamespace(o_proj=output_projection(prompts[0], layer)),
        rotary=rotary,
        settings=Settings(**engine),
    )
    cluster = kvcompress.make_cluster(method, **options)
    if cluster.unrotated_queries:
        queries = rotary.unrotated(queries)
    indices = cluster.update_kv(queries, keys, values, prompt).indices
    columns = max(lengths)
    chosen = torch.zeros(*indices.shape[:2], columns + 1, dtype=torch.bool)
    chosen = chosen.scatter(2, indices.remainder(columns + 1), True)[..., :columns]
    return [row[:, columns - length :] for row, length in zip(chosen, lengths, strict=True)]


@pytest.mark.parametrize("press", SAME)
@pytest.mark.parametrize("prompt", ["qwen2-301", "llama-203"])  # the third stands in the padded batch
def test_the_kept_sets_are_those_of_kvpress(prompt, press):
    expected = recorded(prompt, press)
    assert expected or is_too_short(press, prompt)
    for entries, layers in expected.items():
        for layer, theirs in enumerate(layers):
            budget, rest = divmod(int(theirs.sum()), len(theirs))
            assert rest == 0, "kvpress keeps a whole number per head on average"
            (ours,) = kept(*SAME[press], [prompt], layer, [budget])
            assert torch.equal(ours, theirs), f"{press} {entries}: layer {layer}"


@pytest.mark.parametrize("press", SAME)
def test_the_kept_sets_in_a_padded_batch_are_those_of_kvpress(press):
    prompts = ["qwen2-150", "qwen2-301"]
    expected = [recorded(prompt, press) for prompt in prompts]
    assert all(expected) or is_too_short(press, prompts[0])
    for pair in zip(*(each.values() for each in expected), strict=False):
        for layer, theirs in enumerate(zip(*pair, strict=True)):
            budgets = [int(mask.sum()) // len(mask) for mask in theirs]
            ours = kept(*SAME[press], prompts, layer, budgets)
            assert all(map(torch.equal, ours, theirs)), f"{press} {budgets}: layer {layer}"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_h2o_sums_over_the_queries_that_see_a_key_are_kvpress_observed_attention(prompt):
    """H2O ranks the sums themselves, and keeps recent tokens; kvpress divides and keeps none."""
    for entries, layers in recorded(prompt, "observed-attention").items():
        for layer, theirs in enumerate(layers):
            queries, keys, values = states([prompt], layer)
            facts = kvcompress.Prompt(layer, len(layers), [PROMPTS[prompt]], [entries], keys.shape[-1] ** -0.5)
            sums = kvcompress.make_cluster("h2o", recent=0.0).score(queries, keys, values, facts)
            means = sums / torch.arange(PROMPTS[prompt], 0, -1)
            assert torch.equal(torch.zeros_like(theirs).scatter(1, means[0].topk(entries).indices, True), theirs)


@pytest.mark.parametrize(
    ("press", "window", "beta"),
    [("pyramidkv-64-5", 64, 20), ("pyramidkv-8-5", 8, 20), ("pyramidkv-8-5-beta-3", 8, 3)],
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_layers_of_a_pyramid_hold_what_they_do_in_kvpress(prompt, press, window, beta):
    rule = layer_budget("pyramid-kvpress")
    for entries, layers in recorded(prompt, press).items():
        ours = rule.fixed(entries, PROMPTS[prompt], len(layers), window, beta)
        assert ours == layers[:, 0].sum(-1).tolist(), entries
