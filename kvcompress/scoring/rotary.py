"""The rotary position embedding of a forward pass: undone for existing queries, computed ahead for future ones.

RoPE rotates each pair of channels of a query by position * inv_freq[i]; pairs are (i, i + half) in most models and (2
i, 2 i + 1) in some. The rotation is read from the output of the model's rotary embedding, so M-RoPE, scaled frequencies
and padding need no formulas of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from .windows import pad_columns

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Rotary:
    """The rotation of the columns of one forward pass.

    Attributes:
        cos, sin: (batch, columns, rotated), the model's factors for queries and their rotated halves, times `scaling`;
            channels of a head beyond `rotated` are not rotated.
        positions: LongTensor (batch, columns); under M-RoPE the largest of a token's three, from which text continues.
        least: the same with the smallest of the three; None if a token has one position.
        inv_freq: (rotated / 2,), radians per position.
        scaling: factor in cos and sin, other than 1 with YaRN and similar methods.
        is_interleaved: whether neighbouring channels form a pair; cos and sin are in the order of halves either way.
        _known: what one layer has computed and the others need, too.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    inv_freq: torch.Tensor
    scaling: float = 1.0
    least: torch.Tensor | None = None
    is_interleaved: bool = False
    _known: dict[object, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def per_column(self) -> list[torch.Tensor]:
        """Return what it holds for each column: tensors (batch, columns, size)."""
        each = [self.cos, self.sin, self.positions[..., None]]
        return each if self.least is None else [*each, self.least[..., None]]

    def of_columns(self, columns: list[torch.Tensor]) -> "Rotary":
        """Return the rotation of other columns, for which `per_column` returned these tensors."""
        cos, sin, positions, *least = columns
        smallest = least[0][..., 0] if least else None
        return replace(self, cos=cos, sin=sin, positions=positions[..., 0], least=smallest)

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
        """Create the rotation from one call of a decoder's rotary embedding.

        Args:
            config: the text model's config.
            module: the rotary embedding.
            states: its argument, (batch, columns, hidden).
            positions: its argument, ((3,) 1 or batch, columns).
            output: its output (cos, sin).
            layer_type: the type of layers, if the module serves several.
            pairs: the pairs of channels, None for the usual ones.
        """
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
        """Move to the device of a layer, for models whose layers are on several devices."""
        if {part.device for part in (self.cos, self.positions, self.inv_freq)} == {device}:
            return self
        return self._with_each(lambda part: part.to(device), "inv_freq")

    def columns(self, columns: torch.Tensor) -> "Rotary":
        """Return the rotation of these columns only, LongTensor (batch, width)."""
        whole = columns[..., None].expand(-1, -1, self.cos.shape[2])
        return self._with_each(lambda part: part.gather(1, columns if part.ndim == 2 else whole))

    def rows(self, rows: torch.Tensor) -> "Rotary":
        """Return the rotation of these rows of the batch only."""
        return self._with_each(lambda part: part[rows])

    def from_column(self, first: int) -> "Rotary":
        """Return the rotation without the columns before `first`."""
        return self._with_each(lambda part: part[:, first:])

    def _with_each(self, change: Callable[[torch.Tensor], torch.Tensor], *further: str) -> "Rotary":
        """Return the rotation with a change of what it holds for each column, and of the fields `further`."""
        parts = {name: getattr(self, name) for name in ("cos", "sin", "positions", "least", *further)}
        return replace(self, **{name: change(part) for name, part in parts.items() if part is not None})

    def positions_of(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest and smallest position of the tokens in `columns`, (batch, kv_heads, entries).

        Columns after the last are text."""
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
        """Move rotated keys (batch, kv_heads, entries, head_dim) `by` positions (batch, kv_heads, entries) ahead."""
        angles = (by[..., None].float() * self.inv_freq.float()).repeat(1, 1, 1, 2)
        turned, rest = self._split(keys, angles.shape[-1])
        turned = turned * angles.cos() + rotate_half(turned) * angles.sin()
        return self._joined(turned, rest).to(keys.dtype)

    def without_pads(self, padding: torch.Tensor) -> "Rotary":
        """Set the position of pads, padding (batch, 1), to -1, so that no text continues from them."""
        return replace(
            self, positions=self.positions.masked_fill(pad_columns(padding, self.positions.shape[1])[:, 0], -1)
        )

    def unrotated(self, queries: torch.Tensor) -> torch.Tensor:
        """Undo the rotation of the last columns' queries, (batch, heads, queries, head_dim); returns fp32."""
        cos, sin, squares = self._transposed(queries.shape[2])
        turned, rest = self._split(queries, cos.shape[-1])
        return self._joined((turned * cos + swapped(turned) * sin) / squares, rest)

    def _transposed(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the transposed rotation of the last `width` columns: the factors of states and of `swapped` states,
        and the sum of their squares, which is not exactly 1, as cos and sin have the model's precision.

        All are (batch, 1, width, rotated) in fp32. Those of a decode step are kept for the other layers; a prompt's
        would take too much memory."""
        if "transposed" in self._known:
            return self._known["transposed"]
        cos, sin = (angle[:, None, -width:].float() for angle in (self.cos, self.sin))
        first, second = sin.chunk(2, dim=-1)
        made = cos, torch.cat([first, -second], dim=-1), cos.square() + sin.square()
        if self.cos.shape[1] == 1:
            self._known["transposed"] = made
        return made

    def mean_rotation(self, count: int, head_dim: int, padding: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean rotation matrix over the `count` text positions that follow each row's last.

        The result is (batch, head_dim, head_dim) in fp32; padding (batch, 1) is as in scoring/windows.py."""
        known = self._known if padding is None else {}
        if (count, head_dim) not in known:
            ahead = 1 + torch.arange(count, device=self.positions.device)
            known[count, head_dim] = self.mean_rotation_at(ahead, head_dim, padding)
        return known[count, head_dim]

    def mean_rotation_at(self, ahead: torch.Tensor, head_dim: int, padding: torch.Tensor | None = None) -> torch.Tensor:
        """Return `mean_rotation` over the text positions `ahead` of each row's last, LongTensor (count,)."""
        positions = (self if padding is None else self.without_pads(padding)).positions
        future = positions.amax(1)[:, None] + ahead
        angles = future[..., None].float() * self.inv_freq.float()  # (batch, count, rotated / 2)
        cos, sin = (turn.mean(1).repeat(1, 2)[..., None] * self.scaling for turn in (angles.cos(), angles.sin()))
        rotated = cos.shape[1]
        unit = torch.eye(head_dim, dtype=torch.float32, device=positions.device)
        rotation = unit.repeat(len(positions), 1, 1)
        unit = unit[:rotated, :rotated]
        turn = cos * unit + sin * rotate_half(unit).T
        if self.is_interleaved:
            turn = interleaved(interleaved(turn).mT).mT
        rotation[:, :rotated, :rotated] = turn
        return rotation

    def pair_norms(self, states: torch.Tensor) -> torch.Tensor:
        """Return the norm of each rotated pair of channels, which no rotation changes.

        Maps states (..., head_dim) to (..., rotated / 2), in the order of `inv_freq`."""
        turned, _ = self._split(states, self.cos.shape[-1])
        return torch.stack(turned.chunk(2, dim=-1)).norm(dim=0)

    def _split(self, states: torch.Tensor, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Split states (..., head_dim), in fp32, into rotated channels, with pairs (i, i + half), and the rest."""
        turned, rest = states.float().split([rotated, states.shape[-1] - rotated], dim=-1)
        if self.is_interleaved:
            turned = torch.cat([turned[..., ::2], turned[..., 1::2]], dim=-1)
        return turned, rest

    def _joined(self, turned: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """Undo `_split`."""
        if not rest.shape[-1] and not self.is_interleaved:
            return turned
        return torch.cat([interleaved(turned) if self.is_interleaved else turned, rest], dim=-1)


@dataclass(frozen=True)
class Pairs:
    """Which channels a model rotates together, and how its rotary embedding orders the angles.

    Attributes:
        are_interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + half).
        angles_interleaved: cos and sin have each pair's angle at 2 i and 2 i + 1 instead of i and i + half.
    """

    are_interleaved: bool = False
    angles_interleaved: bool = False


def rotate_half(states: torch.Tensor) -> torch.Tensor:
    """Map the halves (a, b) of the last dimension to (-b, a)."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def swapped(states: torch.Tensor) -> torch.Tensor:
    """Map the halves (a, b) of the last dimension to (b, a)."""
    return states.roll(states.shape[-1] // 2, -1)


def interleaved(states: torch.Tensor) -> torch.Tensor:
    """Interleave the two halves of the last dimension."""
    return torch.stack(states.chunk(2, dim=-1), dim=-1).flatten(-2)


def _merged_axes(config: "PreTrainedConfig", angle: torch.Tensor) -> torch.Tensor:
    """Return cos or sin as the attention applies it: (batch, columns, rotated).

    Up to transformers 5.14 or so, Qwen2-VL's M-RoPE has the shape (3, batch, columns, rotated), for time, height and
    width, and its attention takes sections of each.
    """
    if angle.ndim == 3:
        return angle
    sections = config.rope_parameters["mrope_section"] * 2
    return torch.cat([part[i % 3] for i, part in enumerate(angle.split(sections, dim=-1))], dim=-1)
