"""`kvcompress bench launches`: count the kernels of a decode step, an eviction and a prefill on a CUDA device.

It also counts how often the host waits. On a device PyTorch's profiler counts; without one, a pretended device does
(`pretended`), with the same columns.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from ..cache.cache import CompressedCache
from ..cache_name import CACHE
from ..errors import KVCompressError, loading
from ..hooks.session import attach
from .contenders import MethodSpec
from .pretended.counts import Counts
from .results import Results, about, check_files, page
from .shapes import source
from .standalone import load, prompt_ids
from .timing import table

Meter = Callable[[], AbstractContextManager[Counts]]
Make = Callable[[PreTrainedModel, int], Cache]  # takes the length of the prompt
CUT = {"intermediate_size": 64, "vocab_size": 512}  # a smaller shape, same kernels
LAYERS = 4  # of a shape, by default
PASS = "kvcompress pass "
# Runtime calls in which the host waits.
WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass
class Row:
    """The counts of one cache, for the prefill and each decode step.

    `plain` is the median step, and `evicting` the step with the most kernels, if it has more than that."""

    name: str
    layers: int
    prefill: Counts
    steps: list[Counts]

    @property
    def plain(self) -> Counts:
        return sorted(self.steps, key=lambda step: step.kernels)[len(self.steps) // 2]

    @property
    def evicting(self) -> Counts | None:
        most = max(self.steps, key=lambda step: step.kernels)
        return most if most.kernels > self.plain.kernels + self.layers else None

    def numbers(self) -> dict[str, Any]:
        """Return the table's row as numbers: kernels per layer, waits and bytes of a pass."""
        plain, evicting = self.plain, self.evicting
        return {
            "cache": self.name,
            "kernels": plain.kernels / self.layers,
            "waits": plain.waits,
            "bytes": plain.bytes or None,  # which the profiler does not tell
            "eviction_kernels": evicting and (evicting.kernels - plain.kernels) / self.layers,
            "eviction_waits": evicting and evicting.waits - plain.waits,
            "prefill_kernels": self.prefill.kernels / self.layers,
            "prefill_waits": self.prefill.waits,
        }

    def cells(self) -> dict[str, str]:
        """Return the table's row by column name."""
        row = self.numbers()
        more = row["eviction_kernels"]
        return {
            "cache": self.name,
            "kernels per layer": f"{row['kernels']:.1f}",
            "waits": str(row["waits"]),
            "MB": "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}",
            "an eviction: kernels per layer": "" if more is None else f"+{more:.1f}",
            "its waits": "" if more is None else str(row["eviction_waits"]),
            "prefill: kernels per layer": f"{row['prefill_kernels']:.1f}",
            "waits of the prefill": str(row["prefill_waits"]),
        }

    def lines(self, most: int) -> list[str]:
        """Return the lines of code with the most launches and waits, in a step, an eviction and the prefill."""
        found = []
        parts = {"a step": self.plain, "an eviction": self.evicting, "the prefill": self.prefill}
        for part, counts in parts.items():
            for what, places in (("kernels", counts and counts.kernels_at), ("waits", counts and counts.waits_at)):
                found += [
                    f"{part}: {count} {what} at {place}" for place, count in (places or Counter()).most_common(most)
                ]
        return found


def caches(methods: list[MethodSpec], room: int) -> dict[str, Make]:
    """Return the caches to decode with, transformers' and then ours, with room for `room` decoded tokens."""
    return {
        "DynamicCache": lambda model, length: DynamicCache(config=model.config),
        "StaticCache": lambda model, length: StaticCache(config=model.config, max_cache_len=length + room),
        **{str(each): lambda model, length, each=each: each.cache(model.config, room) for each in methods},
    }


@torch.no_grad()
def count(model: PreTrainedModel, name: str, make: Make, meter: Meter, batch: int, length: int, steps: int) -> Row:
    """Prefill `length` tokens and decode `steps` tokens, counting every pass with `meter`."""
    ids = prompt_ids(model, batch, length)
    positions = torch.arange(length, length + steps).to(model.device)
    cache, counted = make(model, length), []
    with attach(model) if isinstance(cache, CompressedCache) else nullcontext():
        with meter() as prefill:
            logits = model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits
        for step in range(steps):
            token = logits[:, -1:].argmax(-1)
            given = {"position_ids": positions[step : step + 1][None].expand(batch, 1)}
            with meter() as counts:
                logits = model(token, use_cache=True, **{CACHE: cache}, **given).logits
            counted.append(counts)
    return Row(name, model.config.get_text_config().num_hidden_layers, prefill, counted)


