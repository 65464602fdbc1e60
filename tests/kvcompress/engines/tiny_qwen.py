"""Tiny random Qwen2.5-VL and Qwen3-VL that engines accept (head size 64), and prompts for them.

Needs neither vLLM nor lmms-eval."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import DynamicCache, PreTrainedModel
from transformers.video_utils import VideoMetadata

from kvcompress.engines.blocks import BlockEvictor
from tests.support.characters import CHAT_TEMPLATE, QWEN_SPECIALS, character_tokenizer
from tests.support.families import IMAGE, PAD, VIDEO, VISION_END, VISION_START, VOCAB_SIZE, randomize

FAMILIES = ("qwen2.5-vl", "qwen3-vl")
FPS = 8.0
ANSWER = 12  # tokens
TEXT = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096,
}  # fmt: skip
VISION = {"hidden_size": 128, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}  # fmt: skip


def save(family: str, folder: Path) -> str:
    """Save a tiny random model with tokenizer and processor; return the folder's name."""
    name = {"qwen2.5-vl": "Qwen2_5_VL", "qwen3-vl": "Qwen3VL"}[family]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    if family == "qwen2.5-vl":
        vision, patch = {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]}, {}
    else:
        vision = {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        rope, patch = {**rope, "mrope_section": [12, 10, 10], "mrope_interleaved": True}, {"patch_size": 16}
        patch |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # vLLM scales videos by those of pictures, too
    text = {**TEXT, "rope_parameters": rope}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config={**VISION, **vision}, **IDS)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    randomize(model, torch.Generator().manual_seed(0))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    model.save_pretrained(folder)
    of_videos = transformers.Qwen3VLVideoProcessor if family == "qwen3-vl" else transformers.Qwen2VLVideoProcessor
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 32 * 32, "longest_edge": 224 * 224}, **patch
        ),
        video_processor=of_videos(size={"shortest_edge": 32 * 32, "longest_edge": 16 * 128 * 128}, **patch),
        tokenizer=character_tokenizer(QWEN_SPECIALS),
    )
    media = "<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>"
    processor.chat_template = CHAT_TEMPLATE.replace("MEDIA", media)
    processor.save_pretrained(folder)
    return str(folder)


def prompts(count: int = 20) -> list[dict[str, Any]]:
    """Return prompts as vLLM takes them, by turns with a picture and with a video of 8 or 12 frames."""
    made = []
    for seed in range(count):
        draw = np.random.default_rng(seed)
        kind = ("image", "video")[seed % 2]
        before, after = "".join(draw.choice(list("xyz "), seed % 5)), "".join(draw.choice(list("abcd ?"), 5 + seed % 7))
        if kind == "image":
            media = Image.fromarray(_noise(draw, 96 + 28 * (seed % 3), 140))
        else:
            media = _video(draw, 8 if seed % 4 == 1 else 12)
        text = f"[user] {before}<|vision_start|><|{kind}_pad|><|vision_end|>{after}[assistant] "
        made.append({"prompt": text, "multi_modal_data": {kind: [media]}})
    return made


def long_prompts(count: int = 20) -> list[dict[str, Any]]:
    """Return prompts of 150 to 400 tokens, every other with a picture."""
    made = []
    for seed in range(count):
        draw = np.random.default_rng(seed)
        text = "".join(draw.choice(list("abcdxyz ?"), 150 + 37 * (seed % 7)))
        shown = "<|vision_start|><|image_pad|><|vision_end|>" if seed % 2 else ""
        media = {"multi_modal_data": {"image": [Image.fromarray(_noise(draw, 124, 140))]}} if seed % 2 else {}
        made.append({"prompt": f"[user] {text[:60]}{shown}{text[60:]}[assistant] ", **media})
    return made


def short_video() -> dict[str, Any]:
    """Return a prompt with a video of one temporal patch, of which `evs` cannot keep half."""
    text = "[user] <|vision_start|><|video_pad|><|vision_end|>What?[assistant] "
    return {"prompt": text, "multi_modal_data": {"video": [_video(np.random.default_rng(0), 2)]}}


