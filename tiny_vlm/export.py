"""Export a trained model to a Hugging Face folder that the oldest and newest supported transformers can load."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from tiny_vlm.modeling import build_processor


def export(model: LlavaOnevisionForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write bf16 safetensors, config, generation config, tokenizer and processor, replacing `folder` as a whole.

    The configuration says float32, in which an answer is the same alone and in a batch.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model = model.to(torch.bfloat16).cpu()
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(temporary)
    config = temporary / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}, indent=2) + "\n")
    build_processor(tokenizer).save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
