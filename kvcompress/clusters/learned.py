"""What a method is whose scores were learned: small models foretell them from hidden states, token by token."""

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
    """A token's score follows from the hidden state that its attention layer is given, as weights that were trained for
    the model have it; `checkpoint` is where they are. It is known when the token is read, and never changes: stored
    entries carry theirs with them."""

    checkpoint: str | None = None

    query_window: ClassVar[int] = 0
    reads_hidden: ClassVar[bool] = True
    mixes_heads: ClassVar[bool] = True  # the weights are those of all heads

    @staticmethod
    def trained(checkpoint: str) -> Trained:
        """Loads a checkpoint of the method's layout. Raises KVCompressError."""
        raise TypeError("a learned method says how its checkpoints are read")

    def scores_of(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """(batch, kv_heads, tokens), from hidden states (batch, tokens, hidden_size) and a layer's weights."""
        raise TypeError(f"{type(self).__name__} does not define scores_of")

    def foretell(self, hidden: torch.Tensor, layer_idx: int) -> torch.Tensor:
        weights = self.trained(self.checkpoint).weights(layer_idx, hidden)
        return self.scores_of(hidden, weights).float()[..., None]

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """`queries` are what was foretold of the latest tokens, (batch, kv_heads, tokens, 1)."""
        foretold = queries[..., 0]
        if not view.is_decoding:
            return foretold
        place = view.stored.columns - (view.stored.seen - foretold.shape[2])  # among the latest
        at = place.clamp(0, foretold.shape[2] - 1)
        return torch.where((place == at), foretold.gather(2, at), 0.0)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return self.summed(queries, keys, view)


def check_checkpoint(cluster: KVCluster, method: str) -> None:
    """Raises KVCompressError where a learned method has no checkpoint that can be read."""
    if isinstance(cluster, LearnedKVCluster):
        if cluster.checkpoint is None:
            raise MissingFile(f"method {method!r} is learned: it needs checkpoint=, a local path or a hub id")
        cluster.trained(cluster.checkpoint)


def check_learned_for(cluster: KVCluster, config: "PreTrainedConfig") -> None:
    """Raises KVCompressError where a checkpoint was trained for another model than one of this config."""
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