class Profiler:
    """Counts the passes of one cache with PyTorch's profiler. Their `Counts` are filled when it ends.

    One session records all passes, because its start and end take longer than a decode step."""

    def __enter__(self) -> "Profiler":
        self.passes: list[Counts] = []
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.profile = torch.profiler.profile(activities=activities).__enter__()
        return self

    @contextmanager
    def __call__(self) -> Iterator[Counts]:
        self.passes.append(Counts())
        torch.cuda.synchronize()
        with torch.profiler.record_function(f"{PASS}{len(self.passes) - 1}"):
            yield self.passes[-1]
            torch.cuda.synchronize()  # so that the pass's kernels run within it

    def __exit__(self, *error: object) -> None:
        self.profile.__exit__(*error)
        if error[0] is None:
            add_events(self.passes, self.profile.events())


def add_events(passes: list[Counts], events: list[Any]) -> None:
    """Count the profiler's events pass by pass: kernels on the device, and runtime calls that wait.

    A pass is the time of the host's event that is named after it, whose last wait is the profiler's own."""
    on_host = [event for event in events if event.device_type != DeviceType.CUDA]
    named = {event.name: event.time_range for event in on_host if event.name.startswith(PASS)}
    for number, counts in enumerate(passes):
        span = named[f"{PASS}{number}"]
        for event in events:
            if not span.start <= event.time_range.start < span.end or event.name.startswith(PASS):
                continue
            if event.device_type == DeviceType.CUDA:
                if not event.name.startswith(("Memcpy", "Memset")):
                    counts.kernels += 1
            elif event.name in WAITING_CALLS:
                counts.waits += 1
                counts.waits_at[event.name] += 1
        counts.waits -= 1
        counts.waits_at["cudaDeviceSynchronize"] -= 1


def measure(given: argparse.Namespace, arguments: list[str]) -> None:
    """Run the benchmark given by parsed `arguments`. Raises KVCompressError before anything is loaded."""
    origin = source(given.model, given.shape)
    methods = [MethodSpec.parse(name, given.ratio) for name in given.methods]
    check_files(given.out, ".json", ".md")
    cut = {}
    if "config" in origin:
        cut = {"num_hidden_layers": given.layers or LAYERS, **CUT}
        origin = {"config": {**origin["config"], **cut}}
    elif given.layers:
        raise KVCompressError(f"--layers is for a --shape: {given.model} has its own")
    is_there = torch.cuda.is_available()
    where = torch.device("cuda" if is_there else "cpu")
    with ExitStack() as stack:
        with loading(given.model or given.shape):
            model = load(origin, given.dtype, where)
        metering: Callable[[], AbstractContextManager[Meter]] = Profiler
        if not is_there:
            from .pretended.device import PretendedCuda

            gpu = stack.enter_context(PretendedCuda())
            model, metering = model.to("cuda"), lambda: nullcontext(gpu.counting)
        sizes = given.batch, given.length, given.new
        rows = []
        for name, make in caches(methods, given.new + 1).items():
            with metering() as meter:
                rows.append(count(model, name, make, meter, *sizes))
    names = ("length", "batch", "new", "dtype")
    settings = {"model": given.model or given.shape, "cut": cut}
    settings |= {name: getattr(given, name) for name in names}
    content = about(["kvcompress", "bench", "launches", *arguments], settings, where)
    results = Results(given.out.with_suffix(".json"), content, resume=False, parts=("rows",))
    for row in rows:
        results.add("rows", row.numbers())
    results.report(markdown(results.content, rows, is_there, given.lines))


def markdown(content: dict[str, Any], rows: list[Row], is_there: bool, lines: int) -> str:
    """Return the page: a table with its explanation, and the most expensive lines."""
    settings = content["settings"]
    where = "counted by the profiler" if is_there else "counted on a pretended CUDA device"
    cut = "".join(f" {name}={value}" for name, value in settings["cut"].items())
    cut = f" The shape's layers, with{cut}: the same kernels, fewer bytes." if cut else ""
    what = (
        f"One decode step behind {settings['length']} tokens, batch {settings['batch']}, {settings['dtype']}, {where}. "
        "Kernels per layer are those of the whole pass over the number of layers. Waits: times that the host waits for "
        f"the device.{cut}"
    )
    cells = [row.cells() for row in rows]
    parts = [what, table(list(cells[0]), [list(row.values()) for row in cells], names=1)]
    for row in rows if lines else []:
        parts.append("\n".join([f"**{row.name}**", "", *(f"- {line}" for line in row.lines(lines))]))
    return page(content, f"Launches and waits: {settings['model']}", *parts)
