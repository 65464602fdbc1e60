"""Learning DuoAttention's gates by gradient descent. https://arxiv.org/abs/2410.10819

As in mit-han-lab/duo-attention at fe93c31: duo_attn/train.py, data.py, patch/llama.py. Each KV head mixes full
attention with attention to sinks and recent tokens; its gate is the share of the former. The mixed model shall end in
the hidden states of the model itself, at the tokens that ask for passkeys, with as little full attention as possible.
There the full part of the mix is the unmixed model's own output, as here, and prompts are worded differently."""

import math
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt
from transformers import PreTrainedConfig

from ..cache.cache import CompressedCache
from ..calibration import files
from ..calibration.text import token_ids
from ..clusters.duoattention import DuoAttentionKVCluster
from ..errors import KVCompressError
from ..hooks.model import unwrapped
from .run import Run
from .samples import plain_ids
from .watching import attention_by, computed_again

BEGIN, END = "A long story follows. <story> ", " </story>\n\n"
NEEDLE = "Keep this sequence of words in mind, it is passkey {} to the vault: "
QUESTION = "According to the story, what is passkey {} to the vault?\nPasskey: "
GAP = "\n\n"
WORDS = (
    *("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima"),
    *("mike", "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango", "uniform", "victor", "whiskey"),
    *("xray", "yankee", "zulu"),
)
LENGTHS = 50  # different ones, evenly spaced
DEPTHS = (0.05, 0.95)  # where passkeys lie in the text
BLOCK = 1024  # queries at a time


@dataclass(frozen=True)
class Options:
    """What to train, and how.

    Attributes:
        steps, rate: of AdamW; the rate rises in the first fifth of the steps and falls in the last.
        shortest, longest: tokens of the text that passkeys are put into.
        passkeys, words: in each prompt, and in each passkey.
        sinks, recent: tokens that every head attends to.
        penalty: weight of the mean gate in the loss.
    """

    steps: PositiveInt = 2000
    rate: Annotated[float, Field(gt=0)] = 0.02
    shortest: PositiveInt = 1000
    longest: PositiveInt = 32000
    passkeys: PositiveInt = 10
    words: PositiveInt = 32
    sinks: NonNegativeInt = 128
    recent: PositiveInt = 256
    penalty: Annotated[float, Field(ge=0)] = 0.05


def check(config: PreTrainedConfig) -> None:
    """Raise KVCompressError if a model has no layers that can be compressed."""
    CompressedCache(config)


def train(run: Run, options: Options) -> str:
    """Write the calibration file, and return a summary."""
    if run.model.dtype == torch.float16:
        raise KVCompressError("in float16 gradients vanish: give --dtype bfloat16 or float32")
    config, decoder = unwrapped(run.model).config, run.decoder
    prompts = Passkeys(run, options)
    longest = len(prompts.of(max(range(min(LENGTHS, options.steps)), key=prompts.length))[0])
    if longest <= options.sinks + options.recent:
        raise KVCompressError(
            f"no prompt has more than sinks + recent = {options.sinks + options.recent} tokens, the longest has "
            f"{longest}: give a longer text, or smaller sinks= and recent="
        )
    run.warn_beyond(longest, "longest")
    places = [layer.layer_idx for layer in CompressedCache(config).compressed_layers]
    model = files.ModelIdentity.of(config, len(places))
    gates = [torch.ones(model.kv_heads, device=run.model.device, requires_grad=True) for _ in places]
    of_layers = with_readers(run.config, dict(zip(places, gates, strict=True)))
    mixed = MixedAttention(of_layers, options.sinks, options.recent)

    def loss_of(step: int) -> torch.Tensor:
        ids, answers = prompts.of(step)
        with torch.no_grad():
            for gate in gates:
                gate.clamp_(0, 1)
        distance = mixed.distance(decoder, torch.tensor([ids], device=decoder.device), answers)
        return distance + options.penalty * torch.stack(gates).abs().mean()

    def rate(step: int) -> float:
        fifth = options.steps / 5
        return options.rate * min(1, max((step + 1) / fifth, 0.1), max((options.steps - step) / fifth, 0.1))

    run.begin()
    layers = [{"gate": gate} for gate in gates]
    with attention_by(decoder, mixed), computed_again(decoder):  # also in the backward pass
        run.descend(layers, partial(torch.optim.AdamW, weight_decay=0.0), loss_of, rate, options.steps)
    learned = torch.stack(gates).detach().clamp(0, 1).cpu()
    files.check_tensors({"gates": learned}, model, DuoAttentionKVCluster.calibrated)
    tokens = sum(len(prompts.of(step)[0]) for step in range(options.steps))
    kept = {"sinks": options.sinks, "recent": options.recent}
    data = f"text: {run.text.name}"
    made = files.Calibration("duoattention", model, {"gates": learned}, kept, data, options.steps, tokens, run.seed)
    files.save(made, run.out)
    return f"gates from {options.steps} steps; {int((learned > 0.5).sum())} of {learned.numel()} above 0.5"


