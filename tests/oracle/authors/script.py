"""What the scripts share: the prompts that they record, and the fixture that each writes when it is run."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import recording
from .recording import Recording
from .states import NAMES, cases, states

Recordings = Iterator[Recording]


def run(
    recordings: Callable[[Path], Iterable[Any]],
    repository: str,
    functions: str,
    version: str | None = None,
    save: Callable[[str, list, dict[str, str]], None] = recording.save,
) -> None:
    """Write the fixture of the script that was started: `recordings` of the checkout that its argument names."""
    checkout, name = Path(sys.argv[1]).resolve(), sys.modules["__main__"].__spec__.name.rpartition(".")[2]
    save(name, list(recordings(checkout)), recording.source(repository, checkout, functions, version))


def prompts(names: Sequence[str] = NAMES) -> Iterator[tuple[str, int, int]]:
    """The name of states, a prompt and a budget: all cases of these states."""
    for name in names:
        for prompt, budget in cases(name):
            yield name, prompt, budget


def of_layers(keep: Callable[..., torch.Tensor], name: str, prompt: int) -> torch.Tensor:
    """bool (layers, kv_heads, prompt), of what `keep(place, queries, keys, values)` says of each layer of a prompt."""
    given = states(name)
    return torch.stack([keep(place, *given.layer(place, slice(0, prompt))) for place in range(given.layers)])
