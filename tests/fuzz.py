"""Random configurations of everything, each checked against the masked full cache, its rows run alone, also after a
second prompt, and in flight.

    python -m tests.fuzz --configurations 2000 --out runs/fuzz.jsonl

Configuration i follows from the seed and i alone. A run that was cut goes on where it stopped, and a failure is run
again with `--only i`. A configuration ends as `ok`, as `refused` with a KVCompressError (a clear error), or as a
failure.
"""

import argparse
import collections
import contextlib
import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import StoppingCriteriaList

import kvcompress
from kvcompress.check.promises import History
from kvcompress.check.reference import generate, only_attending_to
from kvcompress.layer_budgets import list_layer_budgets
from kvcompress.policy.make import make_policy
from kvcompress.policy.spans import Spans
from kvcompress.scoring.merging import MERGES
from kvcompress.scoring.selection import ADAPTIVE
from kvcompress.scoring.vision import vision_token_mask
from tests.support.calibrations import calibration_of
from tests.support.fair import checked_choices
from tests.support.families import FAMILIES, FIRST_TEXT, VOCAB_SIZE
from tests.support.in_flight import check_in_flight
from tests.support.passages import PASSAGE, OneLetterPerToken, passage_of, with_passage
from tests.support.strategies import METHODS, OPTIONS, TIED

NEW = 6
TOLERANCE = 2e-4
ALL_CHANNELS = {"cache_implementation": "think", "key_channels": 1.0, "key_recent": 5}
EIGHT_BITS = {"cache_implementation": "quantized", "kv_backend": "hqq", "kv_bits": 8, "kv_group_size": 16}
FP8 = {"cache_implementation": "quantized", "kv_backend": "fp8"}


