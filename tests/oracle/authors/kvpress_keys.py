"""NVIDIA/kvpress, the home of KeyDiff, CurDKV and expected attention: its presses that score, also with statistics from
elsewhere, its PyramidKVPress, whose layers are SnapKV's, and its AdaKVPress, over SnapKV and over any of them. Further
settings are recorded on drawn states alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from . import presses
from .released import definitions
from .script import Recordings, run
from .states import NAMES, RANDOM, states

KVPRESS = {"variant": "kvpress"}
SNAPKV = {"window_size": 8, "kernel_size": 5}
ADAPTIVE = {"head_budget": "adaptive-kvpress"}
SMALL = (*RANDOM, "tiny")  # states whose covariances are a small file

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    theirs = presses.load(checkout, "keydiff", "cur", "tova", "expected_attention", "snapkv", "pyramidkv", "adakv")
    keydiff, cur, tova, expected, snapkv, pyramid, adakv = (
        theirs[f"{name}Press"]
        for name in ("KeyDiff", "CUR", "TOVA", "ExpectedAttention", "SnapKV", "PyramidKV", "AdaKV")
    )
    value_norm = {"leverage_type": "value", "use_local_approximation": False, "num_sinks": 0}
    scored = [("keydiff", {}, keydiff), ("cur", {}, cur)]
    pyramids = [
        (label, {**KVPRESS, "window_size": 8, "pyramid_beta": float(beta)}, partial(pyramid, **SNAPKV, beta=beta))
        for label, beta in (("pyramidkv, variant=kvpress", 20), ("pyramidkv, variant=kvpress, pyramid_beta=3", 3))
    ]
    further = [
        ("tova, variant=kvpress", KVPRESS, tova),
        ("vnorm, variant=kvpress", KVPRESS, partial(cur, **value_norm)),
        ("cur, leverage=key", {"leverage": "key"}, partial(cur, leverage_type="key")),
        (
            "cur, leverage=kv_avg, window_size=10",
            {"leverage": "kv_avg", "window_size": 10},
            partial(cur, leverage_type="kv_avg", local_window_size=10),
        ),
        ("cur, window_size=0", {"window_size": 0}, partial(cur, use_local_approximation=False)),
        ("cur, head_budget=adaptive-kvpress", ADAPTIVE, lambda: adakv(cur())),
        ("keydiff, head_budget=adaptive-kvpress", ADAPTIVE, lambda: adakv(keydiff())),
        ("adakv, variant=kvpress", {**KVPRESS, **SNAPKV, "pooling": "avg"}, lambda: adakv(snapkv(**SNAPKV))),
        ("snapkv, safeguard=0.5", {**ADAPTIVE, **SNAPKV, "safeguard": 0.5}, lambda: adakv(snapkv(**SNAPKV), 0.5)),
    ]
    unrotated = [
        ("expected-attention", {}, expected),
        ("expected-attention, epsilon=0.01", {"epsilon": 0.01}, partial(expected, epsilon=0.01)),
        (
            "expected-attention, covariance=False, future=64",
            {"covariance": False, "future": 64},
            partial(expected, use_covariance=False, n_future_positions=64),
        ),
        (
            "expected-attention, epsilon=0.01, head_budget=adaptive-kvpress",
            {"epsilon": 0.01, **ADAPTIVE},
            lambda: adakv(expected(epsilon=0.01)),
        ),
    ]
    for runs, names, options in (
        (scored, NAMES, {}),
        (pyramids, NAMES, {"rest": 0.0}),
        (further, RANDOM, {}),
        (unrotated, RANDOM, {"unrotated": True}),
    ):
        yield from presses.record(runs, names=names, **options)
    file, name = checkout / "kvpress/presses/expected_attention_with_stats.py", "ExpectedAttentionStatsPress"
    plain = {"dataclass": lambda cls: cls, "field": lambda **_: None}  # its parent is one
    found = definitions(file, name, ExpectedAttentionPress=expected, **plain)
    yield from with_statistics(found[name])


def with_statistics(expected: type) -> Recordings:
    """The statistics are those of the states' prompt before RoPE, without its first 4 tokens."""
    for name in SMALL:
        given = states(name)
        before = given.rotary(slice(0, given.prompt)).unrotated(given.queries[:, :, : given.prompt])[:, :, 4:]
        mean = before.mean(2)
        centred = before - mean[:, :, None]
        known = {"mean": mean, "covariance": centred.mT @ centred / (before.shape[2] - 1)}

        def make(known: dict[str, torch.Tensor] = known) -> object:
            press = expected()
            press.mu, press.cov = known.values()
            return press

        for recording in presses.record([("expected-attention, calibration=", {}, make)], rest=0.5, names=[name]):
            yield replace(recording, known=known)


if __name__ == "__main__":
    functions = "KeyDiffPress, CURPress, TOVAPress, ExpectedAttentionPress, ExpectedAttentionStatsPress, "
    functions += "PyramidKVPress, AdaKVPress over SnapKVPress"
    run(recordings, "NVIDIA/kvpress", f"presses: {functions}")
