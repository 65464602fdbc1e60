"""A transformers LLaVA-OneVision saved in the original LLaVA-NeXT layout: names, settings, two shards."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from safetensors.torch import save_file
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerBase

from lmms_eval_plugins.model import llava_next

TOWER = "tiny-siglip"  # instead of a tower on the hub
TOWER_SETTINGS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size",
)  # fmt: skip
TEXT_SETTINGS = (
    "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings",
    "vocab_size",
)  # fmt: skip


def original_name(name: str) -> str:
    """Return the original code's name of a weight, given transformers'."""
    name = re.sub(r"^model\.vision_tower\.(vision_model\.)?", "model.vision_tower.vision_tower.vision_model.", name)
    name = name.replace("model.multi_modal_projector.linear_1.", "model.mm_projector.0.")
    name = name.replace("model.multi_modal_projector.linear_2.", "model.mm_projector.2.")
    return name.replace("model.language_model.", "model.")


def save(model: LlavaOnevisionForConditionalGeneration, folder: Path) -> None:
    """Write weights and config.json, without a tokenizer. Load inside `knows_the_tower(model)`."""
    text = model.config.text_config
    weights = {original_name(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    if text.tie_word_embeddings:
        del weights["lm_head.weight"]
    names, weight_map = sorted(weights), {}
    for i in (1, 2):
        file, part = f"model-0000{i}-of-00002.safetensors", names[i - 1 :: 2]
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlavaQwenForCausalLM"],
        "model_type": "llava_qwen",
        "torch_dtype": "float32",
        **{name: getattr(text, name) for name in TEXT_SETTINGS},
        "rope_scaling": None,
        "rope_theta": text.rope_parameters["rope_theta"],
        "image_aspect_ratio": "anyres_max_9",
        "image_grid_pinpoints": [[w, h] for h, w in model.config.image_grid_pinpoints],
        "mm_hidden_size": model.config.vision_config.hidden_size,
        "mm_newline_position": "one_token",
        "mm_patch_merge_type": "spatial_unpad",
        "mm_projector_type": "mlp2x_gelu",
        "mm_resampler_type": None,
        "mm_spatial_pool_mode": "bilinear",
        "mm_use_im_start_end": False,
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": TOWER,
    }
    (folder / "config.json").write_text(json.dumps(config))


def knows_the_tower(model: LlavaOnevisionForConditionalGeneration) -> mock.patch.dict:
    """Context manager in which TOWER is the model's vision tower, as if it were on the hub."""
    tower = {name: getattr(model.config.vision_config, name) for name in TOWER_SETTINGS}
    return mock.patch.dict(llava_next.VISION_TOWERS, {TOWER: tower})


def reloaded(
    model: LlavaOnevisionForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> LlavaOnevisionForConditionalGeneration:
    """Return the model that the loader creates from what `save` wrote."""
    with TemporaryDirectory() as folder, knows_the_tower(model):
        save(model, Path(folder))
        config = json.loads((Path(folder) / "config.json").read_text())
        return llava_next.load_model(folder, config, tokenizer, dtype="auto").eval()
