"""`run_eval.sh list tasks|methods|models [WORD]`: what may stand on the command line, with a word to look for."""

import importlib.util
import re
from pathlib import Path

from .errors import UsageError, nearest

BUNDLED_TASKS = Path(__file__).parents[1] / "tasks"
# A key of a task file with its value: a scalar, or a list, in a line or below.
TOP_LEVEL = re.compile(r"^[\"']?(task|group|tag)[\"']?[ \t]*:[ \t]*(.*(?:\n[ \t]*[-#].*)*)", re.MULTILINE)
KINDS = ("tasks", "methods", "models")
# Model types that docs/families.md has tests of; transformers knows more.
TESTED = (
    "gemma3", "idefics3", "internvl", "llama", "llava", "llava_next", "llava_next_video", "llava_onevision",
    "minicpmv4_6", "mistral", "mllama", "qwen2", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3", "qwen3_vl",
    "qwen3_vl_moe", "smolvlm",
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
    """Bundled tasks, then lmms-eval's tasks, groups and tags, found in the text of their files: lmms-eval itself takes
    fifteen seconds to start and to read them."""
    official = Path(importlib.util.find_spec("lmms_eval").submodule_search_locations[0]) / "tasks"
    lines = []
    for folder, origin in ((BUNDLED_TASKS, "bundled"), (official, "lmms-eval")):
        kinds: dict[str, str] = {}
        for file in sorted(folder.rglob("*.yaml")):
            kinds = {**names_in(file.read_text(encoding="utf-8-sig")), **kinds}
        lines += [f"{name:<40} {kind}, {origin}" for name, kind in sorted(kinds.items())]
    return lines


def names_in(text: str) -> dict[str, str]:
    """What a task file defines: name -> `task`, `group` or `tag`."""
    values = dict(TOP_LEVEL.findall(text))
    of_task = values.get("task", "")
    if of_task.partition("#")[0].strip()[:1] in ("", "[", "-"):  # a list: of a group's tasks, or there is none
        return dict.fromkeys(_names(values.get("group", "")) if of_task else [], "group")
    tags = [tag for key in ("group", "tag") for tag in _names(values.get(key, ""))]
    return {**dict.fromkeys(tags, "tag"), **dict.fromkeys(_names(of_task), "task")}


def _names(text: str) -> list[str]:
    """A scalar, or the items of a list, without quotes and comments."""
    lines = (re.sub(r"(^|\s)#.*|^\s*-\s", "", line) for line in text.splitlines())
    return [name for line in lines for name in re.findall(r"[^\s,\[\]\"']+", line)]


def methods() -> list[str]:
    """Each method with its paper and what it does."""
    import kvcompress

    found = kvcompress.list_methods().values()
    return [f"{info.name:<20} {info.paper:<32} {_first_sentence(info.cls)}" for info in found]


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


def _first_sentence(cls: type) -> str:
    paragraph = " ".join((cls.__doc__ or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.:;])\s", paragraph)[0].rstrip(":;")
