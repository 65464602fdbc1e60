"""LunarShen/FastVID: what the language model of its LLaVA-OneVision lets in, given the attention to each frame."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

from kvcompress.methods import make_method
from kvcompress.tokens import Tokens
from kvcompress.tokens.base import Tower

from .token_recording import Recordings, TokenRecording, normal, released, run

BEFORE, BEHIND, PLACES, SIZE = 3, 5, 40, 6


def draw(seed: int, frames: int, scenes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A video (frames, PLACES, SIZE) of so many scenes, and the attention to its tokens (frames, PLACES)."""
    scene = torch.arange(frames) * scenes // frames
    means = 0.5 + normal(seed, scenes, 1, SIZE)[scene] + 0.3 * normal(seed + 1, frames, 1, SIZE)
    video = means + normal(seed + 2, scenes, PLACES, SIZE)[scene] + 0.5 * normal(seed + 3, frames, PLACES, SIZE)
    return video, normal(seed + 4, frames, PLACES).exp()


def ours(recording: TokenRecording) -> list[torch.Tensor]:
    video, attention = draw(**recording.drawn)
    hidden = F.pad(video.flatten(0, 1), (0, 0, BEFORE, BEHIND))[None]
    received = F.pad(attention.flatten(), (BEFORE, BEHIND), value=-torch.inf)[None]
    vision = received > -torch.inf
    frames = [[vision[0].nonzero()[:, 0].view(attention.shape)]]
    tower = Tower(received, hidden[..., None], hidden, [hidden[0, :0]], lambda states: states)
    tokens = Tokens(vision, None, [recording.budget], hidden, tower=tower, frames=frames)
    method = make_method(recording.method, **recording.options)
    chosen, hidden = method.choose(method.score(tokens), tokens)
    return [hidden[chosen]]


def theirs(checkout: Path, drawn: dict, ratio: float, options: dict) -> torch.Tensor:
    file = checkout / "fastvid_llavaonevision/LLaVA-NeXT/llava/model/language_model/modeling_qwen2.py"
    names = {"torch": torch, "F": F, "Cache": object, "BaseModelOutputWithPast": SimpleNamespace}
    forward = released(file, "Qwen2Model.forward", names)
    video, attention = draw(**drawn)
    # A model without decoder layers, whose output is what they would be given.
    module = SimpleNamespace(
        config=SimpleNamespace(
            output_attentions=False, output_hidden_states=False, use_cache=False, use_return_dict=True
        ),
        training=False, gradient_checkpointing=False, layers=[], norm=torch.nn.Identity(),
        rotary_emb=lambda hidden, places: (hidden, hidden), _update_causal_mask=lambda *_: None,
        fastvid_retention_ratio=ratio, fastvid_DySeg_c=options.get("segments", 8),
        fastvid_DySeg_tau=options.get("similarity", 0.9), fastvid_STPrune_d=options.get("contextual", 0.4),
        fastvid_DTM_p=options.get("anchor_interval", 4), fastvid_DTM_beta=options.get("own_weight", 0.6),
        video_start_idx=BEFORE, video_token_len=attention.numel(), frame_num=len(video),
        frame_attn_weights=attention, frame_global_features=video.mean(1),
    )  # fmt: skip
    # Its noise lets one of two equal tokens come first; here it is the earlier one, as in ours.
    noise = mock.patch("torch.rand", lambda shape, **_: torch.linspace(1, 0, shape[-1]).expand(shape))
    with noise:
        hidden = forward(module, inputs_embeds=F.pad(video.flatten(0, 1), (0, 0, BEFORE, BEHIND))[None])
    return hidden.last_hidden_state[0, BEFORE:-BEHIND]


def recordings(checkout: Path) -> Recordings:
    # Its numbers of contextual tokens are whole, so that no share is rounded down.
    for seed, (frames, scenes, ratio, options) in enumerate(
        [
            (16, 3, 0.25, {}),
            (16, 1, 0.3, {"segments": 1, "similarity": 0.0}),
            (12, 12, 0.3, {"similarity": 1.0}),
            (16, 2, 0.25, {"segments": 3, "similarity": 0.0, "contextual": 0.6, "own_weight": 0.0}),
            (24, 4, 0.25, {"segments": 4, "similarity": 0.0, "anchor_interval": 2}),
        ]
    ):
        drawn = {"seed": 10 * seed, "frames": frames, "scenes": scenes}
        states = theirs(checkout, drawn, ratio, options)
        budget = frames * int(PLACES * ratio)
        yield TokenRecording("fastvid", "fastvid", options, drawn, budget, [states])


if __name__ == "__main__":
    run(recordings, "LunarShen/FastVID", "modeling_qwen2.py: Qwen2Model.forward")
