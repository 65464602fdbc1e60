"""Quantized weights: quantized while loading, or a checkpoint that is already quantized."""

import logging
from typing import Any

import torch
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import is_bitsandbytes_available, is_optimum_quanto_available, is_torchao_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvcompress import KVCompressError

# Backend of `quantization=BACKEND-intN` -> the package that it needs, and a test for it.
PACKAGES = {
    "quanto": ("optimum-quanto", is_optimum_quanto_available),
    "torchao": ("torchao", is_torchao_available),
    "bnb": ("bitsandbytes", is_bitsandbytes_available),
}


def quantization_config(quantization: str, device: str, dtype: str) -> QuantizationConfigMixin:
    """Return transformers' config for the model argument `quantization`. `device`: where the weights go, `cuda:0` or a
    device map; `dtype`: the model argument.

    Raises KVCompressError if the package is missing, or what `torchao-int4` needs.
    """
    backend, bits = quantization.split("-")
    package, is_there = PACKAGES[backend]
    if not is_there():
        raise KVCompressError(f"quantization={quantization!r} needs {package}, which is missing: pip install {package}")
    if backend == "quanto":
        return QuantoConfig(weights=bits)
    if backend == "bnb":
        # It would warn at every product of int8 weights that it computes in float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=bits == "int8", load_in_4bit=bits == "int4", bnb_4bit_quant_type="nf4")
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if bits == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    if device == "cpu" or not torch.cuda.is_available() or dtype != "bfloat16":
        raise KVCompressError(
            f"quantization={quantization!r} needs a CUDA GPU and dtype=bfloat16 (here: {device}, {dtype}); "
            "quanto-int4 and bnb-int4 run anywhere"
        )
    return TorchAoConfig(Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"))  # torch's own kernel


def check_checkpoint(pretrained: str, config: dict[str, Any], quantization: str | None, device: str) -> None:
    """Check a checkpoint that is already quantized (GPTQ, AWQ and others), according to its raw `config`. Raises
    KVCompressError if a package or device is missing, or if `quantization` would quantize it again."""
    found = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if not found:
        return
    method = found.get("quant_method", "bitsandbytes")
    if quantization is not None:
        raise KVCompressError(
            f"quantization={quantization!r}: {pretrained} is already quantized ({method}); leave it out"
        )
    try:
        AutoHfQuantizer.from_config(found, pre_quantized=True).validate_environment(device_map=device)
    except (ImportError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        if method == "gptq":  # transformers may name neither of its two packages
            message += "; it needs: pip install optimum gptqmodel"
        raise KVCompressError(f"{pretrained} is quantized ({method}) and cannot be loaded: {message}") from error
