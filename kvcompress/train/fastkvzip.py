"""Training Fast KVzip's gates on the scores of KVzip. https://arxiv.org/abs/2601.17668

As in Janghyun1230/FastKVzip at 7d78b34: prefill/feature.py, optim.py. There the texts are 34 of FineWeb-Edu, of which
all million tokens are learned from, and projections are trained in the model's precision, here in fp32. The script adds
a gate's bias twice while training and once in use; here it is added once in both."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from transformers import DynamicCache, PreTrainedModel

from ..cache_name import CACHE
from ..clusters.fastkvzip import FastKVzipKVCluster
from ..learned.checkpoints import Weights, save_fastkvzip
from ..scoring.rereading import received
from .run import Run
from .samples import REPEAT, Samples, agreement, chat_frame, check_layers, drawn, gather, plain_ids, shuffled
from .watching import attention_by, hidden_states

check = partial(check_layers, method="fastkvzip")
HELD_OUT = 100  # every 100th token
CHUNK = 2000  # tokens that are repeated at a time
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "
FROM = 8  # tokens of the chunk before, named in it
TASK = "Given the context, answer to the following question or request without explanation.\n\n"
MOMENTUM = 0.9


@dataclass(frozen=True)
class Options:
    """What to train, and how.

    Attributes:
        pieces, length: how many pieces of the text to read, and their tokens.
        tokens: how many tokens of each piece to learn from.
        size, sinks: channels of a gate's small queries and keys, and its learned sink keys.
        steps, batch, rate: of the gradient descent; the rate is halved after half of the steps and after three
            quarters.
    """

    pieces: PositiveInt = 32
    length: PositiveInt = 16000
    tokens: PositiveInt = 4000
    size: PositiveInt = 16
    sinks: PositiveInt = 16
    steps: PositiveInt = 5000
    batch: PositiveInt = 1000
    rate: Annotated[float, Field(gt=0)] = 0.2


def train(run: Run, options: Options) -> str:
    """Write the file, and return a summary."""
    before, after = chat_frame(run.tokenizer)
    before = before + plain_ids(run.tokenizer, TASK)
    asked = [plain_ids(run.tokenizer, text) for text in (REPEAT, REPEAT_FROM)]
    read = partial(kvzip, run.decoder, before, asked, after)

    def fed(tokens: int) -> int:
        is_cut = tokens > CHUNK
        again = len(asked[is_cut]) + FROM * is_cut + len(after) + min(tokens, CHUNK)
        return len(before) + tokens + again

    samples, learned, checked = gather(run, read, fed, options.pieces, options.length, options.tokens, HELD_OUT)
    fitted = fit(run, options, samples, learned)
    layers = [{name: part.detach().cpu() for name, part in layer.items()} for layer in fitted]
    right = agreement(FastKVzipKVCluster(), layers, samples.at(checked))
    save_fastkvzip(layers, run.out)
    return f"gates from {len(learned)} tokens; rank correlation with KVzip on {len(checked)} others: {right:.3f}"


@torch.no_grad()
def kvzip(
    decoder: PreTrainedModel, before: list[int], asked: list[list[int]], after: list[int], ids: list[int]
) -> Samples:
    """Return the samples of a context `ids` with its KVzip scores.

    The context is read in a chat, then repeated chunk by chunk. `asked` are the request for the first chunk and that
    for each later one, which ends with the last tokens of the chunk before."""
    cache, device = DynamicCache(config=decoder.config), decoder.device
    with hidden_states(decoder) as hidden:
        decoder(input_ids=torch.tensor([[*before, *ids]], device=device), use_cache=True, **{CACHE: cache})
    states = torch.stack([hidden[index][len(before) :].cpu() for index in sorted(hidden)])
    scores: dict[int, list[torch.Tensor]] = {index: [] for index in sorted(hidden)}
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        request = asked[0] if not start else asked[1] + ids[start - FROM : start]
        fed = torch.tensor([[*request, *after, *chunk]], device=device)
        scored = slice(len(before) + start, len(before) + start + len(chunk))
        with attention_by(decoder, partial(_score, scores, len(before), scored)):
            decoder(input_ids=fed, use_cache=True, **{CACHE: cache})
        cache.crop(-fed.shape[1])
    return Samples(states, torch.stack([torch.cat(parts, 1) for parts in scores.values()]))


def _score(scores, sinks, scored, attend, module, query, key, value, mask, scaling=None, **kwargs):
    """Note a chunk's scores (kv_heads, tokens) in `scores`; what precedes the context takes the place of sinks."""
    fed = query.shape[2]
    keys = torch.cat([key[:, :, :sinks], key[:, :, scored]], 2)
    nothing = torch.zeros(1, keys.shape[2] + fed, dtype=torch.bool, device=key.device)
    missing, pads = nothing.split([keys.shape[2], fed], 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores[module.layer_idx].append(received(query, keys, key[:, :, -fed:], missing, pads, scale)[0, :, sinks:])
    return attend(module, query, key, value, mask, scaling=scaling, **kwargs)


def fit(run: Run, options: Options, samples: Samples, learned: torch.Tensor) -> list[Weights]:
    """Fit each layer's gate by SGD with momentum on the cross-entropy with the scores."""
    device, hidden_size, heads = run.model.device, samples.hidden.shape[2], samples.scores.shape[1]
    groups = run.config.num_attention_heads // heads
    draw = torch.Generator().manual_seed(run.seed)
    layers = [
        {
            "q_proj.weight": drawn(draw, hidden_size, heads * groups * options.size, hidden_size),
            "q_proj.bias": drawn(draw, hidden_size, heads * groups * options.size),
            "k_proj.weight": drawn(draw, hidden_size, heads * options.size, hidden_size),
            "q_norm.weight": torch.ones(options.size),
            "k_norm.weight": torch.ones(options.size),
            "k_base": torch.zeros(heads, 1, options.sinks, options.size),
            "b": torch.zeros(heads, 1, groups),
        }
        for _ in samples.hidden
    ]
    layers = [{name: part.to(device).requires_grad_() for name, part in layer.items()} for layer in layers]
    cluster, per_epoch = FastKVzipKVCluster(), max(len(learned) // options.batch, 1)

    def loss_of(step: int) -> torch.Tensor:
        batch = samples.at(learned[shuffled(run.seed, step, len(learned), options.batch, per_epoch)], device)
        losses = [
            F.binary_cross_entropy(cluster.scores_of(hidden[None], weights)[0], scores, reduction="none").mean(1).sum()
            for hidden, scores, weights in zip(batch.hidden, batch.scores, layers, strict=True)
        ]
        return torch.stack(losses).sum()

    def rate(step: int) -> float:
        done = step / options.steps
        if done < 0.01:
            return options.rate * 0.01 * step
        return options.rate * (1.0 if done < 0.5 else 0.5 if done < 0.75 else 0.25)

    run.descend(layers, partial(torch.optim.SGD, momentum=MOMENTUM), loss_of, rate, options.steps)
    return layers