def draw(seed: int, index: int) -> dict[str, Any]:
    """Configuration `index`."""
    rng = random.Random(f"{seed} {index}")
    family = rng.choice(list(FAMILIES))
    method = rng.choice([*METHODS, "full"])
    batch = rng.choice([1, 1, 2, 3])
    lengths = [rng.randint(1, 70) for _ in range(batch)]
    images = None
    if FAMILIES[family].is_vlm and rng.random() < 0.6:
        images = [rng.randint(0, 2) for _ in range(batch)]
    options = {name: rng.choice(values) for name, values in OPTIONS.get(method, {}).items()}
    if method != "full":
        size = {"ratio": round(rng.uniform(0.01, 1.0), 3)} if rng.random() < 0.7 else {"budget": rng.randint(1, 60)}
        options |= size | {"scope": rng.choice(["prompt", "prompt", "context"])}
        options["ratio_of"] = rng.choice(["prompt", "prompt", "vision"])
        if options["scope"] == "context" and (not images or 0 in images or rng.random() < 0.5):
            options["context_tokens"] = rng.randint(0, 40)
        if options["scope"] == "context" and rng.random() < 0.5:
            options |= {"scope": "context-first", "context_tokens": -rng.randint(1, 12)}
        if rng.random() < 0.4:
            options |= {"head_budget": rng.choice([*ADAPTIVE, "shared"]), "safeguard": rng.choice([0.0, 0.2, 1.0])}
        if rng.random() < 0.3:
            options["layer_budget"] = rng.choice([name for name, rule in list_layer_budgets().items() if rule.is_exact])
        if rng.random() < 0.2:
            options["merge"] = rng.choice(sorted(MERGES))
        if rng.random() < 0.1:
            options |= {"scorer": (scorer := rng.choice(METHODS))}
            options = {name: value for name, value in options.items() if name not in OPTIONS.get(method, {})}
            options |= {name: rng.choice(values) for name, values in OPTIONS.get(scorer, {}).items()}
        if rng.random() < 0.4:
            options |= {"decode_interval": rng.choice([1, 2, 5])}
            options |= rng.choice([{"decode_budget": rng.randint(1, 40)}, {"decode_ratio": rng.uniform(0.05, 1)}])
        if rng.random() < 0.3:
            parts = ["prompt", *(["text", "system", "question"] if images and all(images) else [])]
            parts += [f"first:{rng.randint(1, 9)}", f"last:{rng.randint(1, 9)}", f"tokens:{rng.randint(0, 5)}-9"]
            options |= {"protect": "+".join(rng.sample(parts, rng.choice([1, 1, 2]))), "ratio_of": "prompt"}
            options.pop("budget", None)  # room for what is protected
            options["ratio"] = round(rng.uniform(0.5, 1.0), 3)
            if "decode_interval" in options:
                options.pop("decode_budget", None)
                options["decode_ratio"] = rng.uniform(options["ratio"], 1)
            if rng.random() < 0.4:
                options |= {"protect_text": PASSAGE}
                if rng.random() < 0.5:
                    del options["protect"]
        if rng.random() < 0.2:
            parts = [f"first:{rng.randint(1, 6)}", f"tokens:{rng.randint(6, 8)}-{rng.randint(9, 15)}", "last:3"]
            options |= {"fair": "+".join(rng.sample(parts, rng.choice([1, 2, 3])))}
            options |= {"head_budget": rng.choice(["uniform", "shared"])}
    options["first_token"] = rng.choice(["full", "full", "compressed"])
    if "decode_interval" not in options or rng.random() < 0.05:
        kinds = ["dynamic", "static", "offloaded", "offloaded_static"]
        options |= rng.choice([EIGHT_BITS, FP8, ALL_CHANNELS, *({"cache_implementation": kind} for kind in kinds)])
    config = {
        "family": family,
        "heads": rng.choice([(4, 2), (4, 1), (4, 4), (6, 2)]),
        "lengths": lengths,
        "images": images,
        "seed": rng.randint(0, 10_000),
        "method": method,
        "options": options,
        "slots": rng.choice([0, 0, 1, 2]),  # 0: not in flight
        "prefill_tokens": rng.choice([None, 1, 7, 25]),
        "more": rng.choice([None, [rng.choice([1, 4, 20]) for _ in range(batch)]]),  # tokens of a second prompt
    }
    if config["more"] and method != "full" and rng.random() < 0.4:
        unfit = ("context_tokens", "fair", *EIGHT_BITS, *ALL_CHANNELS)
        options |= {"scope": "prompt", "ratio_of": "prompt", "prefill_chunk": rng.choice([1, 3, 8, 25])}
        options["layer_budget"] = rng.choice(["uniform", "uniform", "pyramid"])  # measured ones need the whole prompt
        config["options"] = {name: value for name, value in options.items() if name not in unfit}
    return config


TIED_IN_BATCHES = TIED | {"defensivekv"}


