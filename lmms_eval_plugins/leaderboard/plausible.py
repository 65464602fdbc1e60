"""Bound a question's realised ratio and KV bytes from the requested size and the model's configuration."""

import math
from typing import Any

import torch

from kvcompress.layer_budgets import layer_budget
from kvcompress.methods import method_info
from kvcompress.scoring.budget import Budget
from kvcompress.tokens.base import TokenMethod

from ..model.input_methods import INPUT_METHODS, choose

Bounds = tuple[float, float]

NEAR = 0.005  # tolerance of a realised ratio, plus two tokens: one fed again, and one for rounding
LEAST, MOST = 0.99, 1.5  # times the bytes of keys and values; index and running sums add to them


def realised_ratio(protocol: dict[str, Any], row: dict[str, Any]) -> Bounds:
    """Return the bounds of the mean realised ratio over layers, for a question with the measurement `row`.

    Most methods keep exactly what was requested. Methods that drop vision tokens inside the model keep more in the
    first layers. For `scope=context`, and for layer budgets that depend on the prompt, only the lower bound is known;
    for methods that change the pictures, only the upper one.
    """
    tokens, vision, options = row["tokens_in"], row["vision_tokens"], protocol["options"]
    if protocol["method"] == "full":
        least = most = 1.0
    elif protocol["method"] in INPUT_METHODS:  # marks around a picture may go with it
        asked = choose(protocol["method"], protocol["ratio"], protocol["budget"], options).vision_tokens(vision)
        least, most = 0.0, (tokens - vision + asked) / tokens
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
    """Return how many first tokens of a prompt are kept in addition to its ratio."""
    options = protocol["options"]
    scored_by = method_info(options.get("scorer") or protocol["method"]).cls
    of_variant = scored_by.by_variant.get(options.get("variant"), {})
    return options["sinks"] if of_variant.get("sinks_on_top") and options["ratio_of"] == "prompt" else 0


def held_bytes(protocol: dict[str, Any], environment: dict[str, Any], row: dict[str, Any]) -> Bounds:
    """Return the bounds of the bytes that hold a question's keys, values and index after its prompt."""
    config, options, settings = environment["config"], protocol["options"], protocol["settings"]
    kept = row["tokens_in"] * sum(row["realised_ratio"])  # sum over compressed layers, mean over KV heads
    of_whole = getattr(torch, environment["dtype"]).itemsize
    of_stored = of_whole
    if options.get("cache_implementation") == "quantized":
        of_stored = options["kv_bits"] / 8
    elif options.get("cache_implementation") == "think":  # keys with fewer channels, values with all
        of_stored = of_whole * (options["key_channels"] + 1) / 2
    numbers = kept * config["kv_heads"] * 2 * config["head_dim"]
    processes = environment["processes"] if "tp_plan" in settings else 1  # each holds a part; the first is measured
    has_others = config["layers"] > len(row["realised_ratio"])  # layers with another kind of cache
    evicts = options.get("decode_budget") is not None or options.get("decode_ratio") is not None  # also stores queries
    most = math.inf if has_others or evicts else MOST * of_whole * numbers * _beams(settings)
    return LEAST * of_stored * numbers / processes, most


def _beams(settings: dict[str, Any]) -> int:
    return int(settings.get("gen_kwargs", {}).get("num_beams", 1))
