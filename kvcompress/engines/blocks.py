"""Choose whole blocks of a prompt to evict, as a serving engine stores it: a block is of all layers and heads."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..clusters.base import KVCluster
from ..errors import KVCompressError, unknown_name
from ..methods import list_methods, make_method, method_info
from ..policy.make import make_policy
from ..scoring.layer_view import LayerView

NEEDS = {  # attribute of a method that is set -> why it cannot choose by keys and values alone
    "query_window": "it reads queries, which an engine does not keep",
    "second_pass": "it reads the prompt twice",
    "reads_hidden": "it reads hidden states, which an engine does not keep",
    "watches_rotary": "it reads keys before their rotation",
    "mixes_heads": "its choice depends on more than keys and values",
}
# Of a `LayerView`.
UNKNOWN = ("vision", "vision_rank", "vision_by_head", "frame_tokens", "question_lengths", "module", "rotary")


@dataclass(frozen=True)
class BlockEvictor:
    """A KV method that chooses among a prompt's blocks by their keys and values.

    A token's score is its rank in the prompt, a mean over layers and KV heads. A block's is that of its best token, so
    a block with an attention sink is worth as much as the sink. A last block that is not full always stays.
    """

    name: str
    method: KVCluster
    ratio: float

    @classmethod
    def of(cls, method: str, ratio: float, **options: object) -> "BlockEvictor":
        """Create one of a method's name, the share of the prompt that stays, and the method's own options.

        Raises KVCompressError for wrong ones, and for a method that needs more than keys and values."""
        info = method_info(method)
        if unknown := [option for option in options if option not in info.options]:
            raise unknown_name(
                f"method {info.name!r} in a serving engine has no option", unknown[0], [*info.options, "ratio"]
            )
        policy = make_policy(info.name, ratio, **options)
        drops_tokens = policy.tokens is not None
        obstacle = "it drops tokens of pictures and videos" if drops_tokens else obstacle_of(policy.cluster)
        if obstacle is not None:
            raise KVCompressError(
                f"method {info.name!r} cannot evict in a serving engine: {obstacle}; these can: {', '.join(carried())}"
            )
        return cls(info.name, policy.cluster, ratio)

    def evicted(
        self, layers: Iterable[tuple[torch.Tensor, torch.Tensor]], num_layers: int, tokens: int, size: int
    ) -> list[int]:
        """Return the blocks that leave, in ascending order.

        At least `ratio` of the prompt stays.

        Args:
            layers: keys and values of the prompt, each (kv_heads, tokens, head_dim), of each layer; they are taken one
                by one, because an engine's have to be copied.
            size: tokens of a block.
        """
        ranks: float | torch.Tensor = 0.0
        whole, leave = tokens // size, math.floor((1 - self.ratio) * tokens / size + 1e-9)
        if leave <= 0:
            return []
        for place, (keys, values) in enumerate(layers):
            view = LayerView(place, num_layers, [tokens], [math.ceil(self.ratio * tokens)], keys.shape[-1] ** -0.5)
            scores = self.method.final_scores(self.method.score(None, keys[None], values[None], view), view)
            ranks = ranks + scores[0].argsort(-1).argsort(-1).double().mean(0)
        best = ranks[: whole * size].view(whole, size).amax(-1)
        return best.argsort()[:leave].sort().values.tolist()


def obstacle_of(method: KVCluster) -> str | None:
    """Return why a method cannot choose among blocks by keys and values alone; None if it can."""
    for name, why in NEEDS.items():
        if getattr(method, name):
            return why
    if type(method).observe is not KVCluster.observe:
        return "it sums over queries, which an engine does not keep"
    if _reads_more(method):
        return "it reads where pictures and videos are, or the model"
    if (method.layer_budget, method.head_budget) != ("uniform", "uniform"):
        return "its layers or heads keep different tokens, and an engine's block is of all"
    return None


class _View(LayerView):
    """A view that does not know what an engine's blocks do not tell."""

    def __getattribute__(self, name: str) -> object:
        if name in UNKNOWN:
            raise _ReadsMore(name)
        return super().__getattribute__(name)


class _ReadsMore(Exception):
    pass


def _reads_more(method: KVCluster) -> bool:
    states, view = torch.ones(1, 1, 64, 16), _View(0, 1, [64], [32], 0.25)
    try:
        method.final_scores(method.score(None, states, states, view), view)
    except _ReadsMore:
        return True
    except KVCompressError:  # a calibration is missing, or of another model
        return False
    return False


def carried() -> list[str]:
    """Return the names of the methods that evict in an engine with their default options."""
    names = []
    for name, info in list_methods().items():
        if issubclass(info.cls, KVCluster) and name != "full" and obstacle_of(make_method(name)) is None:
            names.append(name)
    return names
