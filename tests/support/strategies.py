"""What the property tests draw: a family, a model's heads, a padded batch with images, a method with options."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import kvcompress
from kvcompress.clusters.learned import LearnedKVCluster
from kvcompress.layer_budgets import list_layer_budgets
from kvcompress.policy.make import make_policy
from kvcompress.policy.policy import Policy
from kvcompress.scoring.merging import MERGES
from kvcompress.scoring.selection import ADAPTIVE
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES, Family

# `calibration` of a calibrated method is not drawn: `Case.calibration` provides the file.
# Token methods have their own tests. `METHODS=mine,snapkv pytest tests/kvcompress` draws only these.
LEARNED = sorted(name for name, info in kvcompress.list_methods().items() if issubclass(info.cls, LearnedKVCluster))
METHODS = sorted(filter(None, os.environ.get("METHODS", "").split(","))) or sorted(
    {name for name, info in kvcompress.list_methods().items() if issubclass(info.cls, kvcompress.KVCluster)}
    - {"full", *LEARNED}  # these need a checkpoint: tests/kvcompress/learned/
    - {"attention-matching"}  # keeps no subset: clusters/test_attention_matching.py
)
# Together they cover every path through the engine: position, window, layers that differ, adaptive heads, sums,
# measured budgets, merging, queries before RoPE, a second pass. For tests of what is the same for every method.
SOME_METHODS = ["adakv", "d2o", "expected-attention", "full", "h2o", "kvzip", "pyramidkv", "snapkv", "streamingllm"]
SOME_METHODS += ["vl-cache"]
TIED = {"compactor", "cur", "infinipot-v", "keydiff", "knorm", "leverage", "vnorm"}  # rounding decides between keys
SHARES, KERNELS, POOLINGS = [0.0, 0.5, 1.0], [1, 5], ["avg", "max"]
VOTES = {"window_size": [1, 8], "kernel_size": KERNELS, "pooling": POOLINGS}  # of an observation window
WIDE = {**VOTES, "window_size": [1, 8, 32]}
LONG = {**VOTES, "kernel_size": [1, 7]}
OPTIONS: dict[str, dict[str, list]] = {
    "adakv": {**WIDE, "kernel_size": [1, 7], "variant": ["paper", "kvpress"]},
    "hindsight": {"by": ["attention", "output"], "answer_tokens": [2, 5], "window_size": [1, 32]},
    "kvzip": {
        "chunk_size": [7, 2000], "sinks": [0, 4], "instruction": [(), (9, 11, 13)], "window_size": [1, 32],
        "variant": ["budget", "code"],
    },
    "kvcompose": {"window_size": [1, 32]},
    "look-m": {"recent": SHARES, "variant": ["paper", "effivlm"]},
    "prefixkv": {"sinks": [0, 4, 9], "distance": [1, 25]},
    "csp": {"recent": SHARES, "cross": [0.0, 0.1, 1.0], "recent_bias": [0.5, 1.0, 1.5]},
    "adamixkv": {**WIDE, "variant": ["code", "paper"]},
    "mixkv": {**WIDE, "variant": ["code", "paper"]},
    "meda": {"recent": SHARES, "variant": ["code", "paper"]},
    "aircache": {"alpha": [0.1, 0.9, 1.0]},
    "tgv-kv": {"sinks": [0, 4]},
    "infinipot-v": {"tar": SHARES, "recent": [0.0, 0.25], "frame_tokens": [0, 1, 4]},
    "vl-cache": {"recent": [0.0, 0.1], "variant": ["paper", "effivlm"]},
    "cake": {**WIDE, "pooling": ["avg"], "gamma": [0.0, 200.0], "tau1": [1.0], "tau2": [1.0, 2.0]},
    "sagekv": {"sinks": [0, 4], "recent": [0.0, 0.25, 0.5]},
    "simlayerkv": {"sinks": [0, 4], "lazy_threshold": [0.5, 0.9], "variant": ["budget"]},  # the others have no budget
    "r-kv": {
        "window_size": [1, 8], "kernel_size": [1, 7], "balance": [0.0, 0.1, 1.0], "similar": [0.2, 0.5],
        "variant": ["code", "paper"],
    },
    "d2o": {"recent": [0.0, 0.5], "sinks": [0, 4], "variant": ["code", "paper"]},
    "tova": {"variant": ["code", "kvpress"]},
    "vnorm": {"variant": ["code", "kvpress"]},
    "cam": {"recent": [0.0, 0.5], "followers": [1, 32]},
    "h2o": {"recent": SHARES, "variant": ["paper", "effivlm"]},
    "snapkv": {
        "window_size": [1, 4, 16, 32], "kernel_size": [1, 3, 7], "pooling": POOLINGS, "variant": ["paper", "effivlm"],
    },
    "streamingllm": {"sinks": [0, 4, 9], "variant": ["paper", "effivlm"]},
    "criticalkv": {**VOTES, "first_stage": SHARES, "epsilon": [0.0, 1e-4]},
    "defensivekv": {**VOTES, "mass": [0.0, 0.9, 1.0]},
    "dropkv": LONG,
    "kvcrush": {
        "window_size": [1, 16], "sinks": [0, 4], "recent": [0, 8], "representatives": [0.0, 0.25, 1.0],
        "anchor": ["alternating", "zeros"],
    },
    "expected-attention": {
        "sinks": [0, 4], "future": [1, 512], "covariance": [True, False], "epsilon": [0.0, 0.01],
        "window_size": [4, 128],
    },
    "leverage": {"sketch": [4, 48], "seed": [0, 7], "variant": ["exact", "kvpress"]},
    "non-causal-attention": {"chunk_size": [1, 5, 256], "variant": ["exact", "kvpress"]},
    "compactor": {
        "sinks": [0, 8], "recent": [0, 4], "chunk_size": [7, 256], "sketch": [4, 48], "blending": [None, 0.0, 0.5],
        "seed": [0, 7], "variant": ["exact", "kvpress"],
    },
    "morphkv": {"window_size": [1, 8], "fusion": ["max", "sum"]},
    "lava": LONG,
    "capkv": {"tau": [0.5, 5.0], "sinks": [0, 4], "future": [1, 512], "window_size": [4, 128]},
    "q-filters": {"recent": [0, 8]},
    "triattention": {"farthest": [1, 100, 65536], "group": ["max", "mean"]},
    "sparsemm": {**VOTES, "even": [0.1, 1.0]},
    "duoattention": {"sinks": [0, 4], "recent": [1, 8]},
    "finch": {"window_size": [1, 8], "normalize": [True, False]},
    "lagkv": {"sinks": [0, 4], "lag": [2, 8, 128]},
    "cur": {"sinks": [0, 4], "window_size": [0, 1, 16], "leverage": ["key", "value", "kv_avg", "kv_product"]},
    "chunkkv": {**VOTES, "chunk_size": [1, 5, 20]},
    "entropy-gated-chunkkv": {**VOTES, "chunk_size": [5, 10], "spiky_size": [1, 4]},
    "pyramidkv": {**VOTES, "pooling": ["avg"], "variant": ["paper", "kvpress", "effivlm"]},
    "random": {"seed": [0, 7], "window_size": [0, 8], "variant": ["paper", "effivlm"]},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A drawn configuration, and what it builds."""

    family: Family
    heads: tuple[int, int]
    lengths: tuple[int, ...]
    images: tuple[int, ...] | None
    method: str
    options: tuple[tuple[str, Any], ...]
    ratio: float
    seed: int

    @property
    def model(self) -> torch.nn.Module:
        return self.family.build(3, *self.heads)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return self.family.inputs(self.model, self.lengths, self.images, self.seed)

    @property
    def may_tie(self) -> bool:
        """Whether rounding decides which of two entries is kept.

        Two keys are always equally far from their mean, and have scores of 1 and -1 after standardising. For
        triattention it takes two query heads that disagree."""
        return self.method in ("keydiff", "leverage", "compactor", "triattention") and min(self.lengths) < 3

    @property
    def policy(self) -> Policy:
        return make_policy(self.method, self.ratio, **dict(self.options), **self.calibration)

    @property
    def calibration(self) -> dict[str, str]:
        """The option `calibration`, if the method needs it."""
        return calibration_of(self.method, self.model)

    @property
    def is_adaptive(self) -> bool:
        """Whether the KV heads of a row share one budget."""
        return self.policy.head_budget in ADAPTIVE

    @property
    def on_top(self) -> int:
        """Tokens that `ratio` does not count."""
        options = {"sinks": 4, **dict(self.options)}
        return options["sinks"] if (self.method, options.get("variant")) == ("kvzip", "code") else 0

    @property
    def is_uniform(self) -> bool:
        """Whether every layer has the same budget."""
        return self.policy.chosen("layer_budget") == "uniform"

    @property
    def unmerged(self) -> dict[str, str]:
        """Options that drop entries instead of merging them: only then does the result equal the full cache under a
        mask."""
        return {} if self.method == "full" else {"merge": "none", "merge_modality": "any"}

    def compress(self, **changes: object) -> kvcompress.Session:
        arguments = {"method": self.method, "ratio": self.ratio, **dict(self.options), **self.calibration, **changes}
        return kvcompress.compress(self.model, **arguments)


