"""Parts of a released file, run without the rest of it."""

import __future__

import ast
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from .states import States


def definitions(
    path: Path, *names: str, constants: Mapping[int, int] | None = None, **given: object
) -> dict[str, Callable]:
    """Classes and functions of a file by their names, with torch's usual names and `given` to run in.

    `constants` takes the place of numbers that the file has written out for one model, such as 576 tokens of an image.
    """
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if getattr(node, "name", None) in names]
    return _run(path, found, constants or {}, given)


def branch(
    path: Path, condition: str, constants: Mapping[int, int] | None = None, **given: object
) -> dict[str, object]:
    """Run the one `if` statement of a file whose condition is this, and return its names. `constants` as above."""
    (found,) = (
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.If) and ast.unparse(n.test) == condition
    )
    return _run(path, [found], constants or {}, given)


def _run(path: Path, nodes: list[ast.stmt], constants: Mapping[int, int], given: Mapping[str, object]) -> dict:
    module = ast.Module(nodes, type_ignores=[])
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            node.value = constants.get(node.value, node.value)
    usual = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math, "np": np}
    names = {"__name__": path.stem, "print": lambda *args, **kwargs: None, **usual, **given}
    flags = __future__.annotations.compiler_flag  # types of another library's version are not looked up
    exec(compile(module, str(path), "exec", flags), names)
    return names


def repeat_kv(states: torch.Tensor, groups: int) -> torch.Tensor:
    """In place of transformers': every KV head for each of its query heads."""
    return states.repeat_interleave(groups, 1)


def attention(queries: torch.Tensor, keys: torch.Tensor, softmax: bool = True) -> torch.Tensor:
    """A prompt's causal attention (1, heads, tokens, tokens) in double precision, so that nothing that the authors'
    code adds to its sums rounds them away; before the softmax if not `softmax`."""
    groups = queries.shape[1] // keys.shape[1]
    logits = queries.double() @ keys.double().repeat_interleave(groups, 1).transpose(2, 3) / keys.shape[3] ** 0.5
    logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) if softmax else logits


def of_kv_heads(weights: torch.Tensor, given: States) -> torch.Tensor:
    """The mean of each KV head's query heads, for code that knows no groups."""
    return weights.unflatten(1, (-1, given.groups)).mean(2)