def of_rows(
    family: str, lengths: list[int], method: str, images: list[int] | None = None, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """A configuration that is not drawn: rows of these lengths, answered with these options of `compress`."""
    of_family = {"family": family, "heads": (4, 2), "lengths": lengths, "images": images, "seed": seed}
    return {**of_family, "method": method, "options": {"first_token": "full", **options}}


def scored_by(config: dict[str, Any]) -> str:
    return config["options"].get("scorer", config["method"])


def answer(
    model: torch.nn.Module, inputs: dict, config: dict, forced=None, **session: Any
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    options = config["options"] | calibration_of(scored_by(config), model) | {"tokenizer": OneLetterPerToken()}
    fair = checked_choices() if "fair" in options else contextlib.nullcontext()
    with fair, kvcompress.compress(model, config["method"], max_new_tokens=NEW + 1, **options, **session) as session:
        history = History(session)
        criteria = StoppingCriteriaList([history])
        tokens, logits = generate(model, inputs, NEW, forced, stopping_criteria=criteria)
    return tokens, logits, history.kept


def second_prompt(inputs: dict, tokens: torch.Tensor, more: list[int]) -> dict:
    """Return inputs, their answer and `more[row]` further tokens, which begin with pads where a row has fewer."""
    shape = len(more), 1 + max(more)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, count in enumerate(more):
        text = torch.randint(FIRST_TEXT, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(count))
        ids[row, -count - 1 :] = torch.cat([tokens[row, -1:], text])  # of the answer only this was not fed yet
        mask[row, -count - 1 :] = 1
    fed = tokens[:, :-1]
    longer = {
        "input_ids": torch.cat([inputs["input_ids"], fed, ids], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(fed), mask], 1),
    }
    if "mm_token_type_ids" in inputs:
        types = inputs["mm_token_type_ids"]
        longer["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, fed.shape[1] + shape[1]))
    return longer


def two_turns(
    model: torch.nn.Module, inputs: dict, config: dict, more: list[int], forced=(None, None)
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the tokens of both answers, and the logits of the second."""
    options = config["options"] | calibration_of(scored_by(config), model) | {"tokenizer": OneLetterPerToken()}
    with kvcompress.compress(model, config["method"], max_new_tokens=NEW + 1, **options) as session:
        first, _ = generate(model, inputs, NEW, forced[0])
        longer = second_prompt(inputs, first, more)
        second, logits = generate(model, longer, NEW, forced[1], past_key_values=session.cache)
    return (first, second), logits


def check_protected(config: dict[str, Any], model: torch.nn.Module, inputs: dict, history: dict) -> None:
    """What `protect=` and `protect_text=` name is in every kept set, and with `prompt` nothing that was kept of the
    prompt leaves it."""
    setting, has_text = config["options"].get("protect"), "protect_text" in config["options"]
    if setting is None and not has_text:
        return
    spans, columns = Spans(()) if setting is None else Spans.parse(setting), inputs["input_ids"].shape[1]
    vision = vision_token_mask(model.config, inputs["input_ids"])
    mask = spans.mask(inputs["attention_mask"].sum(1).tolist(), vision, columns, True)
    if has_text:
        mask |= passage_of(inputs)
    first = history[min(history)]
    for layers in history.values():
        for layer, layer_at_first in zip(layers, first, strict=True):
            for row, heads in enumerate(layer):
                for head, head_at_first in zip(heads, layer_at_first[row], strict=True):
                    kept = set(head.tolist())
                    assert set(mask[row].nonzero()[:, 0].tolist()) <= kept, "a protected token was evicted"
                    if spans.whole_prompt:
                        of_prompt = {column for column in head_at_first.tolist() if column < columns}
                        assert of_prompt <= kept, "a token of the prompt was evicted with the answer"


def check(config: dict[str, Any], has_ties: bool | None = None) -> set[str]:
    """Return what the answers were compared with: a `mask`, each of the `rows` alone, `second prompts`, `in flight`.

    `has_ties`: scores may be equal, and rounding decides otherwise in a batch, so only the mask is a reference; None:
    by the method. Raises AssertionError for a wrong result, KVCompressError where the configuration is refused."""
    compared = set()
    family = FAMILIES[config["family"]]
    model = family.build(3, *config["heads"])
    inputs = family.inputs(model, config["lengths"], config["images"], config["seed"])
    if "protect_text" in config["options"]:
        inputs = with_passage(inputs)
    tokens, logits, history = answer(model, inputs, config)
    columns = inputs["input_ids"].shape[1]
    check_protected(config, model, inputs, history)
    exact = config["options"].get("cache_implementation") != "quantized"

    options = config["options"] | calibration_of(scored_by(config), model)
    policy = make_policy(config["method"], **options)
    merges = policy.chosen("merge") != "none"
    if config["options"].get("scope") == "context-first":
        prefixes = kvcompress.PrefixCache(gb=1)
        for _ in range(2):  # the second time, what is kept of the contexts is known
            known = answer(model, inputs, config, tokens, prefix_cache=prefixes)
            torch.testing.assert_close(known[1], logits, atol=TOLERANCE, rtol=0)
    elif exact and not merges and options["first_token"] == "full" and "prefill_chunk" not in options:
        with only_attending_to(model, history):
            _, expected = generate(model, inputs, NEW, forced=tokens)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        compared.add("mask")

    # Equal tokens have equal key norms (knorm, cur) and, in the first layer, values (infinipot-v, vnorm; defensivekv,
    # which lifts the risks of many keys to the same one) and keys before RoPE (leverage); two keys are equally like
    # their mean (keydiff, compactor): in a batch rounding may decide otherwise. So may it among the two keys of a first
    # chunk, of a decode budget of one or of a second prompt, whose standardised scores are 1 and -1 (triattention).
    has_pairs = "prefill_chunk" in options or (policy.decode is not None and policy.decode(min(config["lengths"])) < 2)
    has_pairs |= 1 in (config.get("more") or [])  # behind the answer's last token
    tied = TIED_IN_BATCHES | ({"triattention"} if has_pairs else set())
    if has_ties is None:
        has_ties = bool(tied & {config["method"], config["options"].get("scorer")})
    if has_ties or not exact:
        return compared
    lengths = inputs["attention_mask"].sum(1).tolist()
    for row, length in enumerate(lengths if len(lengths) > 1 else []):
        compared.add("rows")
        _, alone, solo = answer(model, family.solo(inputs, row), config, tokens[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], atol=TOLERANCE, rtol=0)
        for seen, layers in history.items():
            for layer, solo_layer in zip(layers, solo[seen - columns + length], strict=True):
                for head, solo_head in zip(layer[row], solo_layer[0], strict=True):
                    assert (head - (columns - length)).tolist() == solo_head.tolist(), "kept sets differ"
    if (more := config.get("more")) and len(more) > 1:
        forced, logits = two_turns(model, inputs, config, more)
        for row in range(len(more)):
            of_row = [tokens[row : row + 1] for tokens in forced]
            _, alone = two_turns(model, family.solo(inputs, row), config, more[row : row + 1], of_row)
            torch.testing.assert_close(logits[row], alone[0], atol=TOLERANCE, rtol=0)
        compared.add("second prompts")
    if config.get("slots"):
        options = dict(config["options"])
        kind = options.pop("cache_implementation", "dynamic")
        options = {name: value for name, value in options.items() if name not in ALL_CHANNELS}
        options |= {"cache_implementation": "static"} if "static" in kind else {}
        requests = [family.solo(inputs, row) for row in range(len(config["lengths"]))]
        new = [NEW - 2 * row for row in range(len(requests))]
        how = (config["slots"], TOLERANCE, config.get("prefill_tokens"))
        check_in_flight(model, requests, new, config["method"], *how, tokenizer=OneLetterPerToken(), **options)
        compared.add("in flight")
    return compared


def outcome(config: dict[str, Any]) -> dict[str, str]:
    try:
        check(config)
    except kvcompress.KVCompressError as error:
        return {"outcome": "refused", "error": str(error)}
    except Exception as error:  # whatever it is, it is a finding
        return {"outcome": type(error).__name__, "error": traceback.format_exc(limit=-4)}
    return {"outcome": "ok"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz.jsonl"))
    parser.add_argument("--only", type=int, help="run this configuration alone and print it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only is not None:
        config = draw(arguments.seed, arguments.only)
        print(json.dumps(config, indent=2))
        check(config)
        return 0

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[int, dict] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in arguments.out.read_text().splitlines():
            if (row := json.loads(line))["seed"] == arguments.seed:
                results[row["index"]] = row
    with arguments.out.open("a") as file:
        for index in tqdm([i for i in range(arguments.configurations) if i not in results]):
            config = draw(arguments.seed, index)
            results[index] = {"seed": arguments.seed, "index": index, **outcome(config), "config": config}
            file.write(json.dumps(results[index]) + "\n")
            file.flush()
    counts = collections.Counter(row["outcome"] for row in results.values())
    print(f"{len(results)} configurations: {dict(counts)}")
    refusals = collections.Counter(row["error"] for row in results.values() if row["outcome"] == "refused")
    for error, count in refusals.most_common():
        print(f"{count:6} x refused: {error}")
    failed = {i: row for i, row in results.items() if row["outcome"] not in ("ok", "refused")}
    for index, row in list(failed.items())[:10]:
        print(f"failed: --seed {arguments.seed} --only {index}\n{row['error']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
