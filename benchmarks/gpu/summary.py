"""A stage's results in at most 60 lines: its cells, measurements compared with targets, failures."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from kvcompress.bench.report import rows_of
from kvcompress.bench.timing import short, table

from .stages import LONG, Cell

MOST_LINES = 60
# The targets: upper or lower limits.
LIMIT_OF_STATIC, SCORING_SHARE, ADAPTIVE, VL_CACHE_GAIN, THROUGHPUT_GAIN = 1.4, 0.03, 1.15, 7.0, 5.0
SLACK = 0.04  # fraction of the questions that may differ from the CPU, since rounding decides some
STATIC = "snapkv:cache_implementation=static@0.1"

Records = dict[str, dict[str, Any]]
Target = tuple[str, str, str, bool | None]  # what, wanted, measured, whether it is met


def summarised(stage: int, cells: list[Cell], records: Records) -> str:
    known = {cell.name: records[cell.name] for cell in cells if cell.name in records}
    results = {name: record["result"] for name, record in known.items() if "result" in record}
    lines = [f"# Stage {stage} on {device_of(results)}", ""]
    rows = []
    for cell in cells:
        record = known.get(cell.name, {"state": "not run"})
        said = READERS[cell.kind](results[cell.name]) if cell.name in results else ""
        rows.append([cell.name, record["state"], record.get("seconds", ""), said])
    lines += table(["cell", "state", "s", "result"], rows).splitlines()
    targets = list(TARGETS[stage](cells, known, results))
    verdicts = {True: "met", False: "missed", None: "not measured"}
    lines += [
        "",
        *table(["target", "wanted", "measured", ""], [[*t[:3], verdicts[t[3]]] for t in targets]).splitlines(),
    ]
    for cell in cells:
        record = known.get(cell.name, {})
        if record.get("state") in ("failed", "cut"):
            lines += ["", f"{cell.name} {record['state']}:"]
            failed = record.get("result", {}).get("failed") if cell.kind == "tests" else None
            lines += [f"    {line[:150]}" for line in (failed or record["tail"])[-6:]]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "... the .json and the .log have the rest"]
    return "\n".join(lines) + "\n"


def device_of(results: dict[str, Any]) -> str:
    found = results.get("environment")
    if found is None:
        return "an unknown device"
    there = [f"{name} {number}" for name, number in found["packages"].items() if number]
    rates = f"copies {found['copy_gb_per_s']:.0f} GB/s, multiplies {found['matmul_tflops']:.3g} TFLOP/s"
    return f"{found['device']} ({rates}); torch {found['torch']}, transformers {found['transformers']}, " + ", ".join(
        there
    )


# -- one line per kind of result


def of_tests(result: dict[str, Any]) -> str:
    return f"{result['passed']} passed, {len(result['failed'])} failed, {result['skipped']} skipped"


def of_accuracy(result: dict[str, Any]) -> str:
    said = [
        f"{name}: {' '.join(f'{m} {percent(r):.0f}' for m, r in t.items())}" for name, t in result["tables"].items()
    ]
    return f"% of {result['questions']} questions; " + "; ".join(said)


def percent(right: list[bool]) -> float:
    return 100 * sum(right) / max(1, len(right))


def of_bench(result: dict[str, Any]) -> str:
    """Return milliseconds per token of each contender, and how many times the limit that is, in each cell of its
    grid."""
    said = {}
    for row in rows_of(result):
        place = f"{row['length']}x{row['batch']}"
        if "error" in row:
            said.setdefault(place, []).append(f"{row['way']}: {row['error']}")
            continue
        name = row["way"].replace("cache_implementation=", "").replace("transformers ", "")
        of_limit = f" ({1 / row['bandwidth_fraction']:.2f}x)"
        said.setdefault(place, []).append(f"{name} {short(row['decode_ms']['median'])}{of_limit}")
    largest = [f"largest {found['way']}: {found['batch']}" for found in result.get("largest", [])]
    return "ms/token (x limit) " + "; ".join(
        [*(f"{place}: {', '.join(each)}" for place, each in said.items()), *largest]
    )


def of_kernels(result: dict[str, Any]) -> str:
    """Return, for each measured operation, the fastest way at the longest length, with the next one."""
    last: dict[tuple, dict] = {}
    for record in result["records"]:
        last[record.get("what", ""), record["model"]] = record  # the longest comes last
    return "; ".join(f"{' '.join(key).strip()}: {winner(record['ms'])}" for key, record in last.items())


def winner(taken: dict[str, dict[str, float]]) -> str:
    """Return the fastest way. A layer's own attention and plain attention over equal heads compute something else."""
    medians = {name: way["median"] for name, way in taken.items() if name not in ("attention", "uniform")}
    order = sorted(medians, key=medians.get)
    rest = f", {order[1]} {short(medians[order[1]])}" if len(order) > 1 else ""
    return f"{order[0]} {short(medians[order[0]])} ms{rest}"


def of_throughput(result: dict[str, Any]) -> str:
    return ", ".join(f"{served['name']} {short(rate(served))} tokens/s" for served in result["served"])


def rate(served: dict[str, Any]) -> float:
    return served["tokens"] / served["seconds"]