def _noise(draw: np.random.Generator, height: int, width: int) -> np.ndarray:
    pixels = Image.fromarray(draw.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    return np.asarray(pixels.resize((width, height), Image.Resampling.BICUBIC))


def _video(draw: np.random.Generator, frames: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Return a video that fades from one picture into another, with grain in some frames, and its metadata."""
    first, last = _noise(draw, 96, 112).astype(float), _noise(draw, 96, 112).astype(float)
    grain = [draw.normal(0, 20 * (frame % 3), first.shape) for frame in range(frames)]
    pixels = [first + (last - first) * frame / frames + grain[frame] for frame in range(frames)]
    metadata = {
        "fps": FPS, "duration": frames / FPS, "total_num_frames": frames, "frames_indices": list(range(frames)),
        "video_backend": "opencv", "do_sample_frames": False,
    }  # fmt: skip
    return np.stack(pixels).clip(0, 255).astype(np.uint8), metadata


def inputs_of(processor: Any, prompt: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for one of `prompts`."""
    media = dict(prompt.get("multi_modal_data", {}))
    arguments: dict[str, Any] = {"images": media.pop("image")} if "image" in media else {}
    if "video" in media:
        videos = media.pop("video")
        metadata = [{name: value for name, value in of.items() if name != "do_sample_frames"} for _, of in videos]
        arguments |= {"videos": [pixels for pixels, _ in videos], "do_sample_frames": False}
        arguments |= {"video_metadata": [VideoMetadata(**of) for of in metadata]}
    return processor(text=[prompt["prompt"]], return_tensors="pt", **arguments)


def answer_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[int]:
    """Return the tokens of a greedy answer."""
    tokens = model.generate(**inputs, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


@torch.no_grad()
def answer_in_blocks(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], size: int, asked: dict[str, Any]
) -> tuple[list[int], int]:
    """Return the tokens of a greedy answer without the prompt's blocks that leave after it, and how many leave.

    `asked`: arguments of `BlockEvictor.of`; empty: none leave."""
    length, cache = inputs["input_ids"].shape[1], DynamicCache(config=model.config.get_text_config())
    model.model.rope_deltas = None
    output = model(**inputs, past_key_values=cache)
    states = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    leave = BlockEvictor.of(**asked).evicted(states, len(states), length, size) if asked else []
    stays = [column for column in range(length) if column // size not in leave]
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, stays], layer.values[:, :, stays]
    further = 0 if model.model.rope_deltas is None else int(model.model.rope_deltas)
    tokens = [int(output.logits[0, -1].argmax())]
    while len(tokens) < ANSWER:
        position = torch.full((3, 1, 1), length + len(tokens) - 1 + further)
        output = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache, position_ids=position)
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens, len(leave)


@contextmanager
def text_after_all_frames(model: PreTrainedModel) -> Iterator[None]:
    """Within it, text after a video continues at the largest position of the video plus one.

    So it is in vLLM and in transformers 4, whose code is the one Qwen2.5-VL was published with. In transformers 5 it
    continues after the larger side of a frame, which differs if time runs further (Qwen2.5-VL only: Qwen3-VL has all
    frames at one time)."""
    inner = model.model.get_rope_index

    def get_rope_index(
        input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions, further = inner(input_ids, mm_token_type_ids, *args, **kwargs)
        for row, kinds in enumerate(mm_token_type_ids.tolist()):
            begin = 0
            for column in range(1, len(kinds)):
                if kinds[column] == 2 != kinds[column - 1]:
                    begin = column
                if kinds[column - 1] == 2 != kinds[column]:
                    end = positions[:, row, begin:column].max() + 1
                    positions[:, row, column:] += end - positions[0, row, column]
            further[row] = positions[:, row].max() + 1 - len(kinds)
        return positions, further

    model.model.get_rope_index = get_rope_index
    try:
        yield
    finally:
        del model.model.get_rope_index
