"""The promises of every token method, like those of KV methods in promises.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import ClassVar
from unittest import mock

import torch

from ..cache.cache import CompressedCache
from ..tokens import TokenMethod, Tokens
from .models import IMAGE, VIDEO, Tried, picture, prompts, tiled_model, tiled_picture, tiled_video, video, vision_model
from .promises import (
    NEW,
    Broken,
    Checked,
    NotAsked,
    ratio_one_is_the_full_cache,
    same_logits,
    takes_sixteen_bits,
)
from .reference import generate, hidden_from

LAYERS = 4
Kept = list[list[list[int]]]  # [layer][row] -> columns


class CheckedTokens(Checked):
    """A token method with its options, and prompts that show what it chooses among."""

    ratio: ClassVar[float] = 0.5  # of the vision tokens; some methods always keep one frame of four

    @cached_property
    def tried(self) -> list[Tried]:
        """Batches of a row with several pictures or videos if possible, a row without, and a row with one."""
        sees = self.policy.tokens.sees
        if sees == "video":
            return [prompts("llava-onevision", tiled_model(LAYERS), (63, 23, 40), (2, 0, 1), self.seed, tiled_video)]
        if sees == "frames":
            return [prompts("qwen2-vl", vision_model(LAYERS), (150, 23, 80), (2, 0, 1), self.seed, video)]
        tiled = prompts("llava-onevision", tiled_model(LAYERS), (71, 23, 62), (1, 0, 1), self.seed, tiled_picture)
        if sees == "tower":
            return [tiled]
        return [prompts("qwen2-vl", vision_model(LAYERS), (50, 23, 31), (2, 0, 1), self.seed, picture), tiled]

    def run(self, tried: Tried, forced: torch.Tensor | None = None) -> tuple[Kept, torch.Tensor, torch.Tensor]:
        """Answer a batch, with the tokens `forced` if given.

        Returns the columns that the layers hold, the answer's tokens (batch, new), and its logits."""
        with self.compress(tried) as session:
            tokens, logits = generate(tried.model, tried.inputs, NEW, forced)
        return kept_columns(session.cache), tokens, logits


def kept_columns(cache: CompressedCache) -> Kept:
    """Return the columns that each layer holds, which are the same for all its KV heads."""
    return [[heads[0].tolist() for heads in cache.kept_indices(layer)] for layer in range(len(cache.layers))]


def ratio_one_is_the_full_model(checked: CheckedTokens) -> None:
    method = checked.policy.tokens
    if method.sets_budgets or method.hides_from(LAYERS) is not None:
        raise NotAsked("it drops tokens whatever the ratio")
    ratio_one_is_the_full_cache(checked)


def keeps_its_budget(checked: CheckedTokens) -> None:
    """In the sum over the layers: a method may share its budget out as it goes."""
    policy, method = checked.policy, checked.policy.tokens
    for tried in checked.tried:
        kept, _, _ = checked.run(tried)
        ids = tried.inputs["input_ids"]
        is_vision = ((ids == IMAGE) | (ids == VIDEO)).tolist()
        for row, of_row in enumerate(is_vision):
            if not (total := sum(of_row)):
                continue
            stages = dict(zip(method.layers(LAYERS), method.budgets(policy.budget(total), total, LAYERS), strict=True))
            want, left = [], total
            for layer in range(LAYERS):
                left = stages.get(layer, left)
                want.append(left)
            have = [sum(of_row[column] for column in layer[row] if column < len(of_row)) for layer in kept]
            if sum(have) > sum(want) or (sum(have) < sum(want) and not method.sets_budgets):
                what = f"row {row} keeps {have} of {total} vision tokens per layer instead of {want}"
                raise Broken(f"{checked.named(tried)}: {what}")


def answers_as_if_dropped_tokens_were_hidden(checked: CheckedTokens) -> None:
    """In the full model, each layer sees only the tokens that it was left: this checks that nothing else changed."""
    method = checked.policy.tokens
    if method.hides_from(LAYERS) is not None:
        raise NotAsked("it hides tokens while decoding")
    for tried in checked.tried:
        with _merging(type(method)) as merges:
            kept, tokens, logits = checked.run(tried)
        if merges:
            raise NotAsked("its `choose` merges tokens")
        with hidden_from(tried.model, kept):
            _, expected = generate(tried.model, tried.inputs, NEW, tokens)
        same_logits(checked.named(tried), logits, expected, "with the method", "of the masked model")


@contextmanager
def _merging(cls: type[TokenMethod]) -> Iterator[list[bool]]:
    """Yield a list that gets an entry when `choose` returns other hidden states than it was given."""
    choose, merges = cls.choose, []

    def noting(self: TokenMethod, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = choose(self, scores, tokens)
        if isinstance(chosen, tuple) and chosen[-1] is not tokens.hidden:
            merges.append(True)
        return chosen

    with mock.patch.object(cls, "choose", noting):
        yield merges


def a_row_is_as_alone(checked: CheckedTokens) -> None:
    """In a padded batch, each row keeps the same tokens and has the same logits as alone."""
    for tried in checked.tried:
        kept, tokens, logits = checked.run(tried)
        for row, length in enumerate(tried.lengths):
            pads = tried.inputs["input_ids"].shape[1] - length
            of_alone, _, alone = checked.run(tried.alone(row), tokens[row : row + 1])
            for layer, (of_batch, apart) in enumerate(zip(kept, of_alone, strict=True)):
                together, apart = {column - pads for column in of_batch[row]}, set(apart[0])
                if together != apart:
                    only_there = f"{sorted(together - apart)} in the batch, {sorted(apart - together)} alone"
                    raise Broken(f"{checked.named(tried)}: row {row}, layer {layer} keeps columns {only_there}")
            same_logits(f"{checked.named(tried)}: row {row}", logits[row], alone[0], "in the batch", "alone")


def chooses_the_same_twice(checked: CheckedTokens) -> None:
    for tried in checked.tried:
        first, second = (checked.run(tried)[0] for _ in range(2))
        if first != second:
            raise Broken(
                f"{checked.named(tried)}: other tokens are kept when run again: keep no state between calls, and draw "
                "random numbers by tokens.row_seeds"
            )


TOKEN_PROMISES: dict[str, Callable[[CheckedTokens], None]] = {
    "ratio 1 gives the logits of the full model": ratio_one_is_the_full_model,
    "each row keeps its budget of vision tokens": keeps_its_budget,
    "the answer equals the full model's under a mask": answers_as_if_dropped_tokens_were_hidden,
    "a row gives the same result in a padded batch as alone": a_row_is_as_alone,
    "the same prompt keeps the same tokens": chooses_the_same_twice,
    "a model in bfloat16 is compressed": takes_sixteen_bits,
}
