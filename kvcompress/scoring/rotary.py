"""The rotary position embedding of a forward pass: undone for queries that are there, foreseen for those to come.

RoPE turns each pair of channels of a query by position * inv_freq[i]: in most models (i, i + half), in some
(2 i, 2 i + 1). What the model really applied is taken from its rotary embedding's output, so M-RoPE, scaled frequencies
and padding need no formula of their own.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .windows import pad_columns

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Rotary:
    """How the columns of one forward pass are rotated.

    Attributes:
        cos, sin: (batch, columns, rotated), what the model multiplied queries and their rotated halves with, times
            `scaling`; channels of a head beyond `rotated` stay as they are.
        positions: LongTensor (batch, columns); under M-RoPE the largest of a token's three, after which text goes on.
        least: the same with the least of the three, None where a token has one position.
        inv_freq: (rotated / 2,), radians per position.
        scaling: factor in cos and sin, other than 1 with YaRN and the like.
        is_interleaved: whether neighbouring channels are a pair; cos and sin are in the other order all the same.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    inv_freq: torch.Tensor
    scaling: float = 1.0
    least: torch.Tensor | None = None
    is_interleaved: bool = False

    @classmethod
    def of(
        cls,
        config: "PreTrainedConfig",
        module: torch.nn.Module,
        states: torch.Tensor,
        positions: torch.Tensor,
        output: tuple[torch.Tensor, torch.Tensor],
        layer_type: str | None = None,
        pairs: "Pairs | None" = None,
    ) -> "Rotary":
        """From a call of a decoder's rotary embedding: the text model's config, the module, its arguments `states`
        (batch, columns, hidden) and `positions` ((3,) 1 or batch, columns), its output (cos, sin), and, where it
        serves several types of layers, which one. `pairs`: of channels, None for the usual ones."""
        pairs = pairs or Pairs()
        prefix = "" if layer_type is None else f"{layer_type}_"
        least = None
        if positions.ndim == 3:
            positions, least = positions.amax(0), positions.amin(0).expand(len(states), -1)
        cos, sin = (_merged_axes(config, angle).expand(len(states), -1, -1) for angle in output)
        if pairs.angles_interleaved:
            cos, sin = (angle[..., ::2].repeat(1, 1, 2) for angle in (cos, sin))
        inv_freq = getattr(module, f"{prefix}inv_freq")
        scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
        return cls(cos, sin, positions.expand(len(states), -1), inv_freq, scaling, least, pairs.are_interleaved)

    def to(self, device: torch.device) -> "Rotary":
        """On the device of a layer, where the layers are on several."""
        parts = {name: getattr(self, name) for name in ("cos", "sin", "positions", "inv_freq", "least")}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})

    def columns(self, columns: torch.Tensor) -> "Rotary":
        """Of these columns only, LongTensor (batch, width)."""
        rows = columns[..., None].expand(-1, -1, self.cos.shape[2])
        taken = {"cos": self.cos.gather(1, rows), "sin": self.sin.gather(1, rows)}
        if self.least is not None:
            taken["least"] = self.least.gather(1, columns)
        return replace(self, positions=self.positions.gather(1, columns), **taken)

    def rows(self, rows: torch.Tensor) -> "Rotary":
        """Of these rows of the batch only."""
        taken = {name: getattr(self, name) for name in ("cos", "sin", "positions", "least")}
        return replace(self, **{name: part[rows] for name, part in taken.items() if part is not None})

    def from_column(self, first: int) -> "Rotary":
        """Without the columns before it."""
        taken = {name: getattr(self, name) for name in ("cos", "sin", "positions", "least")}
        return replace(self, **{name: part[:, first:] for name, part in taken.items() if part is not None})

    def positions_of(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest and the least position of the tokens in these columns, LongTensors (batch, kv_heads, entries);
        columns behind the last are text."""
        last = self.positions.shape[1] - 1
        at = columns.clamp(min=0, max=last)
        behind = (columns - last).clamp(min=0)
        largest, least = (
            each[:, None].expand(-1, columns.shape[1], -1).gather(2, at)
            for each in (self.positions, self.positions if self.least is None else self.least)
        )
        text = largest + behind
        return text, torch.where(behind > 0, text, least)

    def moved(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Rotated keys (batch, kv_heads, entries, head_dim) as if their tokens stood `by` positions (batch, kv_heads,
        entries) later, on every axis."""
        angles = (by[..., None].float() * self.inv_freq.float()).repeat(1, 1, 1, 2)
        turned, rest = self._split(keys, angles.shape[-1])
        turned = turned * angles.cos() + rotate_half(turned) * angles.sin()
        return self._joined(turned, rest).to(keys.dtype)

    def without_pads(self, padding: torch.Tensor) -> "Rotary":
        """With -1 as the position of the pads, padding (batch, 1), so that no text follows them."""
        return replace(
            self, positions=self.positions.masked_fill(pad_columns(padding, self.positions.shape[1])[:, 0], -1)
        )

    def unrotated(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries of the last columns, (batch, heads, queries, head_dim), as they were before it, in fp32."""
        cos, sin = (angle[:, None, -queries.shape[2] :].float() for angle in (self.cos, self.sin))
        turned, rest = self._split(queries, cos.shape[-1])
        # The transposed rotation; cos and sin are of the model's precision, so their squares do not sum to exactly 1.
        turned = (turned * cos - rotate_half(turned) * sin) / (cos.square() + sin.square())
        return self._joined(turned, rest)

    def mean_rotation(self, count: int, head_dim: int, padding: torch.Tensor | None = None) -> torch.Tensor:
        """The mean rotation matrix over the `count` text positions that follow each row's last,
        (batch, head_dim, head_dim) in fp32; padding (batch, 1) as in scoring/windows.py."""
        return self.mean_rotation_at(1 + torch.arange(count, device=self.positions.device), head_dim, padding)

    def mean_rotation_at(self, ahead: torch.Tensor, head_dim: int, padding: torch.Tensor | None = None) -> torch.Tensor:
        """As `mean_rotation`, over the text positions that are so many, LongTensor (count,), ahead of each row's
        last."""
        positions = (self if padding is None else self.without_pads(padding)).positions
        future = positions.amax(1)[:, None] + ahead
        angles = future[..., None].float() * self.inv_freq.float()  # (batch, count, rotated / 2)
        cos, sin = (turn.mean(1).repeat(1, 2)[..., None] * self.scaling for turn in (angles.cos(), angles.sin()))
        rotated = cos.shape[1]
        unit = torch.eye(head_dim, device=positions.device)
        rotation = unit.repeat(len(positions), 1, 1)
        unit = unit[:rotated, :rotated]
        turn = cos * unit + sin * rotate_half(unit).T
        if self.is_interleaved:
            turn = interleaved(interleaved(turn).mT).mT
        rotation[:, :rotated, :rotated] = turn
        return rotation

    def pair_norms(self, states: torch.Tensor) -> torch.Tensor:
        """The norm of each rotated pair of channels, which no rotation changes: states (..., head_dim) to (...,
        rotated / 2), in the order of `inv_freq`."""
        turned, _ = self._split(states, self.cos.shape[-1])
        return torch.stack(turned.chunk(2, dim=-1)).norm(dim=0)

    def _split(self, states: torch.Tensor, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Channels of states (..., head_dim) in fp32: the rotated ones, so that (i, i + half) is a pair; the rest."""
        turned, rest = states.float().split([rotated, states.shape[-1] - rotated], dim=-1)
        if self.is_interleaved:
            turned = torch.cat([turned[..., ::2], turned[..., 1::2]], dim=-1)
        return turned, rest

    def _joined(self, turned: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """What `_split` took apart."""
        return torch.cat([interleaved(turned) if self.is_interleaved else turned, rest], dim=-1)


@dataclass(frozen=True)
class Pairs:
    """Which channels a model turns together, and how its rotary embedding orders the angles.

    Attributes:
        are_interleaved: pairs are (2 i, 2 i + 1), not (i, i + half).
        angles_interleaved: cos and sin have each pair's angle at 2 i and 2 i + 1, not at i and i + half.
    """

    are_interleaved: bool = False
    angles_interleaved: bool = False


def rotate_half(states: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (-b, a) for the two halves of the last dimension."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def interleaved(states: torch.Tensor) -> torch.Tensor:
    """The two halves of the last dimension, alternating."""
    return torch.stack(states.chunk(2, dim=-1), dim=-1).flatten(-2)


def _merged_axes(config: "PreTrainedConfig", angle: torch.Tensor) -> torch.Tensor:
    """cos or sin as the attention applies it, (batch, columns, rotated). Up to transformers 5.14 or so, Qwen2-VL's
    M-RoPE comes as (3, batch, columns, rotated), for time, height and width, and its attention takes sections of each.
    """
    if angle.ndim == 3:
        return angle
    sections = config.rope_parameters["mrope_section"] * 2
    return torch.cat([part[i % 3] for i, part in enumerate(angle.split(sections, dim=-1))], dim=-1)
