"""`CalibratedKVCluster`, the base class of methods that use a model's calibration file (docs/calibration.md)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from ..calibration import files
from ..command_line import called
from ..errors import KVCompressError, MissingFile, unknown_name
from ..layer_budgets import LayerBudget
from ..methods import name_of
from ..scoring.layer_view import LayerView
from .base import KVCluster

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class CalibratedKVCluster(KVCluster):
    """A method that is calibrated on a model beforehand.

    During calibration, `gather` measures one layer's states in each prompt, `of_prompt` may combine what all layers of
    a prompt gathered, and `known_from` turns the sums over all prompts into named tensors. They are saved in a file,
    the option `calibration`; `score` reads them with `self.known(name, view, device)`."""

    calibration: str | None = None

    needs_calibration: ClassVar[bool] = True  # False: calibration is optional
    calibrated: ClassVar[files.Shapes] = {}  # name -> dimensions, see `calibration.files.check_tensors`

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        """Return what one layer of one prompt adds to the sums.

        Arguments are as in `score`, with a batch of one and rotated queries; a method that `watches_rotary` finds their
        rotation in `view.rotary`."""
        raise TypeError(f"{type(self).__name__} does not define gather")

    def of_prompt(self, gathered: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what a prompt adds to the sums, from what its layers gathered: each (layers, ...), in float64."""
        return gathered

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the tensors of the file from the sums over all prompts, in float64."""
        return sums

    @property
    def calibration_file(self) -> Path | None:
        """The path that the option `calibration` names."""
        return self.calibration and files.file_of(self.calibration, name_of(type(self)))

    @property
    def known_layer_budget(self) -> LayerBudget | None:
        """The layer budget that the file holds, which replaces the method's own; None if it holds none."""
        return None

    @classmethod
    def from_published(cls, path: Path, model: files.ModelIdentity) -> dict[str, torch.Tensor]:
        """Read the tensors of the file from one that the method's authors published. Raises KVCompressError."""
        raise KVCompressError(f"{cls.__name__}: there is no published file that can be read; give --text")

    def known(self, name: str, view: LayerView, device: torch.device) -> torch.Tensor:
        """Return this layer's slice of a `calibrated` tensor, without the layer dimension, in fp32."""
        return self.known_whole(name)[view.place].to(device)

    def known_whole(self, name: str) -> torch.Tensor:
        """Return a `calibrated` tensor for all layers, in fp32 on the CPU."""
        if self.calibration_file is None:
            raise KVCompressError(f"{type(self).__name__} needs calibration=FILE")
        tensors = files.load(self.calibration_file).tensors
        if name not in tensors:
            raise unknown_name(f"{type(self).__name__}: calibrated has no tensor", name, tensors)
        return tensors[name]


def check_calibration(cluster: KVCluster, method: str) -> None:
    """Raise KVCompressError if a method lacks the file that it needs, or was given another method's."""
    if not isinstance(cluster, CalibratedKVCluster):
        return
    if (file := cluster.calibration_file) is not None:
        files.check_method(files.load(file), file, method, cluster.calibrated)
    elif cluster.needs_calibration:
        raise MissingFile(
            f"method {method!r} needs calibration=FILE, made by: "
            f"{called('calibrate')} MODEL --method {method} --text TEXT --out FILE"
        )


def check_calibrated_for(cluster: KVCluster, config: "PreTrainedConfig", layers: int) -> None:
    """Raise KVCompressError if the method's file belongs to a model that does not match this config.

    `layers` is the number of layers that are compressed."""
    if isinstance(cluster, CalibratedKVCluster) and (file := cluster.calibration_file) is not None:
        files.check_model(files.load(file), file, config, layers)


def options_of(cluster: CalibratedKVCluster) -> dict[str, object]:
    """Return the options of a method except `calibration`."""
    return {name: value for name, value in asdict(cluster).items() if name != "calibration"}
