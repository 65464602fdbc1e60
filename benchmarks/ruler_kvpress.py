"""kvpress's side of benchmarks/ruler.py: a script for the Python of an environment with kvpress.

It reads a JSON file {"model", "methods", "ratio", "new_tokens", "prompts"} and writes JSON: method -> for each prompt
{"new": the new tokens, "kept": the kept columns, (layers, kv_heads, entries)}; "forms": the options with which our
methods choose as kvpress does; "versions": the packages' versions.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

# ruff: noqa: E402
# The folder of the bench's worker replaces this script's folder, whose kernels.py would shadow a package.
sys.path[0] = str(Path(__file__).parents[1] / "kvcompress" / "bench")

import torch
from kvpress_worker import FORMS, PRESSES
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel


@torch.no_grad()
def prefilled(model: PreTrainedModel, ids: torch.Tensor, press=None) -> tuple[DynamicCache, int]:
    """Return the cache of a prompt (1, tokens), and the first new token."""
    cache = DynamicCache()
    if press is None:
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    else:
        with press(model):
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    return cache, int(logits[0, -1].argmax())


def columns(whole: torch.Tensor, kept: torch.Tensor) -> list[int]:
    """Find the columns of the kept keys (entries, head_dim), which are copies, among all keys (tokens, head_dim). Of
    equal keys it takes the first, but rotated keys at different positions are never equal."""
    return sorted({int((whole == key).all(-1).nonzero()[0, 0]) for key in kept})


@torch.no_grad()
def answer(model: PreTrainedModel, cache: DynamicCache, first: int, tokens: int, count: int) -> list[int]:
    """Decode greedily up to `count` tokens or an end token."""
    new, ends = [first], model.generation_config.eos_token_id
    ends = {*ends} if isinstance(ends, list) else {ends}
    while len(new) < count and new[-1] not in ends:
        place = torch.tensor([[tokens + len(new) - 1]])
        logits = model(torch.tensor([[new[-1]]]), past_key_values=cache, position_ids=place).logits
        new.append(int(logits[0, -1].argmax()))
    return new


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    found = {name: [] for name in asked["methods"]}
    for prompt in asked["prompts"]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole, _ = prefilled(model, ids)
        for name in asked["methods"]:
            cache, first = prefilled(model, ids, PRESSES[name](1 - asked["ratio"]))
            kept = [
                [columns(every, held) for every, held in zip(full.keys[0], part.keys[0], strict=True)]
                for full, part in zip(whole.layers, cache.layers, strict=True)
            ]
            new = answer(model, cache, first, ids.shape[1], asked["new_tokens"])
            found[name].append({"new": new, "kept": kept})
    found["forms"] = {name: FORMS.get(name, {}) for name in asked["methods"]}
    found["versions"] = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
