"""Scores of a prompt's entries by what its answer needs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .projection import output_projection

BLOCK = 128  # queries whose weights are in memory at a time


@dataclass(frozen=True)
class Answer:
    """One layer's states of a prompt and its answer.

    Attributes:
        queries: (batch, heads, queries, head_dim), rotated.
        keys, values: (batch, kv_heads, keys, head_dim), of the prompt and the answer.
        visible: bool (batch, 1 or kv_heads, queries, keys), the keys that each query sees. A query that sees none has
            no vote.
        scaling: factor of q·k before the softmax.
        module: the model's attention module.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor
    scaling: float
    module: torch.nn.Module

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield attention weights (batch, kv_heads, groups, queries, keys) in fp32, one block of queries at a time."""
        keys = self.keys.float()[:, :, None].transpose(3, 4)
        for start in range(0, self.queries.shape[2], BLOCK):
            some = slice(start, start + BLOCK)
            logits = self.queries[:, :, some].float().unflatten(1, (keys.shape[1], -1)) @ keys * self.scaling
            visible = self.visible[:, :, None, some]
            yield logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)


def attention_mass(answer: Answer) -> torch.Tensor:
    """Return the attention that each key receives: (batch, kv_heads, keys).

    It is summed over the queries and averaged over the query heads of a KV head."""
    return sum(weights.sum(3).mean(2) for weights in answer.weights())


def output_error(answer: Answer) -> torch.Tensor:
    """Return how much the layer's output would change without each key: (batch, kv_heads, keys).

    It is the squared error, summed over the queries and the query heads of a KV head. Without key j, a head's output o
    = sum_i a_i v_i becomes (o - a_j v_j) / (1 - a_j), a change of a_j / (1 - a_j) * (o - v_j). The error is taken after
    the head's part W of the output projection; ||W (o - v_j)||^2 needs only W^T W.
    """
    values = answer.values.float()
    projection = output_projection(answer.module, values.shape[1], values.shape[3], "hindsight")
    gram = (projection @ projection.transpose(2, 3)).transpose(0, 1)  # (kv_heads, groups, head_dim, head_dim)
    values = values[:, :, None]  # (batch, kv_heads, 1, keys, head_dim)
    of_values = ((values @ gram) * values).sum(-1)[:, :, :, None]
    total = torch.zeros(answer.keys.shape[:3], dtype=torch.float32, device=values.device)
    for weights in answer.weights():
        outputs = weights @ values
        projected = outputs @ gram
        distance = (projected * outputs).sum(-1, keepdim=True) - 2 * projected @ values.transpose(3, 4) + of_values
        odds = weights / (1 - weights).clamp(min=1e-6)
        total += (odds.square() * distance.clamp(min=0)).sum((2, 3))
    return total
