"""The rotary position embedding of a forward pass: undone for queries that are there, foreseen for those to come.

RoPE turns each pair of channels (i, i + half) of a query by position * inv_freq[i]. What the model really applied is
taken from its rotary embedding's output, so M-RoPE, scaled frequencies and padding need no formula of their own.
"""

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from .windows import pad_columns


@dataclass(frozen=True)
class Rotary:
    """How the columns of one forward pass are rotated.

    Attributes:
        cos, sin: (batch, columns, rotated), what the model multiplied queries and their rotated halves with, times
            `scaling`; channels of a head beyond `rotated` stay as they are.
        positions: LongTensor (batch, columns); under M-RoPE the largest of a token's three, after which text goes on.
        inv_freq: (rotated / 2,), radians per position.
        scaling: factor in cos and sin, other than 1 with YaRN and the like.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    inv_freq: torch.Tensor
    scaling: float = 1.0

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        module: torch.nn.Module,
        states: torch.Tensor,
        positions: torch.Tensor,
        output: tuple[torch.Tensor, torch.Tensor],
        layer_type: str | None = None,
    ) -> "Rotary":
        """From a call of a decoder's rotary embedding: the text model's config, the module, its arguments `states`
        (batch, columns, hidden) and `positions` ((3,) 1 or batch, columns), its output (cos, sin), and, where it
        serves several types of layers, which one."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        if positions.ndim == 3:
            positions = positions.amax(0)
        cos, sin = (_merged_axes(config, angle).expand(len(states), -1, -1) for angle in output)
        inv_freq = getattr(module, f"{prefix}inv_freq")
        scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
        return cls(cos, sin, positions.expand(len(states), -1), inv_freq, scaling)

    def to(self, device: torch.device) -> "Rotary":
        """On the device of a layer, where the layers are on several."""
        names = ("cos", "sin", "positions", "inv_freq")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def columns(self, columns: torch.Tensor) -> "Rotary":
        """Of these columns only, LongTensor (batch, width)."""
        rows = columns[..., None].expand(-1, -1, self.cos.shape[2])
        taken = {"cos": self.cos.gather(1, rows), "sin": self.sin.gather(1, rows)}
        return replace(self, positions=self.positions.gather(1, columns), **taken)

    def without_pads(self, padding: torch.Tensor) -> "Rotary":
        """With -1 as the position of the pads, padding (batch, 1), so that no text follows them."""
        return replace(
            self, positions=self.positions.masked_fill(pad_columns(padding, self.positions.shape[1])[:, 0], -1)
        )

    def unrotated(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries of the last columns, (batch, heads, queries, head_dim), as they were before it, in fp32."""
        cos, sin = (angle[:, None, -queries.shape[2] :].float() for angle in (self.cos, self.sin))
        turned, rest = queries.float().split([cos.shape[-1], queries.shape[-1] - cos.shape[-1]], dim=-1)
        # The transposed rotation; cos and sin are of the model's precision, so their squares do not sum to exactly 1.
        turned = (turned * cos - rotate_half(turned) * sin) / (cos.square() + sin.square())
        return torch.cat([turned, rest], dim=-1)

    def mean_rotation(self, count: int, head_dim: int, padding: torch.Tensor | None = None) -> torch.Tensor:
        """The mean rotation matrix over the `count` text positions that follow each row's last,
        (batch, head_dim, head_dim) in fp32; padding (batch, 1) as in scoring/windows.py."""
        positions = (self if padding is None else self.without_pads(padding)).positions
        future = positions.amax(1)[:, None] + 1 + torch.arange(count, device=positions.device)
        angles = future[..., None].float() * self.inv_freq.float()  # (batch, count, rotated / 2)
        cos, sin = (turn.mean(1).repeat(1, 2)[..., None] * self.scaling for turn in (angles.cos(), angles.sin()))
        rotated = cos.shape[1]
        unit = torch.eye(head_dim, device=positions.device)
        rotation = unit.repeat(len(positions), 1, 1)
        unit = unit[:rotated, :rotated]
        rotation[:, :rotated, :rotated] = cos * unit + sin * rotate_half(unit).T
        return rotation


def rotate_half(states: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (-b, a) for the two halves of the last dimension."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _merged_axes(config: PreTrainedConfig, angle: torch.Tensor) -> torch.Tensor:
    """cos or sin as the attention applies it, (batch, columns, rotated). Up to transformers 5.14 or so, Qwen2-VL's
    M-RoPE comes as (3, batch, columns, rotated), for time, height and width, and its attention takes sections of each.
    """
    if angle.ndim == 3:
        return angle
    sections = config.rope_parameters["mrope_section"] * 2
    return torch.cat([part[i % 3] for i, part in enumerate(angle.split(sections, dim=-1))], dim=-1)
