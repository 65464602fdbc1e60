"""PrefixKV: every layer keeps the same share of its attention. https://arxiv.org/abs/2412.03409"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import NonNegativeInt, PositiveInt

from ..calibration.files import ModelIdentity, Shapes
from ..calibration.published import json_in
from ..errors import KVCompressError, shown
from ..layer_budgets.prefix import KnownPrefixLayerBudget, PrefixLayerBudget
from ..methods import register_method
from ..scoring.layer_view import Kept, LayerView
from ..scoring.rows import handles_padding
from .calibrated import CalibratedKVCluster
from .h2o import H2OKVCluster

RATIOS = 100  # evenly spaced ratios at which a calibration stores layer sizes
PUBLISHED = 10  # ratios for which the authors published a file


@register_method("prefixkv")
@dataclass(frozen=True)
class PrefixKVCluster(CalibratedKVCluster):
    """Keeps the first `sinks` tokens, the last one, and the keys with the most attention over all queries and heads.

    All heads keep the same keys; 4 sinks are as in the paper's code.

    Layers share the budget so that each keeps about the same part of its attention (`layer_budget="prefix"`), found for
    each prompt. The paper finds the shares once, on ten samples, and reuses them. So does `calibration=`: it stores
    what each layer keeps at every hundredth of the prompt, averaged over the calibration prompts, and no layer has to
    wait for the others.

    While decoding, every step evicts the entry that is `distance` entries from the end of what the prompt has left, as
    in the authors' code (prefixkv.py, `selected_idxs`). Entries before it stay for good; entries after it form a
    sliding window.
    """

    sinks: NonNegativeInt = 4
    distance: PositiveInt = 25

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.03409"
    layer_budget: ClassVar[str] = "prefix"
    head_budget: ClassVar[str] = "shared"
    decode_interval: ClassVar[int] = 1
    query_window: ClassVar[int] = 0  # `observe` has already seen them
    needs_calibration: ClassVar[bool] = False
    calibrated: ClassVar[Shapes] = {"sizes": ("layers", "ratios")}

    observe = H2OKVCluster.observe

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return self.summed(queries, keys, view) if view.noted is None else self.place(keys, view)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        return super().final_scores(view.protect_sinks(scores, self.sinks), view)

    def note(self, kept: Kept, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return the slot of each head that is evicted from now on."""
        if view.noted is not None:
            return view.noted
        entries = (kept.indices >= 0).sum(2)
        if view.earlier is not None:
            entries = entries + view.earlier
        return torch.where(entries > self.distance, entries - self.distance, entries // 2)

    def place(self, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return scores that rank later entries higher; entries before the evicted slot stay."""
        place = view.positions(keys)
        return torch.where(place < view.noted[..., None], torch.inf, place)

    # -- layer sizes from a calibration

    @property
    def known_layer_budget(self) -> KnownPrefixLayerBudget | None:
        return None if self.calibration is None else KnownPrefixLayerBudget(self.known_whole("sizes"))

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        return {"scores": view.column_sums(queries, keys)[0].mean(0)}

    def of_prompt(self, gathered: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes = PrefixLayerBudget().sizes(gathered["scores"], RATIOS)
        return {"sizes": sizes, "prompts": sizes.new_ones(len(sizes), 1)}

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sizes": sums["sizes"] / sums["prompts"]}

    @classmethod
    def from_published(cls, path: Path, model: ModelIdentity) -> dict[str, torch.Tensor]:
        """Read the authors' ten files `confs/prefixkv_MODEL_RATIO.json` of a model, given any one of them.

        Their ratios, 0.0 to 0.9, are the parts that are evicted."""
        beginning = path.name.rpartition("_")[0]
        forgotten = []
        for part in reversed(range(PUBLISHED)):
            one = path.with_name(f"{beginning}_{part / PUBLISHED}.json")
            if path.is_file() and not one.is_file():
                raise KVCompressError(f"{shown(str(path))} is one of {PUBLISHED} files: {one.name} is not next to it")
            forgotten.append(json_in(one if path.is_file() else path))
        try:
            return {"sizes": 1 - torch.tensor(forgotten).T.float()}
        except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise KVCompressError(f"{shown(str(path))} and those next to it do not list layers: {error}") from None
