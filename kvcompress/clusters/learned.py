"""`LearnedKVCluster`, the base class of methods whose scores small trained models predict from hidden states."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..errors import KVCompressError, MissingFile
from ..learned.checkpoints import Trained, Weights
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LearnedKVCluster(KVCluster):
    """A method that predicts a token's score from the hidden state that enters its attention layer.

    `checkpoint` names the weights, which were trained for the model. The score is known as soon as the token is read
    and never changes, so it is stored with the entry."""

    checkpoint: str | None = None

    is_checkable: ClassVar[bool] = False
    query_window: ClassVar[int] = 0
    reads_hidden: ClassVar[bool] = True
    mixes_heads: ClassVar[bool] = True  # the weights cover all heads

    @staticmethod
    def trained(checkpoint: str) -> Trained:
        """Load a checkpoint in the method's layout. Raises KVCompressError."""
        raise TypeError("a learned method must define trained")

    def scores_of(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Return scores (batch, kv_heads, tokens), from hidden states (batch, tokens, hidden_size)."""
        raise TypeError(f"{type(self).__name__} does not define scores_of")

    def hidden_features(self, hidden: torch.Tensor, layer_idx: int) -> torch.Tensor:
        weights = self.trained(self.checkpoint).weights(layer_idx, hidden)
        return self.scores_of(hidden, weights).float()[..., None]

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return the predicted scores as sums. `queries` are those of the latest tokens, (batch, kv_heads, tokens,
        1)."""
        predicted = queries[..., 0]
        if not view.is_decoding:
            return predicted
        place = view.stored.columns - (view.stored.seen - predicted.shape[2])  # among the latest tokens
        at = place.clamp(0, predicted.shape[2] - 1)
        return torch.where((place == at), predicted.gather(2, at), 0.0)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return self.summed(queries, keys, view)


def check_checkpoint(cluster: KVCluster, method: str) -> None:
    """Raise KVCompressError if a learned method has no readable checkpoint."""
    if isinstance(cluster, LearnedKVCluster):
        if cluster.checkpoint is None:
            raise MissingFile(f"method {method!r} is learned: it needs checkpoint=, a local path or a hub id")
        cluster.trained(cluster.checkpoint)


def check_learned_for(cluster: KVCluster, config: "PreTrainedConfig") -> None:
    """Raise KVCompressError if the checkpoint was trained for a model that does not match this config."""
    if not isinstance(cluster, LearnedKVCluster):
        return
    trained, text = cluster.trained(cluster.checkpoint), config.get_text_config(decoder=True)
    for what, ours, theirs in (
        ("layers", len(trained.layers), text.num_hidden_layers),
        ("hidden size", trained.hidden_size, text.hidden_size),
        ("KV heads", trained.kv_heads, text.num_key_value_heads),
    ):
        if ours != theirs:
            raise KVCompressError(
                f"checkpoint={cluster.checkpoint!r} was trained for another model: its {what}: {ours}, "
                f"this {config.model_type}'s: {theirs}"
            )
