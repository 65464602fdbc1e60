"""Tiny random checkpoints with tokenizer and processor, and requests as lmms-eval creates them."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from lmms_eval.api.instance import Instance
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaNextVideoProcessor,
    LlavaNextVideoVideoProcessor,
    LlavaProcessor,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from lmms_eval_plugins.model import lm as lm_module
from lmms_eval_plugins.model import loading
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT, ModelArguments
from lmms_eval_plugins.model.lm import KVCompressLM
from tests.support.characters import CHAT_TEMPLATE, QWEN_SPECIALS, character_tokenizer
from tests.support.families import (
    FAMILIES,
    INTERNVL_IMAGE,
    INTERNVL_TOKENS,
    LLAVA_TILE,
    MORE_FAMILIES,
    SMALL_IMAGE,
    SMALL_TOKENS,
)

GEMMA_SPECIALS = ["<pad>", "<image>", "<|video|>", "<boi>", "<eoi>", "<eos>", "<unk>", "<audio>"]
INTERNVL_SPECIALS = ["<pad>", "<IMG_CONTEXT>", "<video>", "<img>", "</img>", "<eos>", "<unk>", "<7>"]


def save_checkpoint(family: str, folder: Path) -> str:
    """Save the tiny random model of a family (tests/support/families.py) with its tokenizer and processor.

    The tokenizer has one token per character; the processor is the family's own. Returns the folder's name.
    LLaVA-OneVision is the bundled model with noise on its weights, so that answers are longer than one word."""
    if family == "llava-onevision":
        return _save_noisy_bundled_model(folder)
    (FAMILIES | MORE_FAMILIES)[family].build().save_pretrained(folder)
    if family == "internvl":
        tokenizer = character_tokenizer(
            INTERNVL_SPECIALS, start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
            video_token="<video>",
        )  # fmt: skip
        size = {"height": INTERNVL_IMAGE, "width": INTERNVL_IMAGE}
        processor = InternVLProcessor(
            image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=False),
            video_processor=InternVLVideoProcessor(size=size),
            tokenizer=tokenizer,
            image_seq_length=INTERNVL_TOKENS,
        )
        media = "{% if part['type'] == 'image' %}<IMG_CONTEXT>{% else %}<video>{% endif %}"
    elif family.endswith("-vl"):
        tokenizer = character_tokenizer(QWEN_SPECIALS)
        patch = {"patch_size": 16} if family == "qwen3-vl" else {}
        cls, video = {
            "qwen2-vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
            "qwen2.5-vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
            "qwen3-vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
        }[family]
        processor = cls(
            image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128}, **patch),
            video_processor=video(size={"shortest_edge": 32 * 32, "longest_edge": 8 * 64 * 64}, **patch),
            tokenizer=tokenizer,
        )
        media = "<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>"
    elif family in ("llava-1.5", "llava-next"):
        size = {"size": {"shortest_edge": SMALL_IMAGE}, "crop_size": SMALL_IMAGE}
        tiles = [[LLAVA_TILE, 2 * LLAVA_TILE], [2 * LLAVA_TILE, LLAVA_TILE]]
        cls, image_processor = {
            "llava-1.5": (LlavaProcessor, CLIPImageProcessor(**size)),
            "llava-next": (LlavaNextProcessor, LlavaNextImageProcessor(**size, image_grid_pinpoints=tiles)),
        }[family]
        processor = cls(
            image_processor=image_processor, tokenizer=character_tokenizer(QWEN_SPECIALS), patch_size=SMALL_IMAGE // 2,
            vision_feature_select_strategy="default", num_additional_image_tokens=1, image_token="<|image_pad|>",
        )  # fmt: skip
        media = "<|image_pad|>"
    elif family == "llava-next-video":
        size = {"size": {"shortest_edge": LLAVA_TILE}, "crop_size": LLAVA_TILE}
        processor = LlavaNextVideoProcessor(
            video_processor=LlavaNextVideoVideoProcessor(**size),
            image_processor=LlavaNextImageProcessor(**size),
            tokenizer=character_tokenizer(QWEN_SPECIALS, image_token="<|image_pad|>", video_token="<|video_pad|>"),
            patch_size=LLAVA_TILE // 2,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
        media = "<|{{ part['type'] }}_pad|>"
    elif family == "gemma3":
        processor = Gemma3Processor(
            image_processor=Gemma3ImageProcessor(size={"height": SMALL_IMAGE, "width": SMALL_IMAGE}),
            tokenizer=character_tokenizer(GEMMA_SPECIALS, image_token="<image>", boi_token="<boi>", eoi_token="<eoi>"),
            image_seq_length=SMALL_TOKENS,
        )
        media = "<boi>"
    elif family == "gemma4":
        patches = {"patch_size": SMALL_IMAGE // 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
        named = {"image": "<image>", "boi": "<boi>", "eoi": "<eoi>"} | dict.fromkeys(("audio", "boa", "eoa"), "<audio>")
        processor = Gemma4Processor(
            feature_extractor=Gemma4AudioFeatureExtractor(),
            image_processor=Gemma4ImageProcessor(**patches),
            tokenizer=character_tokenizer(GEMMA_SPECIALS, **{f"{name}_token": text for name, text in named.items()}),
            video_processor=Gemma4VideoProcessor(**patches),
        )
        media = "{% if part['type'] == 'image' %}<image>{% else %}<|video|>{% endif %}"
    else:
        processor, media = character_tokenizer(QWEN_SPECIALS), ""
    processor.chat_template = CHAT_TEMPLATE.replace("MEDIA", media)
    processor.save_pretrained(folder)
    return str(folder)


def _save_noisy_bundled_model(folder: Path) -> str:
    model = AutoModelForImageTextToText.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn(weight.shape, generator=generator) * weight.std()
        embeddings[model.generation_config.eos_token_id] = 0  # tied weights: it is never the most likely token
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(TINY_CHECKPOINT).save_pretrained(folder)
    return str(folder)


def image(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    """Return a picture of smooth noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def write_video(path: Path, frames: int = 12, fps: int = 4, width: int = 64, height: int = 48) -> str:
    """Write a video whose frame i is grey with brightness 20 * i (modulo 240), in the container of the file's
    extension."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libvpx" if path.suffix == ".webm" else "mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            grey = np.full((height, width, 3), 20 * index % 240, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


def messages(doc: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a document's chat messages as lmms-eval's chat tasks build them: media first, then the text."""
    media = [{"type": "image", "url": url} for url in doc.get("images", [])]
    media += [{"type": "video", "url": url} for url in doc.get("videos", [])]
    return [{"role": "user", "content": [*media, {"type": "text", "text": doc["text"]}]}]


