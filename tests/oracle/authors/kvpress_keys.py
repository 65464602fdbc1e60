"""NVIDIA/kvpress, the home of these methods, at a newer commit than the recordings of `test_kvpress.py`: scores and
`ScorerPress`'s choice by them."""

import ast
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns, save
from .states import NAMES, cases, states

PRESSES = {
    "keydiff": ("keydiff_press.py", SimpleNamespace()),
    "cur": (
        "cur_press.py",
        SimpleNamespace(
            num_sinks=4,
            leverage_type="kv_product",
            use_random_leverage=False,
            use_local_approximation=True,
            local_window_size=16,
        ),
    ),
}

DIFFERENCES: dict[str, tuple[float, str]] = {}


def main() -> None:
    checkout = Path(sys.argv[1])
    compress = _function(checkout, "scorer_press.py", "compress")
    recordings = []
    for method, (file, press) in PRESSES.items():
        score = _function(checkout, file, "score")
        press.score = lambda *args, score=score, press=press: score(press, *args)
        for name in NAMES:
            for prompt, budget in cases(name):
                if budget > prompt:
                    continue  # a ratio cannot be negative
                press.compression_ratio, kept = 1 - (budget + 0.5) / prompt, []
                for place in range(states(name).layers):
                    _, keys, values = states(name).layer(place, slice(0, prompt))
                    module = SimpleNamespace(head_dim=keys.shape[-1])
                    stays, _ = compress(press, module, None, keys, values, None, {})
                    kept.append(kept_columns(stays[0], keys[0]))
                recordings.append(Recording(method, method, {}, name, prompt, budget, torch.stack(kept)))
    functions = "presses/keydiff_press.py, cur_press.py: score; scorer_press.py: ScorerPress.compress"
    save("kvpress_keys", recordings, "NVIDIA/kvpress", checkout, functions)


def _function(checkout: Path, file: str, name: str) -> object:
    """A method of the file's class: what the file imports wants an older transformers."""
    tree = ast.parse((checkout / "kvpress/presses" / file).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    known = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}
    exec(compile(ast.Module(found, []), file, "exec"), known)
    return known[name]


if __name__ == "__main__":
    main()
