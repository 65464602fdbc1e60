"""`kvcompress bench`: measure methods, transformers' caches and kvpress, and write the results."""

import argparse
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from transformers import PreTrainedModel

from ..errors import KVCompressError, loading, unknown_name
from ..files import replacing, write_text
from ..hooks.model import text_decoder
from .contenders import KVPressProcess, MethodSpec, Ours, Workload, make_contenders
from .grid import decodes, largest_batch, measure_grid
from .report import cells_of, columns, markdown, plot, rows_of
from .results import Results, about, check_files, say, settle
from .shapes import source
from .standalone import load

PEERS = ("dynamic", "static")


def methods_of(names: list[str], ratios: list[float]) -> list[MethodSpec]:
    """Return `full`, the baseline, and every other method at every ratio. Raises KVCompressError."""
    methods = [MethodSpec.parse(name, ratio) for name in ["full", *names] for ratio in ratios]
    return list({str(method): method for method in methods}.values())


def measure(given: argparse.Namespace, arguments: list[str]) -> None:
    """Run the benchmark given by parsed `arguments`. Raises KVCompressError before anything is loaded."""
    origin, methods = source(given.model, given.shape), methods_of(given.methods, given.ratios)
    for peer in given.peers:
        if peer not in PEERS:
            raise unknown_name("there is no peer", peer, PEERS)
    where = settle(given)
    if given.largest_batch and where.type != "cuda":
        raise KVCompressError("--largest-batch tries until memory runs out, on CUDA only; on a CPU use --memory-limit")
    check_files(given.out, ".json", ".md", ".png")
    settings = {
        "model": given.model or f"shape {given.shape}",
        "dtype": given.dtype,
        "methods": [str(method) for method in methods],
        "peers": [*given.peers, *(["kvpress"] if given.kvpress_python else [])],
        "compile": given.compile,
        "steps": given.new,
        "one_prompt": given.one_prompt,
        "repeats": given.repeats,
        "clock": given.clock,
        "device": given.device,
        "threads": given.threads,
    }
    with loading(given.model or given.shape):
        model = load(origin, given.dtype, where)
    content = {
        **about(["kvcompress", "bench", *arguments], settings, where),
        "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
        "weight_bytes_read": weight_bytes_read(model),
    }
    results, end = Results(given.out.with_suffix(".json"), content, given.resume), time.monotonic() + 60 * given.minutes
    if given.largest_batch:  # before another process takes memory
        find_largest(results, [Ours(model, method) for method in methods if not method.is_static], given, end)
    results.content["largest_batch_note"] = note(given.memory_limit, bool(results.content["largest"]))
    with ExitStack() as stack:
        process = None
        if given.kvpress_python:
            process = stack.enter_context(
                KVPressProcess(given.kvpress_python, origin, given.dtype, given.device, given.threads)
            )
            there = process.versions
            results.content["environment"]["kvpress"] = (
                f"{there['kvpress']} (transformers {there['transformers']}, torch {there['torch']})"
            )
        contenders = make_contenders(model, methods, given.peers, given.compile, process)
        how = (given.new, given.clock, given.one_prompt)
        workloads = [Workload(length, batch, *how) for length in given.lengths for batch in given.batches]
        measure_grid(results, contenders, workloads, given.repeats, where, end - time.monotonic())
    finish(results.content, given)


def weight_bytes_read(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a decode step reads: decoder and output head, but not the input embeddings."""
    decoder, head, table = text_decoder(model), model.get_output_embeddings(), model.get_input_embeddings()
    weights = {id(weight): weight for part in (decoder, head) if part is not None for weight in part.parameters()}
    if head is None or table.weight is not head.weight:
        weights.pop(id(table.weight), None)
    return sum(weight.nbytes for weight in weights.values())


def note(memory_limit: float | None, was_tried: bool) -> str:
    """Return how the largest batch was found, if at all."""
    if memory_limit is not None:
        return f"Largest batch: computed, for weights and KV caches within {memory_limit:g} GB."
    if was_tried:
        return "Largest batch: tried, decoding after a prompt that was prefilled once."
    return "The largest batch was not asked for."


def find_largest(results: Results, contenders: list[Ours], given: argparse.Namespace, end: float) -> None:
    """Find the batches that are not yet in the results; start on no further one after the time `end`."""
    for length in given.lengths:
        for contender in contenders:
            if results.has("largest", length=length, way=contender.name):
                continue
            is_late = time.monotonic() > end
            say(f"{length} tokens, {contender.name}: the largest batch" + (": skipped, out of time" if is_late else ""))
            if is_late:
                continue

            # One prompt for all rows, since a server admits prompts one by one: the memory for prefilling all rows at
            # once does not count.
            def fits(batch: int, contender: Ours = contender, length: int = length) -> bool:
                return decodes(contender, Workload(length, batch, given.new, "wall", one_prompt=True))

            results.add("largest", {"length": length, "way": contender.name, "batch": largest_batch(fits)})


def finish(content: dict[str, Any], given: argparse.Namespace) -> None:
    """Write the table next to the JSON, print it, and plot."""
    rows = rows_of(content, given.memory_limit and int(given.memory_limit * 1e9))
    text = markdown(content, rows)
    write_text(given.out.with_suffix(".md"), text)
    print_table(text, rows)
    if all("error" in row for row in rows):
        say("no plot: " + ("no cache had enough memory" if rows else "nothing was measured in time"))
    elif find_spec("matplotlib"):
        with replacing(given.out.with_suffix(".png")) as draft:
            plot(content, rows, draft)
    else:
        say("no plot: matplotlib is not installed (pip install 'kvcompress[bench]')")


def print_table(text: str, rows: list[dict[str, Any]]) -> None:
    """Print the medians on a terminal, one table per cell; otherwise print the text that was written."""
    if not (sys.stdout.isatty() and find_spec("rich")):
        print(text)
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    for (length, batch), of_cell in groupby(rows, lambda row: (row["length"], row["batch"])):
        header, cells = columns([cells_of(row, spread=False) for row in of_cell])
        shown = Table(box=SIMPLE, title=f"{length} prompt tokens, batch {batch}", collapse_padding=True, pad_edge=False)
        for name in header[2:]:
            shown.add_column(name, justify="left" if name == "cache" else "right", no_wrap=name == "cache")
        for row in cells:
            shown.add_row(*row[2:])
        Console(markup=False, emoji=False).print(shown)
