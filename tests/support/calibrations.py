"""Calibrations of the tiny models, created on demand, so that calibrated methods are tested like all others.

kvcompress.compress(model, method, 0.3, **calibration_of(method, model))"""

import inspect
import tempfile
from pathlib import Path

import torch

import kvcompress
from kvcompress.calibration import files
from kvcompress.check.promises import Checked
from kvcompress.clusters.calibrated import CalibratedKVCluster
from kvcompress.clusters.learned import LearnedKVCluster
from kvcompress.methods import method_info
from tests.support.families import FIRST_TEXT, VOCAB_SIZE
from tests.support.learned_checkpoints import checkpoint_for

PROMPTS, LENGTH = 3, 24
SMALL = {"sinks": 2, "recent": 4}  # for calibrations that exclude them: shorter than the prompts

_folder = tempfile.TemporaryDirectory(prefix="calibrations-")
_made: dict[tuple[str, str], str] = {}


def checked(method: str, **options: object) -> Checked:
    """Return what `kvcompress check` makes of a method, with what it needs of check's models."""
    this = Checked(method)
    this.of_model = {tried.name: needs_of(method, tried.model) for tried in this.tried}
    this.options = options | this.of_model["qwen2"]
    return this


def needs_of(method: str, model: torch.nn.Module) -> dict[str, str]:
    """Return the option `calibration` or `checkpoint` for a method that needs it."""
    is_learned = issubclass(method_info(method).cls, LearnedKVCluster)
    return {"checkpoint": checkpoint_for(method, model)} if is_learned else calibration_of(method, model)


def calibration_of(method: str | None, model: torch.nn.Module) -> dict[str, str]:
    """Return the option `calibration` for a method that needs it; empty for any other method."""
    cls = method_info(method).cls
    needs_it = issubclass(cls, CalibratedKVCluster) and cls.needs_calibration
    return {"calibration": calibration_file(method, model)} if needs_it else {}


def calibration_file(method: str, model: torch.nn.Module) -> str:
    """Create a method's calibration file from random text, once for all models of the same shape."""
    key = method, files.fingerprint(model.config)
    if key not in _made:
        _made[key] = str(Path(_folder.name) / f"{'-'.join(key)}.safetensors")
        files.save(_drawn(model) if method == "sparsemm" else _gathered(method, model), Path(_made[key]))
    return _made[key]


def _gathered(method: str, model: torch.nn.Module) -> files.Calibration:
    known = kvcompress.list_methods()[method].options
    small = {name: value for name, value in SMALL.items() if name in known}
    return kvcompress.calibrate(model, method, text_prompts(model), **small)


def _drawn(model: torch.nn.Module) -> files.Calibration:
    """Return random visual scores, which text cannot provide."""
    layers = len(kvcompress.CompressedCache(model.config).compressed_layers)
    identity = files.ModelIdentity.of(model.config, layers)
    scores = torch.rand(layers, identity.heads, generator=torch.Generator().manual_seed(0))
    return files.Calibration("sparsemm", identity, {"scores": scores})


def text_prompts(model: torch.nn.Module, prompts: int = PROMPTS, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """Return random text as model inputs."""
    generator = torch.Generator().manual_seed(0)
    typed = "mm_token_type_ids" in inspect.signature(model.forward).parameters
    found = []
    for _ in range(prompts):
        ids = torch.randint(FIRST_TEXT, VOCAB_SIZE, (1, length), generator=generator).to(model.device)
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found.append(prompt | ({"mm_token_type_ids": torch.zeros_like(ids)} if typed else {}))
    return found
