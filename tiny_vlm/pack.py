"""Pack prompts of the regimes into a training batch."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import InterpolationMode, resize

from lmms_eval_plugins.tiny_vlm.questions import Question, Shown
from tiny_vlm.packing import IGNORED, PackedBatch, Packer, Via, View
from tiny_vlm.signs import CHARACTERS, GRID, LABELS, SIDE


def pack(
    packer: Packer,
    prompts: list[Shown],
    post_prompt: bool,
    view: View = "both",
    text_labels: bool = False,
    via: Via | None = None,
    via_throughout: bool = False,
) -> PackedBatch:
    """Pack each prompt with all its questions into a row. `text_labels`: label the text, which must consist of facts;
    `via`, `via_throughout`: see `Packer.via`.

    All prompts must show the same number of pictures and of frames. `view` applies to a single picture; several
    pictures appear only in their base view, as in LLaVA-OneVision.
    """
    pictures = len(prompts[0].pictures)
    frames = 0 if prompts[0].frames is None else len(prompts[0].frames)
    view = "base" if pictures > 1 else view
    prefixes = [packer.prefix(pictures, view, frames, shown.text) for shown in prompts]
    asked = [shown.questions for shown in prompts]
    prefix, ids, segments, positions, targets = packer.rows(prefixes, asked, post_prompt)
    batch = PackedBatch(
        pixels=_pixels([picture for shown in prompts for picture in shown.pictures]),
        ids=ids,
        segments=segments,
        positions=positions,
        targets=targets,
        labels=_labels([labels for shown in prompts for labels in shown.picture_labels], GRID),
        kinds=[[question.kind for question in questions] for questions in asked],
        prefix=prefix,
        view=view,
        image=packer.image,
        video=packer.video,
    )
    if frames:
        different, index = [], []
        for shown in prompts:
            for place, pixels in enumerate(shown.frames):
                if place == 0 or not np.array_equal(pixels, shown.frames[place - 1]):
                    different.append((pixels, shown.frame_labels[place]))
                index.append(len(different) - 1)
        batch.frames = enlarged(_pixels([pixels for pixels, _ in different]))
        batch.frame_labels = torch.from_numpy(np.stack([labels for _, labels in different]))
        batch.frame_index = torch.tensor(index).unflatten(0, (len(prompts), frames))
        batch.before = torch.from_numpy(np.stack([shown.before for shown in prompts]))
    if via:
        batch.via = packer.via(asked, via, ids, segments, targets, via_throughout)
    if text_labels:
        batch.text_labels = torch.full((2, *ids.shape), IGNORED)
        for row, shown in enumerate(prefixes):
            batch.text_labels[:, row, : len(shown)] = fact_labels(packer, shown)
    return batch


def fact_labels(packer: Packer, ids: list[int]) -> Tensor:
    """Return the PackedBatch.text_labels (2, T) of a row whose facts each have a number, a word and its number."""
    character = {packer.encode(text)[0]: 1 + place for place, text in enumerate(CHARACTERS)}
    labels = torch.full((2, len(ids)), IGNORED)
    runs: list[list[int]] = []  # indices of adjacent characters
    for place, token in enumerate(ids):
        if token in character:
            if runs and runs[-1][-1] == place - 1:
                runs[-1].append(place)
            else:
                runs.append([place])
    for number, run in enumerate(runs):
        word = [character[ids[place]] for place in runs[number - 1]] if number % 3 == 2 else []
        for index, place in enumerate(run):
            labels[0, place] = character[ids[place - 1]] if index else 0
            labels[1, place] = word[index] if index < len(word) else 0
    return labels


def enlarged(frames: Tensor) -> Tensor:
    """Resize frames (M, 3, height, width) uint8 to (M, 3, SIDE, SIDE), as LLaVA-OneVision's video processor does."""
    return resize(frames, [SIDE, SIDE], interpolation=InterpolationMode.BICUBIC, antialias=True)


def in_turn(rng: Random, questions: list[Question], count: int) -> list[Question]:
    """Draw up to `count` questions, cycling through their kinds so that rare ones are asked too."""
    by_kind: dict[str, list[Question]] = {}
    for question in rng.sample(questions, len(questions)):
        by_kind.setdefault(question.kind, []).append(question)
    ranked = [(place, question) for group in by_kind.values() for place, question in enumerate(group)]
    return [question for _, question in sorted(ranked, key=lambda pair: pair[0])][:count]


def _pixels(pictures: list[np.ndarray]) -> Tensor:
    """Stack pictures into (N, 3, height, width) uint8."""
    stacked = np.stack(pictures) if pictures else np.zeros((0, SIDE, SIDE, 3), np.uint8)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def _labels(labels: list[np.ndarray], grid: int) -> Tensor:
    return torch.from_numpy(np.stack(labels) if labels else np.zeros((0, len(LABELS), grid, grid), np.int64))
