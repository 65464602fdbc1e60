"""`kvcompress list`: print tasks, methods or models, one per line."""

import argparse

from kvcompress import list_command as core
from kvcompress.list_command import line_of

from ..tasks import BUNDLED_TASKS
from .names import LM_EVAL, index_of, installed_tasks, lm_eval_tasks, lmms_eval_folder

# The model types tested in docs/families.md; transformers has more.
TESTED = (
    "gemma3", "gemma4", "glm4v", "idefics3", "internvl", "llama", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "minicpmv4_6", "mistral", "mistral3", "mllama", "molmo2", "qwen2", "qwen2_5_vl", "qwen2_audio",
    "qwen2_vl", "qwen3", "qwen3_5", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip


def tasks() -> list[str]:
    """List the bundled tasks, then lmms-eval's tasks, groups and tags, then lm-eval's if it is installed."""
    found = {"bundled": index_of(BUNDLED_TASKS), "lmms-eval": index_of(lmms_eval_folder())}
    known = installed_tasks()
    found["lm-eval"] = {LM_EVAL * (name in known) + name: entry for name, entry in lm_eval_tasks().items()}
    return [f"{name:<40} {each[name][0]}, {origin}" for origin, each in found.items() for name in sorted(each)]


def methods() -> list[str]:
    """List the methods of the core, then those that change a question's pictures."""
    from ..model.input_methods import INPUT_METHODS

    return [*core.methods(), *map(line_of, INPUT_METHODS.values())]


def models() -> list[str]:
    """List the bundled model, the models in this machine's hub cache, and the tested model types. Others work if their
    attention goes through transformers' attention interface, and are refused with one line if not."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    lines = ["tiny                 bundled"]
    try:
        cached = [each.repo_id for each in scan_cache_dir().repos if each.repo_type == "model"]
    except CacheNotFound:
        cached = []
    lines += [f"{name:<20} in the hub's cache on this machine" for name in sorted(cached)]
    kinds = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    for name in sorted(kinds.keys() & set(TESTED)):
        sees = "images and text" if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else "text"
        lines.append(f"{name:<22} any checkpoint of this model_type: {sees}")
    return lines


KINDS = {"tasks": tasks, "methods": methods, "models": models}


def parser() -> argparse.ArgumentParser:
    return core.parser(KINDS)


def main(argv: list[str]) -> None:
    """Print the list. Raises KVCompressError for an unknown kind, or if nothing is found."""
    core.main(argv, KINDS)
