"""cokeshao/HoliTom: what it lets into the language model, and what a layer of this one merges."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

from kvcompress.methods import make_method
from kvcompress.tokens import Tokens
from kvcompress.tokens.base import Attention, Tower

from .token_recording import Prompt, Recordings, TokenRecording, normal, released, run

PLACES, SIZE = 36, 6  # of a frame
LAYER = 2  # before which tokens are merged within the language model
PARTS = ["merge_tokens_by_attention_density", "merge_tokens_by_density", "merge_tokens_by_clustering", "holitom"]
PARTS += ["cluster_dpc_knn", "select_static_windows", "get_static_dynamic_features"]


def draw(seed: int, frames: int, change: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A video (frames, PLACES, SIZE) with three scenes, and the attention to its tokens (frames, PLACES).

    Some places change more than others."""
    scene = torch.arange(frames) * 3 // frames
    by_place = change * normal(seed, 1, PLACES, 1).abs()
    video = normal(seed + 1, 3, PLACES, SIZE)[scene] + by_place * normal(seed + 2, frames, PLACES, SIZE)
    return video, normal(seed + 3, frames, PLACES).exp()


def ours(recording: TokenRecording) -> list[torch.Tensor]:
    method = make_method(recording.method, **recording.options)
    if "layers" in recording.drawn:
        return inner(recording)
    video, attention = draw(**recording.drawn)
    hidden = F.pad(video.flatten(0, 1), (0, 0, 0, 1))[None]  # and a text
    received = F.pad(attention.flatten(), (0, 1), value=-torch.inf)[None]
    vision = received > -torch.inf
    frames = [[vision[0].nonzero()[:, 0].view(attention.shape)]]
    tower = Tower(received, hidden[..., None], hidden, [hidden[0, :0]], lambda states: states)
    tokens = Tokens(
        vision, None, [recording.budget], hidden, tower=tower, frames=frames, counts=[[video[..., 0].numel()]]
    )
    chosen, hidden = method.choose(method.score(tokens), tokens)
    return [hidden[chosen]]


def inner(recording: TokenRecording) -> list[torch.Tensor]:
    method, prompt = make_method(recording.method, **recording.options), Prompt.draw(**recording.drawn)
    count = int(prompt.vision.sum())
    _, left = method.budgets(count, 2 * count, len(prompt.weights))
    queries, keys = prompt.queries_and_keys(LAYER - 1, prompt.hidden)
    known = {"counts": [[2 * count, count]]}
    attention = Attention(queries, keys, keys.shape[-1] ** -0.5)
    scores = method.score(Tokens(prompt.vision, None, [left], attention=attention, **known))
    chosen, hidden = method.choose(scores, Tokens(prompt.vision, None, [left], prompt.hidden, **known))
    return [hidden[chosen]]


def theirs(checkout: Path, drawn: dict, ratio: float, options: dict) -> torch.Tensor:
    """Of a prompt that is a token of text and a video."""
    names = {"torch": torch, "math": __import__("math"), "rank0_print": lambda *_: None, "nn": torch.nn}
    names |= {"IMAGE_TOKEN_INDEX": -200, "IGNORE_INDEX": -100, "re": __import__("re"), "random": __import__("random")}
    file, cls = checkout / "holitom/llava_arch.py", "LlavaMetaForCausalLM_holitom"
    video, attention = draw(**drawn)
    embed = torch.nn.Embedding(1, SIZE)
    model = SimpleNamespace(embed_tokens=embed, image_newline=torch.zeros(SIZE))
    config = SimpleNamespace(mm_patch_merge_type="spatial", mm_newline_position="one_token")
    module = SimpleNamespace(
        config=config, model=model, get_model=lambda: model, get_vision_tower=lambda: object(), device="cpu",
        training=False, encode_images_multi=lambda images: (video, attention, None, torch.float32),
        get_2dPool=lambda features: features,
    )  # fmt: skip
    for name in PARTS:
        setattr(module, name, partial(released(file, f"{cls}.{name}", names), module))
    prepare: Callable = released(file, f"{cls}.prepare_inputs_labels_for_multimodal", names)
    ids, images = torch.tensor([[0, -200]]), [torch.zeros(len(video), 3, 1, 1)]
    settings = {"RETAIN_RATIO": str(ratio), "T": str(options.get("similarity", 0.8))}
    settings["BETA"] = str(options.get("own_weight", 0.6))
    # Its noise lets one of two equal tokens come first; here it is the earlier one, as in ours.
    noise = mock.patch("torch.rand", lambda shape, **_: torch.linspace(1, 0, shape[-1]).expand(shape))
    with noise, mock.patch.dict(os.environ, settings), torch.no_grad():
        return prepare(module, ids, None, None, None, None, images, ["video"])[4][0, 1:]


def theirs_inner(checkout: Path, drawn: dict, drop: float) -> torch.Tensor:
    prompt, states = Prompt.draw(**drawn), []

    def layer(hidden: torch.Tensor, number: int, output_attentions: bool, **_: object) -> tuple:
        states.append(hidden)
        queries, keys = prompt.queries_and_keys(number, hidden)
        logits = queries @ keys.transpose(2, 3) * keys.shape[-1] ** -0.5
        unseen = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        return hidden, logits.masked_fill(unseen, -torch.inf).softmax(-1) if output_attentions else None

    names = {"torch": torch, "Cache": object, "DynamicCache": object, "BaseModelOutputWithPast": SimpleNamespace}
    forward = released(checkout / "holitom/modeling_qwen2.py", "Qwen2Model_holitom.forward", names)
    config = SimpleNamespace(
        output_attentions=False, output_hidden_states=False, use_cache=False, use_return_dict=True,
        num_hidden_layers=len(prompt.weights),
    )  # fmt: skip
    module = SimpleNamespace(
        config=config, training=False, gradient_checkpointing=False, norm=torch.nn.Identity(),
        layers=[partial(layer, number=number) for number in range(len(prompt.weights))],
        rotary_emb=lambda hidden, places: hidden, _update_causal_mask=lambda *_: None,
        image_token_posi=[drawn["before"]], image_tokens=[drawn["images"]],
    )  # fmt: skip
    with mock.patch.dict(os.environ, {"HOLITOM_k": str(LAYER), "HOLITOM_r": str(drop)}):
        forward(module, inputs_embeds=prompt.hidden.clone())
    return states[LAYER][0, drawn["before"] : -drawn["behind"]].clone()


def recordings(checkout: Path) -> Recordings:
    for seed, (frames, change, ratio, options) in enumerate(
        [
            (12, 0.3, 0.25, {}),
            (12, 1.0, 0.15, {}),
            (16, 0.4, 0.1, {"similarity": 0.65}),
            (9, 0.5, 0.3, {"own_weight": 0.2}),
        ]
    ):
        drawn = {"seed": 10 * seed, "frames": frames, "change": change}
        states = theirs(checkout, drawn, ratio, options)
        yield TokenRecording("holitom", "holitom", options, drawn, len(states), [states])
    for seed, drop in ((100, 0.5), (200, 0.8)):
        drawn = {"seed": seed, "layers": 3, "before": 3, "images": 30, "behind": 4}
        states = theirs_inner(checkout, drawn, drop)
        options = {"inner_layer": LAYER, "inner_drop": drop}
        yield TokenRecording("holitom, inner", "holitom", options, drawn, len(states), [states])


if __name__ == "__main__":
    functions = (
        "llava_arch.py: prepare_inputs_labels_for_multimodal, holitom; modeling_qwen2.py: Qwen2Model_holitom.forward"
    )
    run(recordings, "cokeshao/HoliTom", functions)
