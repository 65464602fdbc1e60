"""What our cache keeps of the recorded states: they pass through a `CompressedCache` as a model's would."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import LlavaOnevisionConfig, Qwen2Config

import kvcompress
from kvcompress.calibration.files import Calibration, ModelIdentity, save
from kvcompress.hooks.second_reading import DecoderInputs, read_again

from .recording import Recording
from .states import States, gates, hidden, states

IMAGE = 3  # the token that stands for an image's


@dataclass(frozen=True)
class Held:
    """kept: bool (layers, kv_heads, tokens); keys, values: [layer][kv_head] -> (kept, head_dim); scores: of each layer
    the latest by which was chosen, (kv_heads, entries then stored)."""

    kept: torch.Tensor
    keys: list[list[torch.Tensor]]
    values: list[list[torch.Tensor]]
    scores: list[torch.Tensor]


def config_of(given: States) -> LlavaOnevisionConfig:
    _, heads, _, head_dim = given.queries.shape
    return _config(given.layers, heads, given.keys.shape[1], head_dim)


@cache
def _config(layers: int, heads: int, kv_heads: int, head_dim: int) -> LlavaOnevisionConfig:
    text = Qwen2Config(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * head_dim,
        vocab_size=10,
    )  # fmt: skip
    return LlavaOnevisionConfig(text_config=text, image_token_index=IMAGE)


@torch.no_grad()
def ours(given: States, prompt: int, decoded: int, method: str, budget: int, **options: object) -> Held:
    """What the method keeps of a prompt of so many tokens and of as many decode steps behind it; `ratio` of the
    options, if there is one, or else `budget` is asked for. Attention itself does not matter: the states are given."""
    ids = torch.ones(1, prompt, dtype=torch.long)
    ids[:, slice(*given.vision)] = IMAGE
    asked = {} if "ratio" in options else {"budget": budget}
    cache = kvcompress.CompressedCache(config_of(given), method, **asked, **options)
    scores = [torch.empty(0)] * given.layers
    final_scores = type(cache.policy.cluster).final_scores

    def noting(cluster: kvcompress.KVCluster, raw: torch.Tensor, view: kvcompress.LayerView) -> torch.Tensor:
        scores[view.place] = final_scores(cluster, raw, view)
        return scores[view.place]

    def feed(tokens: slice, ids: torch.Tensor | None) -> None:
        count = tokens.stop - tokens.start
        cache.start(1, count, ids, None)
        cache.rotate(given.rotary(tokens))
        for place, layer in enumerate(cache.compressed_layers):
            queries, keys, values = given.layer(place, tokens)
            cache.update(keys, values, place)
            if cache.policy.cluster.reads_hidden:
                layer.set_features(cache.policy.cluster.hidden_features(hidden(given, place, tokens), place))
            layer.after_attention(queries, keys.shape[-1] ** -0.5, _module(given, place))
        if ids is not None and cache.policy.cluster.second_pass:
            inputs = DecoderInputs(torch.arange(float(count))[None, :, None], None)
            read_again(SecondReading(given, cache), inputs, cache)
        cache.finish()
        cache.end()

    with mock.patch.object(type(cache.policy.cluster), "final_scores", noting):
        feed(slice(0, prompt), ids)
        for step in range(prompt, prompt + decoded):
            feed(slice(step, step + 1), None)
    return Held(*_held(cache, prompt + decoded), scores)


@dataclass
class SecondReading:
    """In place of a decoder that reads the prompt again: a token's embedding is its number, and its states are those of
    the first reading. The authors' code is given the same."""

    given: States
    cache: kvcompress.CompressedCache

    def get_input_embeddings(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda ids: ids[..., None].float()

    def __call__(self, inputs_embeds: torch.Tensor, **kwargs: object) -> None:
        tokens = inputs_embeds[0, :, 0].long()
        for place, layer in enumerate(self.cache.compressed_layers):
            queries, keys, values = self.given.layer(place, tokens)
            self.cache.update(keys, values, place)
            layer.after_attention(queries, keys.shape[-1] ** -0.5, _module(self.given, place))


def _module(given: States, place: int) -> SimpleNamespace:
    if given.o_proj is None:
        return SimpleNamespace()
    linear = torch.nn.Linear(*given.o_proj[place].shape[::-1], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(given.o_proj[place], requires_grad=False)
    return SimpleNamespace(o_proj=linear)


def _held(cache: kvcompress.CompressedCache, tokens: int) -> tuple:
    kept, states = [], ([], [])
    for layer in cache.compressed_layers:
        columns = layer.kept_columns()[0]
        rows = torch.zeros(len(columns), tokens + 1, dtype=torch.bool).scatter(1, columns % (tokens + 1), True)
        kept.append(rows[:, :tokens])
        for to, stored in zip(states, layer.storage.read(), strict=True):
            stored = stored[0][:, -columns.shape[1] :]
            to.append([head[used] for head, used in zip(stored, columns >= 0, strict=True)])
    return torch.stack(kept), *states


def of(recording: Recording) -> Held:
    """What ours keeps where the authors' code kept a recording."""
    given, options = states(recording.states), dict(recording.options)
    with TemporaryDirectory() as folder:
        if recording.method == "fastkvzip":
            options["checkpoint"] = str(Path(folder) / "gates.pt")
            torch.save({"module": gates(given)}, options["checkpoint"])
        if recording.known:
            path = Path(folder) / "calibration.safetensors"
            model = ModelIdentity.of(config_of(given), given.layers)
            save(Calibration(recording.method, model, recording.known), path)
            options["calibration"] = str(path)
        return ours(given, recording.prompt, recording.decoded, recording.method, recording.budget, **options)


def share(recording: Recording, held: Held) -> float:
    """The part of what the authors' code keeps that ours keeps as well; entries beyond theirs count against it.

    In a prompt, entries whose score is that of the last that ours keeps (of the head, or of all heads where these share
    a budget) count as kept while there are as many: of equals top-k takes any."""
    both = int((recording.kept & held.kept).sum())
    if not recording.decoded:
        scores = [layer[0] if layer.ndim == 3 else layer for layer in held.scores]
        for theirs, our, layer in zip(recording.kept, held.kept, scores, strict=True):
            if layer.shape == our.shape:
                both += _tied(theirs, our, layer, recording.options.get("head_budget") == "adaptive")
    return both / max(int(recording.kept.sum()), int(held.kept.sum()))


def _tied(theirs: torch.Tensor, our: torch.Tensor, scores: torch.Tensor, together: bool) -> int:
    """How many entries of theirs (kv_heads, tokens) only a tie, or rounding, keeps from being of ours: no more than
    ours has in their place."""
    lowest = scores.masked_fill(~our, torch.inf)
    cut = lowest.min() if together else lowest.amin(-1, keepdim=True)
    equal = torch.isclose(scores, cut, rtol=1e-5, atol=0.0)
    missing, instead = ((part & equal).sum(-1) for part in (theirs & ~our, our & ~theirs))
    return int(missing.sum().minimum(instead.sum()) if together else missing.minimum(instead).sum())