def requests(
    lm: Any, docs: list[dict[str, Any]], task: str = "task", padding: int = 0, **generation_kwargs: Any
) -> list[Instance]:
    """Return the requests of a chat generate_until task over `docs`; the last `padding` only balance the ranks."""
    lm.task_dict[task] = {"test": docs}
    generation_kwargs = {"until": ["\n\n"], **generation_kwargs}
    made = []
    for doc_id, doc in enumerate(docs):
        metadata = {"task": task, "doc_id": doc_id, "repeats": 1}
        if doc_id >= len(docs) - padding:
            metadata["__padding_only__"] = True
        arguments = (doc["text"], messages, dict(generation_kwargs), doc_id, task, "test")
        made.append(Instance(request_type="generate_until", arguments=arguments, idx=0, metadata=metadata))
    return made


def texts(results: list[Any]) -> list[str]:
    """Return the texts of lmms-eval's results."""
    return [result.text for result in results]


def answer(lm: Any, cell: dict[str, Any], docs: list[dict[str, Any]], **kwargs: Any) -> tuple[list[str], list[dict]]:
    """Return the answers to `docs` under one cell, and their rows; `kwargs` as in `requests`."""
    lm.set_cell(**cell)
    lm.reset_rows()
    return texts(lm.generate_until(requests(lm, docs, **kwargs))), lm.gather_rows()


# Model arguments that do not affect the loaded model and processor.
NOT_LOADED = (
    "batch_size", "look_ahead", "max_frames_num", "max_new_tokens", "measurements_path", "on_oom", "prefix_cache_gb",
    "prefill_tokens", "prompt_cache_gb", "slots", "system_prompt", "vision_cache_gb",
)  # fmt: skip
_loaded: dict[str, tuple[Any, Any]] = {}


def load_lm(pretrained: str = "tiny", fresh: bool = False, **arguments: Any) -> KVCompressLM:
    """Load the lmms-eval model on the CPU, in float32, with short answers.

    Each call returns a new object, but several share the model and the processor; use `fresh` if a test changes
    these."""

    def load(args: ModelArguments, device: torch.device, needs_template: bool) -> tuple[Any, Any]:
        key = repr(args.model_copy(update=dict.fromkeys(NOT_LOADED)))
        if fresh or key not in _loaded:
            found = loading.load(args, device, needs_template)
            return found if fresh else _loaded.setdefault(key, found)
        return _loaded[key]

    defaults = {"device": "cpu", "dtype": "float32", "max_new_tokens": 8, "max_frames_num": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_module, "load", load)
        return KVCompressLM(**{"pretrained": pretrained, **defaults, **arguments})
