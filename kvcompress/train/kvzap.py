"""Training KVzap's surrogates on the scores of KVzip+. https://arxiv.org/abs/2601.07891

As in NVIDIA/kvpress at 8bb29b9, folder kvzap/. There the texts are 4,500 of nvidia/Nemotron-Pretraining-Dataset-sample,
and an MLP is trained in the model's precision, here in fp32."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from transformers import PreTrainedModel

from ..clusters.kvzap import KVzapKVCluster
from ..hooks.hidden_states import attention_layers
from ..learned.checkpoints import Weights, save_kvzap
from ..scoring.projection import output_projection
from .run import Run, progress
from .samples import REPEAT, Samples, agreement, chat_frame, check_layers, drawn, gather, plain_ids, shuffled
from .watching import attention_by, hidden_states

check = partial(check_layers, method="kvzap")
HELD_OUT = 20  # every 20th token
PENALTY = 1.0  # of the squared weights of a linear surrogate
CLIP = 1.0
BLOCK = 128  # queries at a time


@dataclass(frozen=True)
class Options:
    """What to train, and how.

    Attributes:
        kind: a linear map, fitted in closed form, or a two-layer MLP.
        pieces, length: how many pieces of the text to read, and their tokens.
        tokens: how many tokens of each piece to learn from.
        hidden: channels inside an MLP.
        epochs, batch, rate: of an MLP's training; the rate falls along a cosine.
    """

    kind: Literal["linear", "mlp"] = "mlp"
    pieces: PositiveInt = 128
    length: PositiveInt = 1000
    tokens: PositiveInt = 500
    hidden: PositiveInt = 512
    epochs: PositiveInt = 15
    batch: PositiveInt = 512
    rate: Annotated[float, Field(gt=0)] = 5e-3


def train(run: Run, options: Options) -> str:
    """Write the folder, and return a summary."""
    before, after = chat_frame(run.tokenizer)
    between = plain_ids(run.tokenizer, REPEAT) + after
    read = partial(kvzip_plus, run.decoder, before, between)

    def fed(tokens: int) -> int:
        return len(before) + len(between) + 2 * tokens

    samples, learned, checked = gather(run, read, fed, options.pieces, options.length, options.tokens, HELD_OUT)
    fit = fit_linear if options.kind == "linear" else partial(fit_mlp, options)
    layers = [{name: part.detach().cpu() for name, part in layer.items()} for layer in fit(run, samples, learned)]
    right = agreement(KVzapKVCluster(), layers, samples.at(checked))
    save_kvzap(layers, run.out)  # last: a folder that is there is not written again
    return (
        f"{options.kind} from {len(learned)} tokens; rank correlation with KVzip+ on {len(checked)} others: {right:.3f}"
    )


@torch.no_grad()
def kvzip_plus(decoder: PreTrainedModel, before: list[int], between: list[int], ids: list[int]) -> Samples:
    """Return the samples of a context `ids` that is repeated in a chat, with the logarithms of its KVzip+ scores.

    The score of an entry is the most that a token of the repetition attends to it, times the norm of its projected
    value, by the norm of the token's hidden state; the largest of a KV head's query heads counts."""
    context = slice(len(before), len(before) + len(ids))
    chat = torch.tensor([[*before, *ids, *between, *ids]], device=decoder.device)
    again = slice(chat.shape[1] - len(ids), chat.shape[1])
    modules = attention_layers(decoder)
    scores: dict[int, torch.Tensor] = {}

    def score(attend, module, query, key, value, mask, scaling=None, **kwargs):
        index, heads = module.layer_idx, key.shape[1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        norms = hidden[index].float().norm(dim=-1)
        most = most_attended(query[0], key[0], scale, norms, context, again)
        projection = output_projection(module, heads, value.shape[-1], "kvzap")
        values = value[0, :, context].float()
        sizes = torch.stack([(values @ of_group).norm(dim=-1) for of_group in projection], 1)
        # A weight that fp32 rounds to zero has no logarithm.
        scores[index] = (most * sizes).amax(1).clamp(min=torch.finfo(torch.float32).tiny).log()
        return attend(module, query, key, value, mask, scaling=scaling, **kwargs)

    with hidden_states(decoder) as hidden, attention_by(decoder, score):
        decoder(input_ids=chat, use_cache=False)
    return Samples(
        torch.stack([hidden[index][context] for index in sorted(modules)]),
        torch.stack([scores[index] for index in sorted(modules)]),
    )


def most_attended(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, norms: torch.Tensor, context: slice, again: slice
) -> torch.Tensor:
    """Return the largest attention weight, divided by the query's norm, from tokens `again` to each of `context`.

    `queries` are (heads, tokens, head_dim), `keys` (kv_heads, tokens, head_dim), `norms` (tokens,); returns (kv_heads,
    groups, context), in fp32."""
    column = torch.arange(keys.shape[1], device=keys.device)
    best = torch.zeros((), device=keys.device)
    for start in range(again.start, again.stop, BLOCK):
        rows = slice(start, min(start + BLOCK, again.stop))
        grouped = queries[:, rows].float().unflatten(0, (len(keys), -1))
        logits = grouped @ keys[:, None].float().mT * scaling
        weights = logits.masked_fill(column > column[rows, None], -torch.inf).softmax(-1)[..., context]
        best = torch.maximum(best, (weights / norms[rows, None]).amax(2))
    return best


def fit_linear(run: Run, samples: Samples, learned: torch.Tensor) -> list[Weights]:
    """Fit each layer's linear map by ridge regression, in fp64."""
    device = run.model.device if run.model.device.type != "mps" else torch.device("cpu")  # MPS has no fp64
    layers = []
    with progress("fitting", len(samples.hidden)) as bar:
        for hidden, scores in zip(samples.hidden, samples.scores, strict=True):
            x, y = hidden[learned].to(device).double(), scores[:, learned].to(device).double().T
            x_mean, y_mean = x.mean(0), y.mean(0)
            x, y = x - x_mean, y - y_mean
            penalty = PENALTY * torch.eye(x.shape[1], dtype=x.dtype, device=device)
            weight = torch.linalg.solve(x.T @ x + penalty, x.T @ y).T
            layers.append({"weight": weight.float(), "bias": (y_mean - weight @ x_mean).float()})
            bar.update()
    return layers


