"""What a method is that knows the model beforehand, from a calibration file (docs/calibration.md)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from ..calibration import files
from ..command_line import called
from ..errors import KVCompressError, MissingFile
from ..layer_budgets import LayerBudget
from ..methods import name_of
from ..scoring.layer_view import LayerView
from .base import KVCluster

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class CalibratedKVCluster(KVCluster):
    """A method that is calibrated: `gather` looks at a layer's states in each prompt, `known_from` makes of the sums
    what `score` asks for, by name, as `self.known(name, view)`. In between is a file, the option `calibration`.

    What only all layers of a prompt together say, `of_prompt` makes of what they gathered."""

    calibration: str | None = None

    needs_calibration: ClassVar[bool] = True  # else it is an option
    calibrated: ClassVar[files.Shapes] = {}  # name -> its dimensions, see `calibration.files.check_tensors`

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        """What one layer of one prompt adds. Arguments as in `score`, with a batch of one and rotated queries; a method
        that `watches_rotary` finds in `view.rotary` how."""
        raise TypeError(f"{type(self).__name__} does not define gather")

    def of_prompt(self, gathered: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a prompt adds to the sums, from what its layers gathered: (layers, ...) of each, in float64."""
        return gathered

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the file, from the sums over all prompts, in float64."""
        return sums

    @property
    def calibration_file(self) -> Path | None:
        """What `calibration` says."""
        return self.calibration and files.file_of(self.calibration, name_of(type(self)))

    @property
    def known_layer_budget(self) -> LayerBudget | None:
        """Where the file says what each layer keeps: that, in the place of the layer budget that is prescribed."""
        return None

    @classmethod
    def from_published(cls, path: Path, model: files.ModelIdentity) -> dict[str, torch.Tensor]:
        """The tensors of the file, from one that the method's authors have published. Raises KVCompressError."""
        raise KVCompressError(f"{cls.__name__}: there is no published file that can be read; give --text")

    def known(self, name: str, view: LayerView, device: torch.device) -> torch.Tensor:
        """This layer's part of one of `calibrated`, without the dimension of layers, in fp32."""
        return self.known_whole(name)[view.place].to(device)

    def known_whole(self, name: str) -> torch.Tensor:
        """One of `calibrated`, of all layers, in fp32 on the CPU."""
        if self.calibration_file is None:
            raise KVCompressError(f"{type(self).__name__} needs calibration=FILE")
        return files.load(self.calibration_file).tensors[name]


def check_calibration(cluster: KVCluster, method: str) -> None:
    """Raises KVCompressError where a method lacks the file that it needs, or was given another's."""
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
    """Raises KVCompressError where the method's file is of another model than one of this config, of which `layers` are
    compressed."""
    if isinstance(cluster, CalibratedKVCluster) and (file := cluster.calibration_file) is not None:
        files.check_model(files.load(file), file, config, layers)


def options_of(cluster: CalibratedKVCluster) -> dict[str, object]:
    """The options of a method but the file."""
    return {name: value for name, value in asdict(cluster).items() if name != "calibration"}