def with_readers(config: PreTrainedConfig, gates: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Add the layers without keys of their own (Gemma 3n and 4): each has the gates of the layer whose keys it reads.

    `config` is the text decoder's."""
    layers = config.num_hidden_layers
    first, kinds = layers - (getattr(config, "num_kv_shared_layers", None) or 0), getattr(config, "layer_types", None)
    found = dict(gates)
    for reader in range(first, layers):
        owner = max(index for index in range(first) if kinds[index] == kinds[reader])
        if owner in gates:
            found[reader] = gates[owner]
    return found


class MixedAttention:
    """An attention function (`attention_by`) that mixes full attention with attention to sinks and recent tokens.

    gates: by layer index, the share of full attention in each KV head, (kv_heads,)."""

    def __init__(self, gates: dict[int, torch.Tensor], sinks: int, recent: int):
        self.gates, self.sinks, self.recent = gates, sinks, recent
        self._full: dict[int, torch.Tensor] = {}  # the outputs of full attention in the unmixed model
        self._is_mixing = False

    def __call__(self, attend, module, query, key, value, mask, scaling=None, **kwargs):
        gate = self.gates.get(module.layer_idx)
        if gate is None or not self._is_mixing:
            output, weights = attend(module, query, key, value, mask, scaling=scaling, **kwargs)
            if gate is not None:
                self._full[module.layer_idx] = output
            return output, weights
        share = gate.clamp(0, 1).repeat_interleave(query.shape[1] // len(gate)).to(query.dtype)[:, None]
        near = streaming_attention(query, key, value, self.sinks, self.recent, scaling).transpose(1, 2)
        return (1 - share) * near + share * self._full[module.layer_idx], None

    def distance(self, decoder: torch.nn.Module, ids: torch.Tensor, answers: int) -> torch.Tensor:
        """Return the mean squared distance of the last hidden states of the mixed model to the model's own.

        `ids` are (1, tokens); the last `answers` of them count."""
        self._is_mixing = False
        with torch.no_grad():
            own = decoder(input_ids=ids, use_cache=False).last_hidden_state[:, -answers:].float()
        self._is_mixing = True
        mixed = decoder(input_ids=ids, use_cache=False).last_hidden_state[:, -answers:].float()
        return (mixed - own).square().mean()


def streaming_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: int, recent: int, scaling: float | None
) -> torch.Tensor:
    """Causal attention to the first `sinks` and the last `recent` tokens, a query's own included.

    `query` is (batch, heads, tokens, head_dim), `key` and `value` have their KV heads; returns the shape of `query`."""
    groups, tokens, parts = query.shape[1] // key.shape[1], query.shape[2], []
    for start in range(0, tokens, BLOCK):
        rows = torch.arange(start, min(start + BLOCK, tokens), device=query.device)
        near = max(start - recent + 1, 0)
        columns = torch.arange(near, start + len(rows), device=query.device)
        columns = torch.cat([torch.arange(min(sinks, near), device=query.device), columns])
        age = rows[:, None] - columns
        mask = (age >= 0) & ((age < recent) | (columns < sinks))
        keys, values = (part[:, :, columns].repeat_interleave(groups, 1) for part in (key, value))
        parts.append(F.scaled_dot_product_attention(query[:, :, rows], keys, values, attn_mask=mask, scale=scaling))
    return torch.cat(parts, 2)


@dataclass
class Passkeys:
    """Prompts: a text into which passkeys are put, and after it the question for each with its answer."""

    run: Run
    options: Options
    text: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.text = token_ids(self.run.text, self.run.tokenizer)[: self.options.longest]

    def of(self, step: int) -> tuple[list[int], int]:
        """Return the token ids of a step's prompt, and the number of those that ask and answer, which are the last."""
        draw = random.Random(f"{self.run.seed} {step}")
        length = self.length(step)
        least, most = DEPTHS
        depths = sorted(
            math.floor(length * (least + (most - least) * draw.random())) for _ in range(self.options.passkeys)
        )
        context, answers, done = [], [], 0
        for number, depth in enumerate(depths, 1):
            passkey = self._ids(" ".join(draw.choices(WORDS, k=self.options.words)))
            gap = self._ids(GAP)
            context += [*self.text[done:depth], *gap, *self._ids(NEEDLE.format(number)), *passkey, *gap]
            answers += [*self._ids(QUESTION.format(number)), *passkey, *gap]
            done = depth
        context += self.text[done:length]
        begin = [*self.run.tokenizer("").input_ids, *self._ids(BEGIN)]
        return [*begin, *context, *self._ids(END), *answers], len(answers)

    def length(self, step: int) -> int:
        """Return the tokens of text in a step's prompt; each of LENGTHS steps has another, in a random order."""
        epoch, place = divmod(step, LENGTHS)
        order = random.Random(f"{self.run.seed} lengths {epoch}").sample(range(LENGTHS), LENGTHS)
        longest = len(self.text)
        shortest = min(self.options.shortest, longest)
        return shortest + (longest - shortest) * order[place] // (LENGTHS - 1)

    def _ids(self, text: str) -> list[int]:
        return plain_ids(self.run.tokenizer, text)