@st.composite
def cases(draw: st.DrawFn, family: str, method: str | None = None, max_batch: int = 3) -> Case:
    """Draw any batch with left padding, with and without images, any method with options, and any ratio."""
    chosen = FAMILIES[family]
    method = method or draw(st.sampled_from(METHODS))
    cls = kvcompress.list_methods()[method].cls
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=max_batch))
    images = None
    if chosen.is_vlm and draw(st.booleans()):
        images = tuple(draw(st.integers(0, 2)) for _ in lengths)
    options = {name: draw(st.sampled_from(values)) for name, values in OPTIONS.get(method, {}).items()}
    if method != "full" and draw(st.booleans()):
        options["head_budget"] = draw(st.sampled_from(["uniform", "shared", "adaptive", "adaptive-kvpress"]))
        options["safeguard"] = draw(st.sampled_from([0.0, 0.2, 1.0]))
    if method != "full" and draw(st.integers(0, 2)) == 0:
        chooses_at_once = cls.update_kv is not kvcompress.KVCluster.update_kv
        rules = list_layer_budgets().items()
        exact = [name for name, rule in rules if rule.is_exact and not (rule.is_measured and chooses_at_once)]
        options["layer_budget"] = draw(st.sampled_from(exact))
        options["pyramid_beta"] = draw(st.sampled_from([1.0, 3.0, 20.0]))
    if method != "full" and not cls.biases_keys and draw(st.integers(0, 3)) == 0:
        options["merge"] = draw(st.sampled_from(sorted(MERGES)))
        options["merge_modality"] = draw(st.sampled_from(["any", "same"]))
    return Case(
        family=chosen,
        heads=draw(st.sampled_from([(4, 2), (4, 1), (4, 4), (6, 2)])),
        lengths=tuple(lengths),
        images=images,
        method=method,
        options=tuple(options.items()),
        ratio=draw(st.sampled_from([0.02, 0.1, 0.3, 0.5, 0.77, 0.99])),
        seed=draw(st.integers(0, 1000)),
    )
