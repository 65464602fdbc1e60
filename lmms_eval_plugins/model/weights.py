"""Weights in few bits: quantized while they are loaded, or a checkpoint that is quantized already."""

import logging
from typing import Any

import torch
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import is_bitsandbytes_available, is_optimum_quanto_available, is_torchao_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvcompress import KVCompressError

# Backend of `quantization=BACKEND-intN` -> the package that it needs, and whether it is there.
PACKAGES = {
    "quanto": ("optimum-quanto", is_optimum_quanto_available),
    "torchao": ("torchao", is_torchao_available),
    "bnb": ("bitsandbytes", is_bitsandbytes_available),
}


def quantization_config(quantization: str, device: str, dtype: str) -> QuantizationConfigMixin:
    """transformers' config for the model argument `quantization`. `device`: where the weights go, `cuda:0` or a device
    map; `dtype`: the model argument.

    Raises KVCompressError where the package, or what `torchao-int4` needs, is missing.
    """
    backend, bits = quantization.split("-")
    package, is_there = PACKAGES[backend]
    if not is_there():
        raise KVCompressError(f"quantization={quantization!r} needs {package}, which is missing: pip install {package}")
    if backend == "quanto":
        return QuantoConfig(weights=bits)
    if backend == "bnb":
        # At every product of int8 weights it would say that it computes in float16.
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
    """For a checkpoint whose raw `config` says that it is quantized (GPTQ, AWQ and others): raises KVCompressError
    where a package or a device is missing, or `quantization` asks for it once more."""
    found = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if not found:
        return
    method = found.get("quant_method", "bitsandbytes")
    if quantization is not None:
        raise KVCompressError(
            f"quantization={quantization!r}: {pretrained} is quantized already ({method}); leave it out"
        )
    try:
        AutoHfQuantizer.from_config(found, pre_quantized=True).validate_environment(device_map=device)
    except (ImportError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        if method == "gptq":  # of its two packages transformers may name none
            message += "; it needs: pip install optimum gptqmodel"
        raise KVCompressError(f"{pretrained} is quantized ({method}) and cannot be loaded: {message}") from error
