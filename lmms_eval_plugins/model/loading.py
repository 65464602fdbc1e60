"""Load a checkpoint and its processor as the model arguments say: its weights as they are, or quantized."""

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.distributed import DistributedConfig
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import is_bitsandbytes_available, is_optimum_quanto_available, is_torchao_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvcompress import KVCompressError
from kvcompress.command_line import called
from kvcompress.errors import MOST, loading, one_line, shown

from . import llava_next
from .arguments import LLAVA_ONEVISION_ARGUMENTS, ModelArguments

# The template of `chat_template=plain`: the unchanged text of the task, for models not trained on chats.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

# Backend of `quantization=BACKEND-intN` -> the package that it needs, and a test for it.
PACKAGES = {
    "quanto": ("optimum-quanto", is_optimum_quanto_available),
    "torchao": ("torchao", is_torchao_available),
    "bnb": ("bitsandbytes", is_bitsandbytes_available),
}


def device_of(args: ModelArguments, world_size: int) -> torch.device:
    """Return the device for this rank's model: the one requested, or this rank's GPU, or the CPU."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise KVCompressError(f"device={name!r}: torch finds none on this machine; device=cpu needs none")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise KVCompressError(
            f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA GPUs; device=cpu needs none"
        )
    if args.tp_plan is not None and world_size == 1:
        raise KVCompressError(f"tp_plan={args.tp_plan!r} needs several processes: NUM_PROCESSES=2 {called('eval')} ...")
    if args.tp_plan is not None and device.type == "cpu" and torch.cuda.is_available():
        raise KVCompressError(f"tp_plan={args.tp_plan!r} uses the GPUs of this machine, not device={name!r}")
    if world_size > 1:
        if args.device_map is not None:
            raise KVCompressError(f"device_map={args.device_map!r}: with several processes, each has one device")
        if device.type == "cuda":
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def load(args: ModelArguments, device: torch.device, needs_template: bool = True) -> tuple[Any, Any]:
    """Load the model, in eval mode, and its processor (for a text-only model, the tokenizer). Raises KVCompressError
    if a required chat template is missing."""
    settings = {"dtype": args.dtype, "device_map": args.device_map or str(device)}
    if args.tp_plan is not None:
        processes = torch.distributed.get_world_size()
        settings |= {"device_map": None, "distributed_config": DistributedConfig(tp_size=processes)}
    if args.attn_implementation is not None:
        settings["attn_implementation"] = args.attn_implementation
    with loading(args.pretrained):
        raw_config = _raw_config(args)
        check_checkpoint(args.pretrained, raw_config, args.quantization, settings["device_map"])
    if args.quantization is not None:
        settings["quantization_config"] = quantization_config(args.quantization, settings["device_map"], args.dtype)
    config, processor = load_processor(args, needs_template)
    with loading(args.pretrained):
        model = _read(args, raw_config, config, processor, settings)
        _check_end_tokens(model)
        _check_pictures(config, processor)
    _set_end_tokens(model, getattr(processor, "tokenizer", processor))
    return model.eval(), processor


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
        message = one_line(error)
        if method == "gptq":  # transformers may name neither of its two packages
            message += "; it needs: pip install optimum gptqmodel"
        raise KVCompressError(f"{pretrained} is quantized ({method}) and cannot be loaded: {message}") from error


def load_processor(args: ModelArguments, needs_template: bool = True) -> tuple[PreTrainedConfig, Any]:
    """Load the model's config, and the processor as `load` returns it, without reading weights."""
    with loading(args.pretrained):
        config, processor = _read_processor(args, _raw_config(args))
    _check_llava_onevision(args, config)
    _set_up_processor(args, processor, needs_template)
    return config, processor


def _raw_config(args: ModelArguments) -> dict[str, Any]:
    return PreTrainedConfig.get_config_dict(args.pretrained, revision=args.revision)[0]


def _read_processor(args: ModelArguments, raw_config: dict[str, Any]) -> tuple[PreTrainedConfig, Any]:
    """Load config and processor with transformers; its errors about a damaged checkpoint propagate."""
    if llava_next.is_llava_next(raw_config):
        processor = llava_next.load_processor(args.pretrained, raw_config, args.revision)
        return llava_next.convert_config(raw_config, processor.tokenizer), processor
    config = AutoConfig.from_pretrained(args.pretrained, **_source(args))
    loader = _model_loader(config)
    processor_loader = AutoTokenizer if loader is AutoModelForCausalLM else AutoProcessor
    processor = processor_loader.from_pretrained(args.pretrained, **_source(args))
    if loader is AutoModelForImageTextToText and not hasattr(processor, "image_processor"):
        raise KVCompressError(f"{args.pretrained}: AutoProcessor finds no image processor in the checkpoint")
    return config, processor


def _read(
    args: ModelArguments,
    raw_config: dict[str, Any],
    config: PreTrainedConfig,
    processor: Any,
    settings: dict[str, Any],
) -> PreTrainedModel:
    """Load the model with transformers; its errors about a damaged checkpoint propagate."""
    if llava_next.is_llava_next(raw_config):
        return llava_next.load_model(args.pretrained, raw_config, processor.tokenizer, args.revision, **settings)
    model, found = _model_loader(config).from_pretrained(
        args.pretrained, output_loading_info=True, **_source(args), **settings
    )
    # transformers would initialize them at random. A quantized checkpoint names its weights differently.
    if found["missing_keys"] and args.quantization is None and "quantization_config" not in raw_config:
        first = ", ".join(sorted(found["missing_keys"])[:3])
        raise KVCompressError(f"{args.pretrained} lacks {len(found['missing_keys'])} of its weights: {first}, ...")
    return model


