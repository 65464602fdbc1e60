"""Time decoding over ragged entries: ways to attend to them, and adakv against a uniform method of the same budget.

    python -m benchmarks.ragged_decode                                   # CPU, fp32, all cores
    python -m benchmarks.ragged_decode --device cuda --dtype bfloat16

First, one attention layer at a decode step: every implementation available on this machine is checked against the plain
reference and then timed. Second, whole decode steps of a model with SmolLM2-135M's shape and random weights on a
compressed prompt: adakv, whose heads differ in length, against snapkv, whose heads do not.
"""

import argparse
import copy
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

import kvcompress
from kvcompress.bench.shapes import SHAPES
from kvcompress.bench.standalone import load, prompt_ids
from kvcompress.bench.timing import cell, interleaved, table
from kvcompress.device import runs_triton
from kvcompress.flag_types import whole
from kvcompress.hooks import attention
from kvcompress.kernels.ragged_decode import decode_by_segment, decode_gathered, ragged_decode_reference

from .driver import Run, speed_parser, start
from .kernels import MODELS

BATCHES = (1, 8, 32)
LENGTHS = (64, 256, 1024, 4096)  # mean entries per segment; segments have 0.3 to 1.7 times as many
SPARE = 32
RATIO = 0.1


def ragged_case(batch: int, heads: int, kv_heads: int, head_dim: int, length: int, **kind) -> dict:
    """Draw a query and ragged entries with spare rows between segments, as a storage holds them, and `dense` entries of
    the mean length without spare rows; `sizes` as in `ragged_decode`."""
    generator = torch.Generator().manual_seed(length)
    shares = torch.empty(batch, kv_heads).uniform_(0.3, 1.7, generator=generator)
    lengths = (shares * length).long().clamp(min=1)
    ends = (lengths.flatten() + SPARE).cumsum(0)
    rows = int(ends[-1])
    mean = int(lengths.float().mean())
    return {
        "query": torch.randn(batch, heads, 1, head_dim, **kind),
        "keys": torch.randn(rows, head_dim, **kind),
        "values": torch.randn(rows, head_dim, **kind),
        "starts": (ends - SPARE - lengths.flatten()).view_as(lengths).to(kind["device"]),
        "lengths": lengths.to(kind["device"]),
        "sizes": [n for length in lengths.flatten().tolist() for n in (length, SPARE)],
        "dense": tuple(torch.randn(batch, kv_heads, mean, head_dim, **kind) for _ in range(2)),
    }


def ways_to_attend(case: dict) -> dict[str, Callable[[], torch.Tensor]]:
    """Return name -> function that computes a decode step's attention, (batch, heads, 1, head_dim). All results are
    equal except that of `uniform`, which shows the cost of a uniform method with as many entries."""
    query, keys, values, starts, lengths = (case[name] for name in ("query", "keys", "values", "starts", "lengths"))
    sizes, scaling = case["sizes"], query.shape[-1] ** -0.5
    longest = max(sizes[::2])
    ways = {
        "uniform": partial(scaled_dot_product_attention, query, *case["dense"], scale=scaling, enable_gqa=True),
        "gathered": lambda: decode_gathered(query, keys, values, starts, lengths, longest, scaling),
    }
    if query.device.type == "cpu":
        ways["by segment"] = lambda: decode_by_segment(query, keys, values, sizes, scaling)
        return ways
    if runs_triton(query.device):
        from kvcompress.kernels.ragged_decode_triton import ragged_decode_triton

        ways["triton"] = lambda: ragged_decode_triton(query, keys, values, starts, lengths, longest, scaling)
    if query.dtype == torch.float32:
        return ways  # the others support only 16 bits
    # For them, a segment is a sequence with one KV head and the query heads of its group.
    packed = query.view(starts.numel(), -1, query.shape[3])
    query_ends = torch.arange(len(packed) + 1, device=query.device, dtype=torch.int32)
    if find_spec("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

        if "seqused_k" in signature(varlen_attn).parameters:  # not in torch 2.11
            starts_end = torch.cat([starts.flatten(), starts.new_tensor([len(keys)])]).int()
            used = {"enable_gqa": True, "seqused_k": lengths.flatten().int()}
            arguments = (packed, keys[:, None], values[:, None], query_ends, starts_end, 1, longest)
            ways["varlen_attn"] = lambda: varlen_attn(*arguments, scale=scaling, **used).view_as(query)
    if find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        # It takes no lengths besides the starts, so it does not support spare rows.
        parts = [[part for part in states.split(sizes)[::2]] for states in (keys, values)]
        tight = [torch.cat(part)[:, None] for part in parts]
        ends = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).int()
        ways["flash_attn_varlen_func, no spare rows"] = lambda: flash_attn_varlen_func(
            packed, *tight, query_ends, ends, 1, longest, softmax_scale=scaling
        ).view_as(query)
    return ways