def fit_mlp(options: Options, run: Run, samples: Samples, learned: torch.Tensor) -> list[Weights]:
    """Fit all layers' MLPs together by AdamW on the mean squared error."""
    size, heads, device = samples.hidden.shape[2], samples.scores.shape[1], run.model.device
    draw = torch.Generator().manual_seed(run.seed)

    layers = [
        {
            "0.weight": drawn(draw, size, options.hidden, size),
            "0.bias": drawn(draw, size, options.hidden),
            "2.weight": drawn(draw, options.hidden, heads, options.hidden),
            "2.bias": drawn(draw, options.hidden, heads),
        }
        for _ in samples.hidden
    ]
    layers = [{name: part.to(device).requires_grad_() for name, part in layer.items()} for layer in layers]
    cluster, per_epoch = KVzapKVCluster(), math.ceil(len(learned) / options.batch)

    def loss_of(step: int) -> torch.Tensor:
        batch = samples.at(learned[shuffled(run.seed, step, len(learned), options.batch, per_epoch)], device)
        squared = [
            (cluster.scores_of(hidden[None], weights)[0] - scores).square().mean()
            for hidden, scores, weights in zip(batch.hidden, batch.scores, layers, strict=True)
        ]
        return torch.stack(squared).mean()

    def rate(step: int) -> float:
        return options.rate * (1 + math.cos(math.pi * (step // per_epoch) / options.epochs)) / 2

    run.descend(layers, torch.optim.AdamW, loss_of, rate, options.epochs * per_epoch, CLIP)
    return layers
