"""thu-nics/FrameFusion: the module that merges and prunes, called behind each layer's attention."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from kvcompress.methods import make_method
from kvcompress.tokens import Tokens
from kvcompress.tokens.base import Attention

from .token_recording import Recordings, TokenRecording, normal, released, run

BEFORE, BEHIND, PLACES, SIZE, HEADS = 3, 4, 16, 6, 2
LAYERS = 28  # the released code's default
STEPS = 6  # that are recorded


def draw(seed: int, frames: int, change: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Text, a video whose tokens change by more or less, text: (1, tokens, SIZE); and weights of each layer's queries
    and keys (2, SIZE, SIZE)."""
    video = normal(seed, 1, PLACES, SIZE) + change * normal(seed + 1, frames, PLACES, SIZE)
    text = normal(seed + 2, BEFORE + BEHIND, SIZE)
    hidden = torch.cat([text[:BEFORE], video.flatten(0, 1), text[BEFORE:]])[None]
    return hidden, [normal(seed + 3 + layer, 2, SIZE, SIZE) for layer in range(LAYERS)]


def heads(hidden: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (1, HEADS, tokens, head_dim)."""
    return tuple((hidden @ w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in weights)


def layer(hidden: torch.Tensor) -> torch.Tensor:
    """What a layer does to the states of a token: they all become a little more alike."""
    return hidden + 0.1


def ours(recording: TokenRecording) -> list[torch.Tensor]:
    hidden, weights = draw(**recording.drawn)
    method, count = make_method(recording.method, **recording.options), recording.drawn["frames"] * PLACES
    vision = torch.zeros(hidden.shape[:2], dtype=torch.bool)
    vision[:, BEFORE : BEFORE + count] = True
    frames = [[torch.arange(BEFORE, BEFORE + count).view(-1, PLACES)]]
    prepared = method.prepare(Tokens(vision, None, [count], hidden, frames=frames))
    attention, counts, states = None, [[count]], []
    for step in range(STEPS):
        known = {"prepared": prepared, "counts": counts, "num_layers": LAYERS}
        scores = method.score(Tokens(vision, None, [recording.budget], attention=attention, **known))
        chosen, hidden = method.choose(scores, Tokens(vision, None, [recording.budget], hidden, **known))
        stays = (chosen | ~vision)[0]
        hidden, vision, prepared = hidden[:, stays], vision[:, stays], prepared[:, stays]
        counts = [[*counts[0], int(chosen.sum())]]
        states.append(hidden[vision])
        attention = Attention(*heads(hidden, weights[step]), (SIZE // HEADS) ** -0.5)
        hidden = layer(hidden)
    return states


def theirs(checkout: Path, drawn: dict, cost: float) -> list[torch.Tensor]:
    file, names = checkout / "framefusion/main.py", {"torch": torch, "TEXT_TOKEN": -1, "IGNORE_TOKEN": -2, "List": list}
    for name in ("cosine_similarity", "find_contigious_latter_index"):
        released(file, name, names)
    module = SimpleNamespace(cost=cost, similarity_lower_bound=0.6, ratio_lower_bound=0.1)
    for name in ("compute_similarity_and_token_index_by_patch", "merge_tokens_and_get_mask", "_compute_pruning_ratio"):
        setattr(module, name, released(file, f"FrameFusion.{name}", names))
    for name in ("position_embedding_handler_at_pruning", "position_embedding_handler_at_merging"):
        setattr(module, name, partial(released(file, f"FrameFusion.{name}", names), module))
    prepare, forward = (released(file, f"FrameFusion.{name}", names) for name in ("prepare", "forward"))
    hidden, weights = draw(**drawn)
    count, text = drawn["frames"] * PLACES, torch.full((1, BEFORE + BEHIND), -1)
    places = torch.arange(count)[None] % PLACES
    types = torch.cat([text[:, :BEFORE], places, text[:, BEFORE:]], 1)
    prepare(module, types, PLACES, BEFORE, BEFORE + count - 1, count, hidden.shape[1])
    attention, states = None, []
    for step in range(STEPS):
        columns = torch.zeros(1, hidden.shape[1], 1)
        hidden, _, _ = forward(module, hidden, [columns, columns], None, attention)
        states.append(hidden[0, BEFORE : hidden.shape[1] - BEHIND].clone())
        queries, keys = heads(hidden, weights[step])
        attention = (queries[:, :, -1:] @ keys.transpose(2, 3) * (SIZE // HEADS) ** -0.5).softmax(-1)
        hidden = layer(hidden)
    return states


def recordings(checkout: Path) -> Recordings:
    # Merged at once, in two and three steps, until little is alike; then pruned, or not.
    for seed, change, budget in ((0, 0.6, 38), (200, 1.0, 32), (300, 1.0, 64), (200, 2.0, 64), (300, 1.2, 32)):
        drawn = {"seed": seed, "frames": 8, "change": change}
        states = theirs(checkout, drawn, budget / (8 * PLACES))
        yield TokenRecording("framefusion", "framefusion", {}, drawn, budget, states)


if __name__ == "__main__":
    run(recordings, "thu-nics/FrameFusion", "framefusion/main.py: FrameFusion.forward")
