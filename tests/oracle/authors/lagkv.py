"""AI-Lab-China-Merchants-Bank/LagKV: its cache, whose ratio is that of a compressed partition. What it then holds is
our budget."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .script import Recordings, run
from .states import NAMES, RATIOS, States, states

SETTINGS = (
    ("lagkv", 16, 1024, {}),
    ("lagkv, lag 64", 16, 64, {"lag": 64}),
    ("lagkv, lag 20", 4, 20, {"lag": 20, "sinks": 4}),
)

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    sys.path.insert(0, str(checkout))
    from lag_kv import LagKV

    for name in NAMES:
        given = states(name)
        for label, sinks, lag, options in SETTINGS:
            for ratio in RATIOS:
                kept = _kept(LagKV, given, given.prompt, ratio, sinks, lag)
                budget = int(kept[0, 0].sum())
                yield Recording(label, "lagkv", options, name, given.prompt, budget, kept)


def _kept(cache_class: type, given: States, prompt: int, ratio: float, sinks: int, lag: int) -> torch.Tensor:
    kept = []
    for place in range(given.layers):
        _, keys, values = given.layer(place, slice(0, prompt))
        cache = SimpleNamespace(ratio=ratio, sink_size=sinks, lag_size=lag, score_v_ratio=1.0, use_then_compress=True)
        cache._compressed_len, cache.key_cache, cache.value_cache = [sinks], [keys.clone()], [values.clone()]
        for name in ("_get_states_score", "_compress_algo", "_compress_kv_by_lag"):
            setattr(cache, name, getattr(cache_class, name).__get__(cache))
        cache._compress_kv_by_lag(0)
        kept.append(kept_columns(cache.key_cache[0][0], keys[0]))
    return torch.stack(kept)


if __name__ == "__main__":
    run(recordings, "AI-Lab-China-Merchants-Bank/LagKV", "lag_kv.py: LagKV._compress_kv_by_lag")
