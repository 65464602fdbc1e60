"""Auxiliary losses on the tiny model's patches during training, which teach it to read and to locate characters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_vlm.packing import IGNORED, PackedBatch, Packer, frame_patches, picture_patches
from tiny_vlm.regimes.words import ORDINALS
from tiny_vlm.signs import CHARACTERS, COLORS, LABELS

NONE_WEIGHT = 0.1  # weight of a patch without a character in the reading losses


class Probes(nn.Module):
    """Training-time heads on the patches; the exported model does not contain them.

    Characters and colours are predicted with the language model's own token embeddings, so that the projector learns
    to output them.
    """

    def __init__(self, embeddings: nn.Embedding, packer: Packer) -> None:
        super().__init__()
        width = embeddings.embedding_dim
        self.embeddings = [embeddings]  # in a list, so it is not a submodule: it belongs to the model
        self.characters = [packer.encode(character)[0] for character in CHARACTERS]
        self.colors = [packer.encode(f" {color}")[0] for color in COLORS]
        self.none = nn.Linear(width, 4)
        self.index = nn.Linear(width, 5)
        self.last = nn.Linear(width, 2)
        self.left = nn.Linear(width, width)
        self.above = nn.Linear(width, width)
        self.ordinals = [packer.encode(f" {ordinal}")[0] for ordinal in ORDINALS]
        self.no_context = nn.Linear(width, 1)
        self.context = nn.Linear(width, width)

    def _tied(self, states: Tensor, tokens: list[int], none: Tensor) -> Tensor:
        """Return logits (..., 1 + len(tokens)): "none" first, then the tokens."""
        logits = F.linear(states, F.normalize(self.embeddings[0].weight[tokens].float(), dim=-1))
        return torch.cat((none, logits), -1)

    def vision_loss(self, features: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Predict character, colour and index in the line from each patch. labels: (B, len(LABELS), GRID, GRID)."""
        target = dict(zip(LABELS, labels.flatten(2).unbind(1), strict=True))
        features = features.float()
        none = self.none(features)
        weight = torch.where(target["glyph"] > 0, 1.0, NONE_WEIGHT)

        def loss(logits: Tensor, name: str) -> Tensor:
            each = F.cross_entropy(logits.flatten(0, 1), target[name].flatten(), reduction="none")
            return (each * weight.flatten()).sum() / weight.sum()

        glyph = self._tied(features, self.characters, none[..., :1])
        color = self._tied(features, self.colors, none[..., 1:2])
        place = loss(self.index(features), "index") + loss(self.last(features), "last")
        return loss(glyph, "glyph") + loss(color, "color") + 0.5 * place, {
            "glyph": _accuracy(glyph, target["glyph"], target["glyph"] > 0),
            "color": _accuracy(color, target["color"], target["color"] > 0),
        }

    def position_loss(self, hidden: tuple[Tensor, ...], batch: PackedBatch) -> tuple[Tensor, dict[str, float]]:
        """Predict the character to the left after the first layer, and the one above after the second."""
        asked = []
        if len(batch.pixels):
            labels = dict(zip(LABELS, batch.labels.flatten(2).unbind(1), strict=True))
            here = labels["glyph"] > 0
            asked += [
                (layer, name, picture_patches(hidden[layer], batch)[here], labels[name][here])
                for layer, name in ((1, "left"), (2, "above"))
            ]
        if batch.text_labels is not None:
            here = batch.text_labels[0] != IGNORED
            asked += [
                (layer, f"text_{name}", hidden[layer][here], batch.text_labels[layer - 1][here])
                for layer, name in ((1, "left"), (2, "above"))
            ]
        total, metrics = 0.0, {}
        for layer, name, states, target in asked:
            states = states.float()
            states = F.rms_norm(states, states.shape[-1:])
            none = self.none(states)[:, 1 + layer : 2 + layer]
            logits = self._tied((self.left, self.above)[layer - 1](states), self.characters, none)
            total = total + F.cross_entropy(logits, target)
            metrics[name] = _accuracy(logits, target, target > 0)
        return total, metrics

    def context_loss(self, hidden: tuple[Tensor, ...], batch: PackedBatch) -> tuple[Tensor | float, dict[str, float]]:
        """Predict, after the second layer, which of several pictures a character is on, and the colour of the previous
        sign in a video; after the third layer, where an answer begins, PackedBatch.via."""
        asked = []
        rows = len(batch.ids)
        if batch.view == "base":
            glyph = batch.labels[:, LABELS.index("glyph")].flatten(1)
            number = torch.arange(1, 1 + len(glyph) // rows, device=glyph.device).repeat(rows)[:, None].expand_as(glyph)
            asked.append(("which", self.ordinals, picture_patches(hidden[2], batch), glyph, number))
        if batch.frames is not None:
            glyph = batch.frame_labels[:, LABELS.index("glyph")].flatten(1)[batch.frame_index]
            before = batch.before[..., None].expand_as(glyph)
            asked.append(("before", self.colors, frame_patches(hidden[2], batch), glyph, before))
        total, metrics = 0.0, {}
        if batch.via is not None and (here := batch.via != IGNORED).any():
            states = F.rms_norm(hidden[3][here].float(), hidden[3].shape[-1:])
            words = torch.tensor([*self.colors, *self.ordinals], device=states.device)
            logits = self._tied(self.context(states), words.tolist(), self.no_context(states))
            target = 1 + (batch.via[here][:, None] == words).long().argmax(-1)
            total = total + F.cross_entropy(logits, target)
            metrics["via"] = _accuracy(logits, target, target > 0)
        for name, tokens, states, glyph, target in asked:
            states = states[glyph > 0].float()
            states = F.rms_norm(states, states.shape[-1:])
            logits = self._tied(self.context(states), tokens, self.no_context(states))
            target = target[glyph > 0]
            total = total + F.cross_entropy(logits, target)
            metrics[name] = _accuracy(logits, target, target > 0)
        return total, metrics


def _accuracy(logits: Tensor, target: Tensor, where: Tensor) -> float:
    return (logits.argmax(-1) == target)[where].float().mean().item()
