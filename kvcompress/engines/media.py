"""Prune one picture or video at a time, as a serving engine encodes it: apart from the prompt and from other media."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import KVCompressError, unknown_name
from ..flag_types import fraction
from ..methods import list_methods, make_method, method_info
from ..policy.make import make_policy
from ..scoring.budget import Budget
from ..tokens.base import TokenMethod, Tokens

MANY_LAYERS = 1024  # more than any model has: a layer that an option names exists
CHANNELS = 16  # of random states in a rehearsal


@dataclass(frozen=True)
class MediaPruner:
    """A token method that chooses among one picture's or one video's tokens by their embeddings.

    Each picture and each video has its own budget, because an engine encodes it once for all prompts that show it. A
    method on frames keeps pictures whole, and does not count them.
    """

    name: str
    method: TokenMethod
    budget: Budget

    @classmethod
    def of(cls, method: str, **options: object) -> "MediaPruner":
        """Create one of a method's name, its `ratio=` or `budget=`, `preset=` and the method's own options.

        Raises KVCompressError for wrong ones, and for a method that cannot choose with embeddings alone."""
        info = method_info(method)
        valid = [*info.options, "ratio", "budget", "preset"]
        if unknown := [option for option in options if option not in valid]:
            raise unknown_name(f"method {info.name!r} in a serving engine has no option", unknown[0], valid)
        policy = make_policy(info.name, **options)
        if (obstacle := obstacle_of(policy.tokens)) is not None:
            raise KVCompressError(
                f"method {info.name!r} cannot prune in a serving engine: {obstacle}; these can: {', '.join(carried())}"
            )
        return cls(info.name, policy.tokens, policy.budget)

    def kept(self, tokens: int, is_video: bool) -> int:
        """Return how many of a picture's or video's tokens stay."""
        return tokens if self.method.sees == "frames" and not is_video else self.budget(tokens)

    def prune(self, states: torch.Tensor, frames: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the tokens that stay of a picture, or of a video of `frames` frames.

        Args:
            states: the embeddings (tokens, hidden_size), frame by frame.

        Returns:
            bool (tokens,), True at `kept` tokens; and the states (tokens, hidden_size), changed where tokens were
            merged.

        Raises KVCompressError if the method cannot keep as many."""
        count = len(states)
        kept = self.kept(count, frames is not None)
        if kept == count:
            return torch.ones(count, dtype=torch.bool, device=states.device), states
        hidden = F.pad(states, (0, 0, 0, 1))[None]  # text follows: the prompt's last token, which always stays
        vision = torch.ones(hidden.shape[:2], dtype=torch.bool, device=states.device)
        vision[:, -1] = False
        places = [] if frames is None else [torch.arange(count, device=states.device).view(frames, -1)]
        known = {"budgets": [kept], "hidden": hidden, "frames": [places], "counts": [[count]], "num_layers": 1}
        prepared = self.method.prepare(Tokens(vision, None, **known))
        tokens = Tokens(vision, None, prepared=prepared, **known)
        chosen, merged = self.method.checked_choice(self.method.score(tokens), tokens)
        stays = chosen[0, :-1]
        if int(stays.sum()) != kept:
            raise KVCompressError(f"method {self.name!r} keeps {int(stays.sum())} of {count} tokens instead of {kept}")
        return stays, merged[0, :-1]

    def rehearse(self, tokens: int, frames: int | None) -> None:
        """Raise KVCompressError if the method cannot keep `kept` of so many tokens, as one that keeps a first frame.

        An engine rejects a request with this before it is scheduled; later, it could only stop."""
        if self.method.sees == "frames":
            states = torch.randn(tokens, CHANNELS, generator=torch.Generator().manual_seed(0))
            self.prune(states, frames)


def obstacle_of(method: TokenMethod | None) -> str | None:
    """Return why a method cannot choose among one medium's tokens by their embeddings; None if it can.

    `method` is None for one that evicts cache entries."""
    if method is None:
        return "it evicts cache entries, and the engine's cache is its own"
    if method.watches_tower or method.sees == "tower":
        return "it reads the attention of the vision tower"
    if method.layers(MANY_LAYERS) != [0]:
        return "it drops tokens inside the language model"
    if method.hides_from(MANY_LAYERS) is not None:
        return "it hides tokens from decode steps"
    if method.sets_budgets:
        return "it decides how many tokens stay, which the engine has to know before"
    if method.reads_prompt:
        return "it reads the rest of the prompt"
    return None


def carried() -> list[str]:
    """Return the names of the methods that prune in an engine with their default options."""
    names = []
    for name, info in list_methods().items():
        if issubclass(info.cls, TokenMethod) and obstacle_of(make_method(name)) is None:
            names.append(name)
    return names


def asked_of(environment: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Return what KVCOMPRESS_METHOD and KVCOMPRESS_RATIO ask for, as arguments of `MediaPruner.of`; empty if nothing.

    Raises KVCompressError if only the ratio is given, or it is no number."""
    method, ratio = (environment.get(f"KVCOMPRESS_{name}", "").strip() for name in ("METHOD", "RATIO"))
    if not method:
        if ratio:
            raise KVCompressError(f"KVCOMPRESS_RATIO={ratio} needs KVCOMPRESS_METHOD, the name of a method")
        return {}
    try:
        return {"method": method, "ratio": fraction(ratio)} if ratio else {"method": method}
    except argparse.ArgumentTypeError as error:
        raise KVCompressError(f"KVCOMPRESS_RATIO: {error}") from None
