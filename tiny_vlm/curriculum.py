"""The curriculum of the tiny model: its stages, and the batches drawn for each step.

What mattered, in order of effect: text on the patch grid first (the tower read 97 % of the characters after 100 steps,
with free placement 3 %); bold dark letters; a probe for each step of reasoning; a fifth layer for the second step (0.56
to 0.81); many questions per prompt; a decaying learning rate at the end (long answers from 0.80 to 0.91); and a larger
initialization of the projector than transformers' 0.02.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from tiny_vlm.packing import PackedBatch, Packer
from tiny_vlm.signs import COLOR_KIND, PATCH, PROMPT_WORDS, draw_packed_scene, draw_scene, questions


@dataclass(frozen=True)
class Stage:
    """A stage of the curriculum. `packed_share`: the share of images packed with signs, which have no questions."""

    name: str
    steps: int
    images: int  # per step
    packed_share: float
    jitter_grows_until: float = 0.0  # fraction of the stage over which packed text moves off the patch grid
    questions: int = 0  # per image at most
    color_share: float = 1.0  # of the possible questions for a colour, those that may be asked
    post_prompt_share: float = 0.0  # of the batches, those whose questions carry lmms-eval's post prompt
    base_view: bool = False  # whether the language model also sees the base view, see PackedBatch
    learning_rate: float = 2e-3
    tower_scale: float = 1.0  # learning rate of tower and projector, as a factor
    decay_from: float = 0.6  # fraction of the stage after which the learning rate decays
    avoided: tuple[str, ...] = PROMPT_WORDS  # words that never occur on a sign
    inserts: ClassVar[None] = None  # see Mixture
    decay_until: ClassVar[float] = 1.0

    @property
    def is_of_tower(self) -> bool:
        """Whether only the vision tower is trained, without the language model."""
        return self.name == "vision"

    def data(self, seed: int, packer: Packer, parts: int) -> StageData:
        """Return the dataset that maps a step to its `parts` batches."""
        return StageData(self, seed, packer, parts)


STAGES = (
    Stage("vision", steps=2400, images=12, packed_share=1.0, jitter_grows_until=0.25),
    Stage("align", steps=300, images=16, packed_share=0.75),
    Stage(
        "questions",
        steps=2800,
        images=16,
        packed_share=0.0,
        questions=8,
        post_prompt_share=0.25,
        tower_scale=0.3,
        decay_from=1.0,
    ),
    Stage(
        "pairs",
        steps=1200,
        images=16,
        packed_share=0.0,
        questions=8,
        color_share=0.3,
        post_prompt_share=0.25,
        learning_rate=1.5e-3,
        tower_scale=0.1,
        decay_from=1.0,
    ),
    Stage(
        "prompts",
        steps=600,
        images=16,
        packed_share=0.0,
        questions=8,
        color_share=0.3,
        post_prompt_share=0.6,
        base_view=True,
        learning_rate=1.5e-3,
        tower_scale=0.1,
        decay_from=0.1,
    ),
)


class StageData(Dataset):
    """Maps a step to its batches. Each step has its own seed, so any worker or a later run draws the same."""

    def __init__(self, stage: Stage, seed: int, packer: Packer, parts: int) -> None:
        self.stage, self.seed, self.packer, self.parts = stage, seed, packer, parts

    def __len__(self) -> int:
        return self.stage.steps

    def __getitem__(self, step: int) -> list[PackedBatch]:
        rng = Random(f"{self.seed}/{self.stage.name}/{step}")
        post_prompt = rng.random() < self.stage.post_prompt_share
        grown = step / max(1, self.stage.jitter_grows_until * self.stage.steps)
        jitter = min(PATCH // 2, int(grown * PATCH / 2))
        return [self._part(rng, jitter, post_prompt) for _ in range(self.parts)]

    def _part(self, rng: Random, jitter: int, post_prompt: bool) -> PackedBatch:
        scenes, asked = [], []
        for _ in range(self.stage.images // self.parts):
            packed = rng.random() < self.stage.packed_share
            scene = draw_packed_scene(rng, jitter) if packed else draw_scene(rng, avoided=self.stage.avoided)
            possible = [
                question
                for question in questions(scene.signs)
                if question.kind != COLOR_KIND or self.stage.color_share == 1 or rng.random() < self.stage.color_share
            ]
            scenes.append(scene)
            asked.append(rng.sample(possible, min(len(possible), self.stage.questions)))
        pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).permute(0, 3, 1, 2)
        labels = torch.from_numpy(np.stack([scene.labels for scene in scenes]))
        return self.packer.batch(pixels.contiguous(), asked, labels, post_prompt, self.stage.base_view)
