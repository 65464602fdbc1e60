"""Exact match of a checkpoint on sign questions, through transformers' own processor and `generate`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, BatchFeature

from lmms_eval_plugins.tiny_vlm.dataset import Example
from lmms_eval_plugins.tiny_vlm.signs import POST_PROMPT

MAX_NEW_TOKENS = 8  # the longest answer has four, and the end


class Reader:
    """A loaded checkpoint that answers questions, `batch_size` at a time, left-padded."""

    def __init__(self, checkpoint: Path, batch_size: int = 25, device: str = "cpu") -> None:
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint).to(device).eval()
        self.batch_size = batch_size

    def inputs(self, examples: list[Example], post_prompt: str = POST_PROMPT) -> BatchFeature:
        """What the model takes, one row per question."""
        messages = [
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": Image.fromarray(example.pixels)},
                        {"type": "text", "text": example.question.text.capitalize() + post_prompt},
                    ],
                }
            ]
            for example in examples
        ]
        return self.processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
            processor_kwargs={"padding": True},
        ).to(self.model.device, self.model.dtype)

    @torch.no_grad()
    def answers(self, examples: list[Example], post_prompt: str = POST_PROMPT) -> list[str]:
        texts = []
        for start in range(0, len(examples), self.batch_size):
            inputs = self.inputs(examples[start : start + self.batch_size], post_prompt)
            output = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            new = output[:, inputs["input_ids"].shape[1] :]
            texts += self.processor.batch_decode(new, skip_special_tokens=True)
        return texts


def by_kind(examples: list[Example], answers: list[str]) -> dict[str, float]:
    """Percent of exact answers, in all ("all") and for each kind of question."""
    scores = defaultdict(list)
    for example, answer in zip(examples, answers, strict=True):
        for key in ("all", example.question.kind):
            scores[key].append(answer.strip() == example.question.answer)
    return {key: round(100 * sum(right) / len(right), 2) for key, right in sorted(scores.items())}
