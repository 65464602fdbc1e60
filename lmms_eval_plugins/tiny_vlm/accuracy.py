"""Measure a checkpoint's exact match on sign questions with transformers' own processor and `generate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, BatchFeature

from lmms_eval_plugins.tiny_vlm.questions import POST_PROMPT, READ, Example, Shown

MAX_NEW_TOKENS = 8  # the longest answer about one picture has four tokens and an end token
MAX_TOKENS_OF_REGIMES = 100


class Reader:
    """Answers questions with a loaded checkpoint, in left-padded batches of `batch_size`."""

    def __init__(self, checkpoint: Path, batch_size: int = 25, device: str = "cpu") -> None:
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint).to(device).eval()
        self.batch_size = batch_size

    def inputs(self, examples: list[Example]) -> BatchFeature:
        """Return the model inputs, one row per question."""
        return self.shown_inputs([Shown([example.question], [example.pixels]) for example in examples])

    @torch.no_grad()
    def answers(self, examples: list[Example]) -> list[str]:
        texts = []
        for start in range(0, len(examples), self.batch_size):
            inputs = self.inputs(examples[start : start + self.batch_size])
            output = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            new = output[:, inputs["input_ids"].shape[1] :]
            texts += self.processor.batch_decode(new, skip_special_tokens=True)
        return texts

    @torch.no_grad()
    def answers_to(self, prompts: list[Shown]) -> list[str]:
        """Answer prompts of the regimes, one at a time, each with one question."""
        texts = []
        for shown in prompts:
            inputs = self.shown_inputs([shown])
            output = self.model.generate(**inputs, max_new_tokens=MAX_TOKENS_OF_REGIMES, do_sample=False)
            texts.append(self.processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        return texts

    def shown_inputs(self, prompts: list[Shown]) -> BatchFeature:
        """Return the model inputs for prompts of one regime, left-padded; either all or none have pictures."""
        texts = []
        for shown in prompts:
            post_prompt = "" if shown.question.kind == READ else POST_PROMPT
            content = [{"type": "image"}] * len(shown.pictures) + [{"type": "video"}] * (shown.frames is not None)
            content.append({"type": "text", "text": shown.text + shown.question.text.capitalize() + post_prompt})
            message = {"role": "user", "content": content}
            texts.append(self.processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
        media = {}
        if prompts[0].pictures:
            media["images"] = [[Image.fromarray(picture) for picture in shown.pictures] for shown in prompts]
        if prompts[0].frames is not None:
            media |= {"videos": [shown.frames for shown in prompts], "do_sample_frames": False}
        inputs = self.processor(text=texts, return_tensors="pt", padding=True, **media)
        return inputs.to(self.model.device, self.model.dtype)


def by_kind(examples: Sequence[Example | Shown], answers: list[str]) -> dict[str, float]:
    """Return the percentage of exact answers, overall ("all") and for each kind of question."""
    scores = defaultdict(list)
    for example, answer in zip(examples, answers, strict=True):
        for key in ("all", example.question.kind):
            scores[key].append(answer.strip() == example.question.answer)
    return {key: round(100 * sum(right) / len(right), 2) for key, right in sorted(scores.items())}