def of_speech(result: dict[str, Any]) -> str:
    said = []
    for name, answers in result["answers"].items():
        first, factor = (
            statistics.median(each[key] for each in answers) for key in ("first_audio_s", "real_time_factor")
        )
        said.append(f"{name}: first audio {short(first)} s, real-time factor {short(factor)}")
    return "; ".join(said)


def of_launches(result: dict[str, Any]) -> str:
    said = [f"{row['cache']} {row['kernels']:.0f} ({row['waits']})" for row in result["rows"]]
    return "kernels per layer and step (waits): " + ", ".join(said)


READERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "environment": lambda result: "",
    "tests": of_tests,
    "accuracy": of_accuracy,
    "bench": of_bench,
    "kernels": of_kernels,
    "ragged": of_kernels,
    "launches": of_launches,
    "throughput": of_throughput,
    "speech": of_speech,
}

# -- the targets


def right(cells: list[Cell], known: Records, results: dict[str, Any]) -> Iterator[Target]:
    files = [cell.name for cell in cells if cell.kind == "tests"]
    failed = sum(len(results[name]["failed"]) for name in files if name in results)
    whole = all(known.get(name, {}).get("state") == "done" for name in files)
    passed = sum(results[name]["passed"] for name in files if name in results)
    yield (
        "tests",
        "all pass",
        f"{passed} passed, {failed} failed",
        False if failed else True if whole and passed else None,
    )
    tables = results.get("accuracy", {}).get("tables", {})
    for name in ("device", "device bf16"):
        here, there = tables.get(name, {}), tables.get("cpu", {})
        pairs = list(zip(here.values(), there.values(), strict=False))
        if not pairs or len(here) != len(there):  # cut
            yield f"accuracy, {name}", "as on the CPU", "", None
            continue
        apart = max(abs(percent(one) - percent(other)) for one, other in pairs)
        yield f"accuracy, {name}", f"within {100 * SLACK:g} points", f"{apart:.1f} points", apart <= 100 * SLACK


def bench_rows(cells: list[Cell], results: dict[str, Any], start: str) -> list[dict[str, Any]]:
    names = [cell.name for cell in cells if cell.name.startswith(start) and cell.name in results]
    return [row for name in names for row in rows_of(results[name]) if "error" not in row]


def fast(cells: list[Cell], known: Records, results: dict[str, Any]) -> Iterator[Target]:
    found = False
    for row in bench_rows(cells, results, "static"):
        if row["way"] == f"{STATIC}, compiled":
            times, found = 1 / row["bandwidth_fraction"], True
            what = f"static snapkv at 10 %, {row['length']} tokens, batch {row['batch']}"
            yield what, f"at most {LIMIT_OF_STATIC} x the limit", f"{times:.2f}", times <= LIMIT_OF_STATIC
    if not found:
        yield "static snapkv at 10 %", f"at most {LIMIT_OF_STATIC} x the limit", "", None
    shares = [row for row in bench_rows(cells, results, "prefill") if row["way"] == "snapkv@0.1"]
    share = shares[0]["scoring_share"]["median"] if shares else None
    said = "" if share is None else f"{100 * share:.2g} %"
    met = None if share is None else share <= SCORING_SHARE
    yield "scoring of snapkv", f"at most {SCORING_SHARE:.0%} of the prefill", said, met
    worst = 0.0
    rows = {(row["length"], row["batch"], row["way"]): row for row in bench_rows(cells, results, "decode")}
    for (length, batch, way), row in rows.items():
        if way == "adakv@0.1" and (even := rows.get((length, batch, "snapkv@0.1"))):
            worst = max(worst, row["decode_ms"]["median"] / even["decode_ms"]["median"])
    yield "adaptive heads", f"at most {ADAPTIVE} x uniform ones", f"{worst:.2f}", worst <= ADAPTIVE if worst else None


def buys(cells: list[Cell], known: Records, results: dict[str, Any]) -> Iterator[Target]:
    rows = {(row["length"], row["batch"], row["way"]): row for row in bench_rows(cells, results, "vl_cache")}
    gains = {
        batch: rows[length, batch, "full"]["decode_ms"]["median"] / row["decode_ms"]["median"]
        for (length, batch, way), row in rows.items()
        if way == "vl-cache@0.1" and (length, batch, "full") in rows
    }
    said = ", ".join(f"{gain:.2f} at batch {batch}" for batch, gain in gains.items())
    what = f"decode of vl-cache at 10 %, {LONG} tokens, batch 8 or more"
    yield what, f"at least {VL_CACHE_GAIN:g} x full", said, max(gains.values()) >= VL_CACHE_GAIN if gains else None
    served = {each["name"]: rate(each) for each in results.get("throughput", {}).get("served", [])}
    padded = next((each for name, each in served.items() if name.startswith("transformers generate")), None)
    gain = served["r-kv"] / padded if padded and "r-kv" in served else None
    said = "" if gain is None else f"{gain:.2f}"
    met = None if gain is None else gain >= THROUGHPUT_GAIN
    yield "tokens per second of r-kv at equal memory", f"at least {THROUGHPUT_GAIN:g} x padded batches", said, met


TARGETS = {1: right, 2: fast, 3: buys}
