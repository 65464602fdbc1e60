"""AIoT-MLSys-Lab/D2O: its cache and the ratios of its layers. It first compresses with the first decoded token, which
is here the prompt's last. It knows no grouped queries: KV heads have the mean weights of theirs."""

import ast
from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording
from .script import Recordings, prompts, run
from .states import DECODED, States, states
from .stepping import attention, behind, grouped, passes

HEAD_DIM = 128  # their cache knows no other, nor another number of heads than 32
STEPS = 8
ALONE = (("random_mha", 100, 12), ("random_gqa", 100, 11))

LAYERS = (
    "a layer's size is rounded down twice, and its variance lacks the last token; their threshold is one for all "
    "heads, and they merge the n-th evicted entry of all heads or of none"
)
DIFFERENCES = {"d2o/": (0.92, LAYERS)}


class Torch:
    """torch, whose `full` fits any number of heads, and which remembers what was joined: the kept entries."""

    joined: torch.Tensor | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def full(self, shape: tuple[int, ...], value: float) -> torch.Tensor:
        return torch.tensor(value)

    def cat(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        self.joined = torch.cat(parts, dim)
        return self.joined


def recordings(checkout: Path) -> Recordings:
    folder = checkout / "LLM_merge_new/LMEval_kv_token_merge"
    attention_file, model_file = (
        ast.parse((folder / name).read_text()) for name in ("modeling_llama3_7b_13b_d2o.py", "modeling_llama3_new.py")
    )
    found = [node for node in attention_file.body if getattr(node, "name", "") == "D2O_LayerKVCache"]
    of_theirs = Torch()
    theirs = {"torch": of_theirs, "nn": torch.nn, "print": lambda *args: None}
    exec(compile(ast.Module(found, []), "modeling_llama3_7b_13b_d2o.py", "exec"), theirs)
    cache_class = theirs["D2O_LayerKVCache"]
    measure = _branch(attention_file, "attn_variance", "q_len")
    share = _branch(model_file, "dynamic_layer_ratios", "multimodal_entropy")

    def held(given: States, place: int, ratio: tuple[float, float], prompt: int, decoded: int) -> tuple:
        return _held(cache_class, of_theirs, given, place, ratio, prompt, decoded)

    def columns_kept(columns: torch.Tensor, tokens: int) -> torch.Tensor:
        return torch.zeros(len(columns), tokens, dtype=torch.bool).scatter(1, columns, True)

    for name, prompt, budget in prompts():
        if budget >= prompt or budget < 16:
            continue  # they want four sinks and as many recent tokens in each layer
        given = states(name)
        ratios = _ratios(measure, share, given, prompt, budget)
        for decoded in (0, DECODED):
            layers = [held(given, place, (r / 2, r / 2), prompt, decoded)[2] for place, r in enumerate(ratios)]
            kept = torch.stack([columns_kept(columns, prompt + decoded) for columns in layers])
            options = {"decode_budget": budget} if decoded else {}
            yield Recording("d2o", "d2o", options, name, prompt, budget, kept, decoded)
    for name, prompt, budget in ALONE:
        given, ratio = states(name), ((budget - budget // 2 + 0.5) / prompt, (budget // 2 + 0.5) / prompt)
        for decoded in (0, STEPS):
            places = [
                [held(_alone(given, head), place, ratio, prompt, decoded) for head in range(given.keys.shape[1])]
                for place in range(given.layers)
            ]
            kept, keys, values = (
                torch.stack([torch.stack([head[part][0] for head in heads]) for heads in places]) for part in (2, 0, 1)
            )
            kept = torch.stack([columns_kept(columns, prompt + decoded) for columns in kept])
            options = {"layer_budget": "uniform", **({"decode_budget": budget} if decoded else {})}
            label = "d2o, each head alone"
            asked = (label, "d2o", options, name, prompt, budget)
            yield Recording(*asked, kept, decoded, keys=keys, values=values)


def _branch(tree: ast.Module, assigned: str, asked: str) -> object:
    """The code of the `if` that asks for one name and sets another."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and asked in ast.unparse(node.test)
        and any(isinstance(name, ast.Name) and name.id == assigned for name in ast.walk(node))
    ]
    return compile(ast.Module(found[:1], []), "forward", "exec")


def _ratios(measure: object, share: object, given: States, prompt: int, budget: int) -> list[float]:
    """The layers' parts of the prompt that are kept, heavy hitters and recent tokens together."""
    attentions = []
    for place in range(given.layers):
        queries, keys, _ = given.layer(place, slice(0, prompt - 1))
        mine = SimpleNamespace(uniform_hh_ratio=budget / prompt / 2, uniform_recent_ratio=budget / prompt / 2)
        exec(measure, {"self": mine, "q_len": prompt - 1, "attn_weights": attention(queries, keys)})
        attentions.append(mine)
    layers = [SimpleNamespace(self_attn=mine) for mine in attentions]
    model = SimpleNamespace(layers=layers, config=SimpleNamespace(num_hidden_layers=given.layers))
    exec(share, {"self": model, "torch": torch})
    return [float(mine.layer_hh_ratio + mine.layer_recent_ratio) for mine in attentions]


def _held(cache_class, torch_of_theirs, given, place, ratio, prompt, decoded) -> tuple[torch.Tensor, ...]:
    """Keys, values (heads, kept, head_dim) and columns (heads, kept) of one layer's cache."""
    heads, head_dim = given.keys.shape[1], given.keys.shape[3]
    cache, past, columns = cache_class(hh_ratio=ratio[0], recent_ratio=ratio[1]), None, torch.zeros(heads, 0).long()
    for queries, keys, values in passes(given, place, prompt, decoded):
        first = columns.max().item() + 1 if columns.numel() else 0
        columns = torch.cat([columns, torch.arange(first, first + keys.shape[2]).expand(heads, -1)], 1)
        past = behind(past, *(torch.nn.functional.pad(x, (0, HEAD_DIM - head_dim)) for x in (keys, values)))
        weights = grouped(attention(queries, past[0][..., :head_dim]), heads)
        torch_of_theirs.joined = None
        past = cache(past, weights[0].sum(1), *ratio, prompt - 1)
        if torch_of_theirs.joined is not None:
            columns = columns.gather(1, torch_of_theirs.joined)
    return past[0][0, ..., :head_dim], past[1][0, ..., :head_dim], columns


def _alone(given: States, head: int) -> States:
    """One KV head with its query heads, twice: of a single one their code loses a dimension."""
    rows = {"keys": given.keys[:, [head, head]], "values": given.values[:, [head, head]]}
    queries = given.queries[:, head * given.groups : (head + 1) * given.groups]
    return States(**{**vars(given), **rows, "queries": queries.repeat(1, 2, 1, 1)})


if __name__ == "__main__":
    functions = (
        "LMEval_kv_token_merge/modeling_llama3_7b_13b_d2o.py: D2O_LayerKVCache, the variance in "
        "LlamaAttention3_D2O.forward; modeling_llama3_new.py: the layers' ratios in LlamaModel.forward"
    )
    run(recordings, "AIoT-MLSys-Lab/D2O", functions)
