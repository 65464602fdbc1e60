"""`run_eval.sh list tasks|methods|models [WORD]`: what may stand on the command line, with a word to look for."""

from .errors import UsageError, nearest
from .names import LM_EVAL, installed_tasks, lm_eval_tasks, task_folders, task_kinds

KINDS = ("tasks", "methods", "models")
# Model types that docs/families.md has tests of; transformers knows more.
TESTED = (
    "gemma3", "gemma4", "glm4v", "idefics3", "internvl", "llama", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "minicpmv4_6", "mistral", "mistral3", "mllama", "molmo2", "qwen2", "qwen2_5_vl", "qwen2_audio",
    "qwen2_vl", "qwen3", "qwen3_5", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip


def show_list(argv: list[str]) -> None:
    """Print the list that `argv` names, a line each. Raises UsageError for another one, and where nothing is found."""
    if not argv or argv[0] not in KINDS or len(argv) > 2:
        wrong = f"; {argv[0]!r} is not one of them{nearest(argv[0], KINDS)}" if argv and argv[0] not in KINDS else ""
        raise UsageError(f"usage: run_eval.sh list {'|'.join(KINDS)} [WORD]{wrong}")
    kind, word = argv[0], argv[1].lower() if len(argv) > 1 else ""
    lines = {"tasks": tasks, "methods": methods, "models": models}[kind]()
    found = [line for line in lines if word in line.lower()]
    if not found:
        raise UsageError(f"none of {len(lines)} {kind} has {argv[1]!r} in its line")
    print("\n".join(found))


def tasks() -> list[str]:
    """Bundled tasks, then lmms-eval's tasks, groups and tags, then lm-eval's, where that is installed."""
    kinds = {origin: task_kinds(folder) for origin, folder in task_folders().items()}
    shared = installed_tasks() & lm_eval_tasks().keys()
    kinds["lm-eval"] = {LM_EVAL * (name in shared) + name: kind for name, (kind, _) in lm_eval_tasks().items()}
    return [f"{name:<40} {kind}, {origin}" for origin, found in kinds.items() for name, kind in sorted(found.items())]


def methods() -> list[str]:
    """Each method with its paper and what it does."""
    from kvcompress.list_command import lines

    return lines()


def models() -> list[str]:
    """The bundled model, those in the hub's cache on this machine, and the kinds that transformers loads."""
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
    for name in sorted(kinds, key=lambda name: (name not in TESTED, name)):
        sees = "images and text" if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else "text"
        tested = ", tested here" if name in TESTED else ""
        lines.append(f"{name:<20} any checkpoint of this model_type: {sees}{tested}")
    return lines
