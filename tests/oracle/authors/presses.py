"""The presses of kvpress and its forks without the rest of it, over the recorded states."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .script import Recordings, of_layers, prompts
from .states import NAMES, States, states

Run = tuple[str, dict[str, object], Callable[[], object]]  # label, our options, what makes their press


def load(checkout: Path, *names: str, stand_ins: Mapping[str, object] | None = None) -> dict[str, object]:
    """What the files `<name>_press.py` define, with `stand_ins` for other modules of the package, whose own `__init__`
    wants other libraries."""
    for name in ("kvpress", "kvpress.presses"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    utils = sys.modules["kvpress.utils"] = ModuleType("kvpress.utils")
    utils.compute_n_kept = lambda length, ratio: int(length * (1 - ratio))
    utils.extract_keys_and_values = None
    utils.get_prerope_query_states = lambda module, hidden: module.queries[:, :, hidden[0, :, 0].long()]
    utils.get_prerope_key_states = lambda module, hidden: module.keys[:, :, hidden[0, :, 0].long()]
    sys.modules.update({f"kvpress.{name}": module for name, module in (stand_ins or {}).items()})
    found = {}
    for name in names:
        found |= vars(import_module(f"kvpress.presses.{name}_press"))
    return found


def rotary_emb(given: States) -> Callable:
    """A model's rotary embedding: cos and sin of positions (1, tokens)."""

    def rotate(_: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[..., None] * given.inv_freq).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    rotate.inv_freq = given.inv_freq
    return rotate


def compress(press: object, given: States, place: int, prompt: int, unrotated: bool = False) -> tuple:
    """The keys (kv_heads, kept, head_dim) that a press leaves of a layer's prompt, and the module that it was given.

    Hidden states are the tokens' numbers. Queries are rotated already, and cos is 1 and sin 0, unless they are asked
    for `unrotated`.
    """
    tokens = slice(0, prompt)
    queries, keys, values = given.layer(place, tokens)
    heads, head_dim = queries.shape[1], keys.shape[-1]
    module = SimpleNamespace(
        config=SimpleNamespace(
            num_hidden_layers=given.layers, num_attention_heads=heads, num_key_value_heads=keys.shape[1],
            head_dim=head_dim, hidden_size=heads * head_dim, _attn_implementation="sdpa",
        ),
        head_dim=head_dim,
        num_key_value_groups=given.groups,
        layer_idx=place,
        queries=given.rotary(tokens).unrotated(queries) if unrotated else queries,
        keys=given.rotary(tokens).unrotated(keys),
        rotary_emb=rotary_emb(given),
        o_proj=SimpleNamespace(weight=given.o_proj[place]),
        masked_key_indices=None,
    )  # fmt: skip
    hidden = torch.arange(prompt, dtype=torch.float32)[None, :, None]
    rotation = (torch.ones(1, prompt, head_dim), torch.zeros(1, prompt, head_dim))
    stays, _ = press.compress(module, hidden, keys, values, None, {"position_embeddings": rotation})
    return stays[0], module


def kept_by(press: object, name: str, prompt: int, unrotated: bool = False) -> torch.Tensor:
    """bool (layers, kv_heads, prompt): what a press keeps of states."""

    def keep(place: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        stays, module = compress(press, states(name), place, prompt, unrotated)
        kept = kept_columns(stays, keys[0])
        if module.masked_key_indices is not None:
            _, head, column = module.masked_key_indices
            kept[head, column] = False
        return kept

    return of_layers(keep, name, prompt)


def set_size(press: object, prompt: int, budget: int, rest: float = 1e-3) -> None:
    """Presses keep int((1 - ratio) * length): `rest` is what is rounded down. Some have another press inside."""
    getattr(press, "press", press).compression_ratio = 1 - (budget + rest) / prompt


def record(
    runs: Sequence[Run], window: int = 0, rest: float = 1e-3, unrotated: bool = False, names: Sequence[str] = NAMES
) -> Recordings:
    """Every run of every prompt with a budget below it and above the observation window: the option, or `window`."""
    for name, prompt, budget in prompts(names):
        for label, options, make in runs:
            if options.get("window_size", window) < budget < prompt:
                set_size(press := make(), prompt, budget, rest)
                kept = kept_by(press, name, prompt, unrotated)
                yield Recording(label, label.split(",")[0], options, name, prompt, budget, kept)
