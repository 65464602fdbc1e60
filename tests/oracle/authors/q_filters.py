"""NathanGodey/qfilters: the filters of make_filters.py, and what the cache of src/hf_cache.py keeps by them. Each of
the states is calibrated on its own prompt."""

import ast
from pathlib import Path
from unittest import mock

import torch

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, run
from .states import NAMES, States, cases, states

MAKE, CACHE = "make_filters.py", "src/hf_cache.py"
LABELS = {"q-filters": 0, "q-filters, recent=64": 64}

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    theirs = definitions(checkout / CACHE, "QFiltersCache", Cache=object, Dict=dict, QFilters=None, **_TYPES)
    for name in NAMES:
        given = states(name)
        filters = made(checkout, given)
        for prompt, budget in cases(name):
            for label, window in LABELS.items():
                if not window < budget < prompt:
                    continue
                kept = []
                for place in range(given.layers):
                    _, keys, values = given.layer(place, slice(0, prompt))
                    cache = theirs["QFiltersCache"].__new__(theirs["QFiltersCache"])
                    cache.key_cache, cache.value_cache, cache.q_filters = [], [], filters[place : place + 1]
                    cache.max_length, cache.window_length = budget, window
                    kept.append(kept_columns(cache.update(keys, values, 0)[0][0], keys[0]))
                options = {"recent": window} if window else {}
                known = {"filters": -filters}  # theirs point away from the queries
                yield Recording(label, "q-filters", options, name, prompt, budget, torch.stack(kept), known=known)


_TYPES = {name: dict for name in ("Any", "List", "Optional", "Tuple", "Union")}


def made(checkout: Path, given: States) -> torch.Tensor:
    """Their filters (layers, kv_heads, head_dim), of all queries of the prompt: none is left out by chance."""
    tree = ast.parse((checkout / MAKE).read_text())
    (loop,) = (n for n in ast.walk(tree) if isinstance(n, ast.For) and "svd_filters" in ast.unparse(n.iter))
    queries = [layer[:, : given.prompt].clone() for layer in given.queries]
    names = {
        "torch": torch,
        "svd_filters": [[layer] for layer in queries],
        "num_svd_samples": given.prompt,
        "num_k_heads": given.keys.shape[1],
    }
    torch.manual_seed(0)
    with mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
        exec(compile(ast.Module([loop], []), MAKE, "exec"), names)
    return torch.stack(names["svd_filters"])


if __name__ == "__main__":
    functions = f"{MAKE}: the loop over svd_filters; {CACHE}: QFiltersCache.update"
    run(recordings, "NathanGodey/qfilters", functions)
