"""Tokens to learn from: their hidden states, and the scores that are to be predicted from these."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jinja2 import TemplateError
from safetensors.torch import load_file, save
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..cache.cache import CompressedCache
from ..calibration.text import cut, token_ids
from ..clusters.learned import LearnedKVCluster
from ..errors import KVCompressError, one_line
from ..files import replacing
from ..hooks.hidden_states import attention_layers
from ..learned.checkpoints import Weights
from .run import Run, progress, readable

PLACE = "CONTEXT"  # in a chat, replaced by the context
REPEAT = "\n\nRepeat the previous context exactly."


@dataclass(frozen=True)
class Samples:
    """Tokens of one or several texts.

    Attributes:
        hidden: what enters the attention layers, (layers, tokens, hidden_size), in the model's precision.
        scores: (layers, kv_heads, tokens), in fp32.
    """

    hidden: torch.Tensor
    scores: torch.Tensor

    def at(self, tokens: torch.Tensor, device: torch.device | None = None) -> "Samples":
        """Return some of the tokens, with hidden states in fp32."""
        return Samples(self.hidden[:, tokens].to(device).float(), self.scores[..., tokens].to(device))


def check_layers(config: PreTrainedConfig, method: str) -> None:
    """Raise KVCompressError unless all layers of a model keep keys of their own for all tokens."""
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if len(CompressedCache(config).compressed_layers) != layers:
        raise KVCompressError(
            f"training {method} needs full attention in all layers; this {config.model_type} has other layers"
        )


def gather(
    run: Run,
    read: Callable[[list[int]], Samples],
    fed: Callable[[int], int],
    pieces: int,
    length: int,
    tokens: int,
    every: int,
) -> tuple[Samples, torch.Tensor, torch.Tensor]:
    """Read pieces of the run's text, and return `tokens` of each, drawn at random, and `held_out` of these.

    `read` returns the samples of a piece of `length` token ids, on any device; `fed` says how many tokens the model has
    then read, given those of the piece. Pieces that an earlier run has read are not read again. Raises KVCompressError,
    before any is read, if there are too few tokens, and after the first one if the model computes numbers that are not
    finite."""
    text = run.config
    if missing := sorted(set(range(text.num_hidden_layers)) - attention_layers(run.decoder).keys()):
        raise KVCompressError(
            f"training reads the hidden states that enter attention layers: those of {type(run.decoder).__name__}'s "
            f"layers {missing} are not found"
        )
    chosen = cut(token_ids(run.text, run.tokenizer), length, pieces, run.seed)
    per_piece = min(tokens, len(chosen[0]))
    learned, checked = held_out(len(chosen) * per_piece, every)
    run.warn_beyond(fed(len(chosen[0])), "length")
    size = len(chosen) * per_piece * text.num_hidden_layers
    run.begin(size * (text.hidden_size * run.model.dtype.itemsize + text.num_key_value_heads * 4))
    files = [run.state / f"piece-{number:05}.safetensors" for number in range(len(chosen))]
    missing = [number for number, file in enumerate(files) if not file.exists()]
    with progress("reading", len(files), len(files) - len(missing)) as bar:
        for number in missing:
            found = read(chosen[number])
            if not (found.hidden.isfinite().all() and found.scores.isfinite().all()):
                dtype = str(run.model.dtype).removeprefix("torch.")
                raise KVCompressError(
                    f"in {dtype} this model computes numbers that are not finite: give another --dtype"
                )
            draw = torch.Generator().manual_seed(run.seed * len(files) + number)
            some = torch.randperm(found.scores.shape[2], generator=draw)[:per_piece].sort().values
            _save(Samples(found.hidden[:, some].cpu(), found.scores[..., some].cpu()), files[number])
            bar.update()
    hidden, scores = [], []
    for file in files:
        with readable(file):
            part = load_file(file)
            hidden.append(part["hidden"])
            scores.append(part["scores"])
    return Samples(torch.cat(hidden, 1), torch.cat(scores, 2)), learned, checked


def _save(samples: Samples, path: Path) -> None:
    with replacing(path) as draft:
        draft.write_bytes(save({"hidden": samples.hidden.contiguous(), "scores": samples.scores.contiguous()}))


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the token ids before a user's words in a chat, and those between these words and the answer.

    Without a chat template: the beginning of a text, and a line break. Raises KVCompressError if the template fails."""
    if not tokenizer.chat_template:
        return tokenizer("").input_ids, plain_ids(tokenizer, "\n")
    problem = ""
    for content in (PLACE, [{"type": "text", "text": PLACE}]):  # templates of models that see may know parts only
        said = [{"role": "user", "content": content}]
        try:
            chat = tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except (TemplateError, TypeError) as error:
            problem = problem or one_line(error)
            continue
        before, found, after = chat.rpartition(PLACE)
        if found:
            return plain_ids(tokenizer, before), plain_ids(tokenizer, after)
        problem = problem or "it leaves out what a user says"
    raise KVCompressError(f"the model's chat template cannot be used: {problem}")


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text without those that begin or end one."""
    return tokenizer(text, add_special_tokens=False).input_ids


def held_out(tokens: int, every: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide sample indices: those to learn from, and each `every`th, to check with.

    Raises KVCompressError if too few are left to check with."""
    if tokens < 3 * every:
        raise KVCompressError(f"the text gives {tokens} tokens to learn from; at least {3 * every} are needed")
    index = torch.arange(tokens)
    is_out = (index + 1) % every == 0
    return index[~is_out], index[is_out]


def shuffled(seed: int, step: int, total: int, batch: int, per_epoch: int) -> torch.Tensor:
    """Return the indices of a step's batch, where each epoch of `per_epoch` batches has an order of its own."""
    epoch, place = divmod(step, per_epoch)
    draw = torch.Generator().manual_seed(seed * 100_003 + epoch)
    return torch.randperm(total, generator=draw)[place * batch : (place + 1) * batch]


def drawn(draw: torch.Generator, inputs: int, *shape: int) -> torch.Tensor:
    """Return weights as torch.nn.Linear with that many inputs initialises them."""
    return (torch.rand(shape, generator=draw) * 2 - 1) / math.sqrt(inputs)


@torch.no_grad()
def agreement(cluster: LearnedKVCluster, layers: list[Weights], samples: Samples) -> float:
    """Return the rank correlation of predicted with true scores over the tokens, averaged over layers and heads."""
    found = []
    for hidden, scores, weights in zip(samples.hidden, samples.scores, layers, strict=True):
        predicted = cluster.scores_of(hidden[None], weights)[0]
        pair = torch.stack([predicted, scores]).argsort(-1).argsort(-1).double()
        pair = torch.nn.functional.normalize(pair - pair.mean(-1, keepdim=True), dim=-1)
        found.append(pair.prod(0).sum(-1))
    return float(torch.stack(found).mean())
