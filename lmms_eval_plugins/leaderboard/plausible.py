"""What a question's realised ratio and KV bytes can be, from what was asked for and the model's configuration."""

import math
from typing import Any

import torch

from kvcompress.layer_budgets import layer_budget
from kvcompress.methods import method_info
from kvcompress.scoring.budget import Budget
from kvcompress.tokens.base import TokenMethod

Bounds = tuple[float, float]

NEAR = 0.005  # of a realised ratio, and two tokens: a token that is fed again, and one of rounding
LEAST, MOST = 0.99, 1.5  # of the bytes of keys and values: index and sums come on top


def realised_ratio(protocol: dict[str, Any], row: dict[str, Any]) -> Bounds:
    """From where to where the mean over layers may be, for a question with the measurement `row`.

    Most methods keep exactly what was asked for. Those that drop vision tokens on the way keep more in the first
    layers; of `scope=context`, and of layer budgets that follow from the prompt, only the least is known.
    """
    tokens, vision, options = row["tokens_in"], row["vision_tokens"], protocol["options"]
    if protocol["method"] == "full":
        least = most = 1.0
    elif issubclass(method_info(protocol["method"]).cls, TokenMethod):
        least, most = (tokens - vision) / tokens, 1.0
    else:
        candidates = vision if options["ratio_of"] == "vision" else tokens
        asked = Budget(protocol["ratio"], protocol["budget"], _on_top(protocol))
        least = (tokens - candidates + asked(candidates)) / tokens
        is_exact = options["scope"] == "prompt" and layer_budget(options["layer_budget"]).is_exact
        most = least if is_exact else 1.0
    near = NEAR + 2 / tokens
    return least - near, most + near


def _on_top(protocol: dict[str, Any]) -> int:
    """First tokens of a prompt that its ratio does not count."""
    options = protocol["options"]
    scored_by = method_info(options.get("scorer") or protocol["method"]).cls
    of_variant = scored_by.by_variant.get(options.get("variant"), {})
    return options["sinks"] if of_variant.get("sinks_on_top") and options["ratio_of"] == "prompt" else 0


def held_bytes(protocol: dict[str, Any], environment: dict[str, Any], row: dict[str, Any]) -> Bounds:
    """From where to where the bytes may be that hold a question's keys, values and index after its prompt."""
    config, options, settings = environment["config"], protocol["options"], protocol["settings"]
    kept = row["tokens_in"] * sum(row["realised_ratio"])  # of all compressed layers together, in the mean over KV heads
    of_whole = getattr(torch, environment["dtype"]).itemsize
    of_stored = of_whole
    if options.get("cache_implementation") == "quantized":
        of_stored = options["kv_bits"] / 8
    elif options.get("cache_implementation") == "think":  # keys of fewer channels, values of all
        of_stored = of_whole * (options["key_channels"] + 1) / 2
    numbers = kept * config["kv_heads"] * 2 * config["head_dim"]
    processes = environment["processes"] if "tp_plan" in settings else 1  # each holds a part, and the first is measured
    has_others = config["layers"] > len(row["realised_ratio"])  # that keep a cache of another kind
    evicts = options.get("decode_budget") is not None or options.get("decode_ratio") is not None  # remembers queries
    most = math.inf if has_others or evicts else MOST * of_whole * numbers * _beams(settings)
    return LEAST * of_stored * numbers / processes, most


def _beams(settings: dict[str, Any]) -> int:
    return int(settings.get("gen_kwargs", {}).get("num_beams", 1))
