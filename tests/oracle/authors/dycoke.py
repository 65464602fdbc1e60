"""KD-TAO/DyCoke: dycole_ttm, which merges a video's frames, and the cache that hides entries while decoding."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from kvcompress.methods import make_method

from .token_recording import Recordings, TokenRecording, normal, of_video, released, run

TOKENS, SIZE = 30, 6  # of a frame


def draw(seed: int, frames: int) -> torch.Tensor:
    """A video (frames, TOKENS, SIZE) whose frames are alike."""
    return normal(seed, 1, TOKENS, SIZE) + normal(seed + 1, frames, TOKENS, SIZE)


def attentions(seed: int, before: int, images: int, behind: int, steps: int) -> list[torch.Tensor]:
    """Of each decode step its weights (1, heads, 1, tokens), of which some change little from step to step."""
    logits, weights = normal(seed, 1, 3, 1, before + images + behind + steps), []
    for step in range(steps):
        logits = logits + (0.1 if step % 2 else 1.5) * normal(seed + 1 + step, *logits.shape)
        weights.append(logits[..., : before + images + behind + step + 1].softmax(-1))
    return weights


def shown(recording: TokenRecording) -> list[torch.Tensor]:
    """The places (entries, 1) that our later layers see at each decode step."""
    method, drawn = make_method(recording.method, **recording.options), recording.drawn
    before, places = None, []
    for weights in attentions(**drawn):
        attention = weights.mean(1)[:, 0]
        vision = torch.zeros_like(attention, dtype=torch.bool)
        vision[:, drawn["before"] : drawn["before"] + drawn["images"]] = True
        before = None if before is None else F.pad(before, (0, 1))
        hidden, before = method.hide(attention, vision, before), attention
        places.append((~hidden[0]).nonzero().float())
    return places


def ours(recording: TokenRecording) -> list[torch.Tensor]:
    if "steps" in recording.drawn:
        return shown(recording)
    return of_video(recording, draw(**recording.drawn))


def recordings(checkout: Path) -> Recordings:
    names = {"torch": torch}
    merge = released(checkout / "llava/model/llava_arch.py", "dycole_ttm", names)
    for seed, (frames, rate) in enumerate([(8, 0.7), (16, 0.7), (16, 0.5), (10, 0.9)]):
        drawn = {"seed": 10 * seed, "frames": frames}
        states = merge(draw(**drawn).flatten(0, 1), TOKENS, rate)
        yield TokenRecording("dycoke", "dycoke", {}, drawn, len(states), [states])
    file = checkout / "llava/model/language_model/modeling_qwen2.py"
    names = {"torch": torch, "F": F}
    update, prune = (
        released(file, f"PrunableDynamicCache.{name}", names) for name in ("update_cache", "dycoke_pruning")
    )
    for seed, rate in ((100, 0.8), (200, 0.7)):
        drawn = {"seed": seed, "before": 5, "images": 60, "behind": 7, "steps": 8}
        config = SimpleNamespace(
            image_token_start_index=5, image_token_length=60, dycoke_radio=rate, attention_score=None, similarity=None
        )
        places = []
        for weights in attentions(**drawn):
            cache = SimpleNamespace(kv_cache=None)  # as the layers below the first that is pruned leave it
            cache.update_cache = partial(update, cache)
            config.seq_length_with_past = weights.shape[-1]
            prune(cache, (None, weights), 3, config)
            seen = range(weights.shape[-1]) if cache.kv_cache is None else cache.kv_cache
            places.append(torch.tensor(list(seen), dtype=torch.float32)[:, None])
        options = {"decode_drop": rate}
        yield TokenRecording("dycoke, decoding", "dycoke", options, drawn, round(100 * rate), places)


if __name__ == "__main__":
    functions = "llava_arch.py: dycole_ttm; modeling_qwen2.py: PrunableDynamicCache.dycoke_pruning, update_cache"
    run(recordings, "KD-TAO/DyCoke", functions)