def one_layer(given: argparse.Namespace, model: str, batch: int, length: int) -> list[dict]:
    heads, kv_heads, head_dim = MODELS[model]
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    case = ragged_case(batch, heads, kv_heads, head_dim, length, device=device, dtype=dtype)
    ways = ways_to_attend(case)
    wanted = ragged_decode_reference(
        *(case[name] for name in ("query", "keys", "values", "starts", "lengths")), head_dim**-0.5
    )
    for name, call in ways.items():
        if name != "uniform":
            torch.testing.assert_close(call(), wanted, atol=tolerance, rtol=tolerance)
    taken = interleaved(ways, given.repeats, device, given.clock)
    place = {"dtype": given.dtype, "model": model, "batch": batch, "kv_heads": kv_heads, "length": length}
    return [{**place, "ms": taken}]


@cache
def prefilled(
    dtype: str, device: torch.device, prompt: int, new: int
) -> tuple[PreTrainedModel, dict[str, kvcompress.CompressedCache]]:
    """Return the model, and each method's cache of one prompt with room for `new` tokens."""
    model, caches = load({"config": SHAPES["smollm2-135m"]}, dtype, device), {}
    for method in ("snapkv", "adakv"):
        caches[method] = kvcompress.CompressedCache(model.config, method, RATIO, max_new_tokens=new)
        with torch.no_grad(), kvcompress.attach(model):
            model(prompt_ids(model, 1, prompt), past_key_values=caches[method], logits_to_keep=1)
    return model, caches


def whole_model(given: argparse.Namespace, batch: int, prompt: int) -> list[dict]:
    device = torch.device(given.device)
    model, prompts = prefilled(given.dtype, device, prompt, given.repeats + 2)
    layers = range(model.config.num_hidden_layers)
    lengths = [len(head) for layer in layers for head in prompts["adakv"].kept_indices(layer)[0]]
    caches = copy.deepcopy(prompts)
    for held in caches.values():
        held.batch_repeat_interleave(batch)  # the prefill is not measured here
    nbytes = {method: held.nbytes for method, held in caches.items()}
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    with torch.no_grad(), kvcompress.attach(model):
        ways = {method: partial(model, token, past_key_values=held) for method, held in caches.items()}
        gathering = copy.deepcopy(caches["adakv"])
        ways["adakv, gathered"] = partial(decode_gathering, model, token, gathering)
        taken = interleaved(ways, given.repeats, device, given.clock)
    place = {"dtype": given.dtype, "batch": batch, "prompt": prompt}
    return [{**place, "nbytes": nbytes, "adakv_lengths": [min(lengths), max(lengths)], "ms": taken}]


def decode_gathering(model: PreTrainedModel, token: torch.Tensor, cache: kvcompress.CompressedCache) -> None:
    """Run a decode step that copies all entries into a padded tensor, in every layer."""
    with mock.patch.object(attention, "can_decode_in_place", return_value=False):
        model(token, past_key_values=cache)


def layer_table(records: list[dict]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record["ms"]))
    rows = [
        [record["model"], record["batch"], record["kv_heads"], record["length"]]
        + [cell(record["ms"][name]) for name in names]
        for record in records
    ]
    return table(["heads of", "batch", "KV heads", "mean length", *names], rows)


def model_table(records: list[dict]) -> str:
    rows = [
        [record["batch"], "{}-{}".format(*record["adakv_lengths"])]
        + [f"{nbytes / 1e6:.2f}" for nbytes in record["nbytes"].values()]
        + [cell(taken) for taken in record["ms"].values()]
        + [f"{record['ms']['adakv']['median'] / record['ms']['snapkv']['median']:.2f}"]
        for record in records
    ]
    header = ["batch", "entries per head (adakv)", "snapkv MB", "adakv MB", *records[0]["ms"], "adakv / snapkv"]
    return table(header, rows)


def main(argv: list[str]) -> None:
    parser = speed_parser("ragged_decode", __doc__, repeats=30)
    parser.add_argument(
        "--prompt", type=whole(), default=4096, help="tokens of the whole model's prompt; 0 leaves it out (4096)"
    )
    parser.add_argument("--batches", nargs="+", type=whole(1), default=BATCHES)
    parser.add_argument("--lengths", nargs="+", type=whole(1), default=LENGTHS, help="mean entries of a segment")
    run = Run(parser, argv, grid=("prompt", "batches", "lengths"))
    given, lengths = run.given, [(batch, length) for batch in run.given.batches for length in run.given.lengths]
    cells = [{"model": model, "batch": batch, "length": length} for model in MODELS for batch, length in lengths]
    run.measure(cells, partial(one_layer, given))
    parts = [
        f"Milliseconds ({given.clock} clock), median (quartiles), {given.dtype}.",
        "## One layer's attention at a decode step",
        "Heads of two models; segments, one per row and KV head, of 0.3 to 1.7 times the mean length, with "
        f"{SPARE} spare rows each. `uniform` is plain attention over as many entries in heads of equal length; the "
        "others all attend to the ragged entries.",
        layer_table([record for record in run.records if "model" in record]),
    ]
    if given.prompt:
        run.measure([{"batch": batch, "prompt": given.prompt} for batch in (1, 8)], partial(whole_model, given))
        parts += [
            "## A whole decode step",
            f"A model of SmolLM2-135M's shape with random weights, a prompt of {given.prompt} tokens (the same in "
            f"every row), ratio {RATIO}. Megabytes with the room for new tokens.",
            model_table([record for record in run.records if record.get("prompt") == given.prompt]),
        ]
    run.report("Decoding over ragged entries", *parts)


if __name__ == "__main__":
    start(main)