def _source(args: ModelArguments) -> dict[str, Any]:
    return {"revision": args.revision, "trust_remote_code": args.trust_remote_code}


def _model_loader(config: PreTrainedConfig) -> type[AutoModelForImageTextToText] | type[AutoModelForCausalLM]:
    """Return the auto class for a config, from transformers' tables or, with remote code, from the checkpoint's."""
    remote = getattr(config, "auto_map", {})
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or "AutoModelForImageTextToText" in remote:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in remote:
        return AutoModelForCausalLM
    raise KVCompressError(f"model type {config.model_type!r} is neither image-text-to-text nor a causal language model")


def _check_llava_onevision(args: ModelArguments, config: PreTrainedConfig) -> None:
    for name in LLAVA_ONEVISION_ARGUMENTS:
        if (name in args.legacy or getattr(args, name, False)) and config.model_type != "llava_onevision":
            raise KVCompressError(f"{name} has no meaning for a {config.model_type} model, only for llava_onevision")


def _set_up_processor(args: ModelArguments, processor: Any, needs_template: bool) -> None:
    """Set chat template, padding side and image sizes, in place."""
    if args.chat_template == "plain":
        if hasattr(processor, "tokenizer"):
            raise KVCompressError("chat_template=plain is for text-only models: images need placeholders in the prompt")
        processor.chat_template = PLAIN_TEMPLATE
    elif args.chat_template is not None:
        named = processor.chat_template if isinstance(processor.chat_template, dict) else {}
        if Path(args.chat_template).is_file():
            processor.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        elif args.chat_template in named:
            processor.chat_template = named[args.chat_template]
        else:
            others = f", nor one of the checkpoint's: {', '.join(named)}" if named else ": the checkpoint names none"
            raise KVCompressError(f"chat_template={args.chat_template!r} is neither a file nor 'plain'{others}")
    if processor.chat_template is None and needs_template:
        raise KVCompressError(
            f"{args.pretrained} has no chat template: give chat_template=FILE (Jinja), or, for a text-only model, "
            "chat_template=plain to send the task's text unchanged"
        )
    getattr(processor, "tokenizer", processor).padding_side = "left"
    if args.video_min_pixels is not None or args.video_max_pixels is not None:
        names, bounds = "video_min_pixels and video_max_pixels", (args.video_min_pixels, args.video_max_pixels)
        _set_area(args, processor, "video", "merge_size", names, bounds)
    if args.min_pixels is not None or args.max_pixels is not None or args.image_resize is not None:
        names, bounds = "min_pixels, max_pixels and image_resize", (args.min_pixels, args.max_pixels)
        _set_area(args, processor, "image", "min_pixels", names, bounds)
    if args.image_resize is not None and importlib.util.find_spec(args.image_resize) is None:
        raise KVCompressError(f"image_resize={args.image_resize!r} needs a package: pip install qwen-vl-utils")


def _set_area(
    args: ModelArguments, processor: Any, kind: str, mark: str, names: str, bounds: tuple[int | None, int | None]
) -> None:
    """Set the bounds of an image's or a video's area, in place.

    `mark`: an argument that only processors have which scale by area. They store the bounds under two names that are
    lengths of edges in others. `names`: the arguments that set the bounds."""
    part = getattr(processor, f"{kind}_processor", None)
    size = getattr(part, "size", None) or {}
    known = getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})
    if mark not in known or not size.get("shortest_edge") or not size.get("longest_edge"):
        raise KVCompressError(
            f"{names} have no meaning for {args.pretrained}: its {type(processor).__name__} does not scale {kind}s by "
            "area"
        )
    low, high = bounds
    part.size = type(size)(shortest_edge=low or size["shortest_edge"], longest_edge=high or size["longest_edge"])


def _check_end_tokens(model: Any) -> None:
    """Raise ValueError for an invalid token id, which transformers would notice only when it generates."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = getattr(model.generation_config, name)
        for token in given if isinstance(given, list) and given else [given]:
            is_none = token is None and not isinstance(given, list)
            if not is_none and not (type(token) is int and -1 <= token <= MOST):  # some checkpoints write -1 for none
                raise ValueError(f"generation_config.json: {name} is {shown(given)}, which is not a token id")


def _check_pictures(config: PreTrainedConfig, processor: Any) -> None:
    """Raise ValueError for what would fail only when an image is encoded: invalid tile sizes, a feature layer that the
    tower lacks, or an image token of LLaVA's config that differs from the processor's."""
    known = getattr(config, "image_token_index", getattr(config, "image_token_id", None))
    written = getattr(processor, "image_token_id", None)
    if config.model_type.startswith("llava") and isinstance(written, int) and known != written:
        raise ValueError(f"config.json: image_token_index is {shown(known)}, but the processor writes {written}")
    layers = getattr(config, "vision_feature_layer", None)
    for layer in layers if isinstance(layers, list | tuple) else [layers]:
        count = getattr(getattr(config, "vision_config", None), "num_hidden_layers", None)
        if isinstance(layer, int) and isinstance(count, int) and not -count - 1 <= layer <= count:
            raise ValueError(f"config.json: vision_feature_layer is {shown(layer)}, but the tower has {count} layers")
    for size in getattr(config, "image_grid_pinpoints", None) or ():
        is_pair = isinstance(size, list | tuple) and len(size) == 2
        if not (is_pair and all(type(side) is int and side > 0 for side in size)):
            raise ValueError(f"config.json: image_grid_pinpoints has {shown(size)}, which is not a height and width")


def _set_end_tokens(model: Any, tokenizer: Any) -> None:
    """Set the end and pad tokens that `generate` needs if the checkpoint does not."""
    generation = model.generation_config
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
