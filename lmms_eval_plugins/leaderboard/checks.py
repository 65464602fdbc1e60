"""Check that a submission is complete, consistent and plausible, and report one line per problem.

Nothing is recomputed, so this does not stop deliberate fraud. It finds cells of other versions, edited or lost files,
and runs that measured something other than they claim.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvcompress import KVCompressError
from kvcompress.files import UNFINISHED

from ..cells.results import RESULTS_FILE, Cell, DamagedFile, dumps, number_of, read_cell, result_folders, score_key
from ..model.input_methods import method_options
from ..report.headline import headline
from . import plausible
from .protocol import holds_full, protocol_of
from .tables import read

VERSIONS = ("kvcompress", "torch", "transformers", "lmms-eval")
ENVIRONMENT = ("versions", "python", "device", "dtype", "attn_implementation", "processes", "config")
PARTS = ("protocol", "results", "configs", "n-samples", "efficiency", "environment", "fingerprint", "date")
# Quantities of rows whose medians are in the summary.
MEDIANS = ("ttft_s", "tpot_s", "tokens_in", "tokens_out", "kv_held_bytes")
Content = tuple[dict[str, Any], list[dict[str, Any]]]


def problems(root: Path) -> list[str]:
    """Return one line for each problem with the cells under `root`; empty if the submission is fine."""
    found: list[str] = []
    cells: dict[str, Content] = {}
    folders = result_folders(root)
    for folder in folders:
        name = folder.relative_to(root).as_posix()
        if UNFINISHED in name:
            found.append(f"{name}: this cell was never finished: remove it")
            continue
        try:
            content = read_cell(folder)
        except (DamagedFile, FileNotFoundError) as error:
            found.append(f"{name}: {error}")
            continue
        cells[name] = content
        found += [f"{name}: {problem}" for problem in _of_cell(folder, content)]
    try:
        tables = read(root)
    except KVCompressError as error:
        return [*found, str(error)]
    if not folders and not tables:
        found.append(f"no cell under {str(root)!r}: expected <task>/<model>/<cell>/{RESULTS_FILE}")
    return found + list(_without_full(cells))


def _of_cell(folder: Path, content: Content) -> Iterator[str]:
    results, samples = content
    if missing := [name for name in PARTS if not results.get(name)]:
        yield f"{RESULTS_FILE} has no {', '.join(missing)}: an older version wrote it; run the cell again"
        return
    if "server" in results["environment"]:
        yield "a server answered: what it kept was not measured"
        return
    for check in CHECKS:
        try:
            yield from check(folder, results, samples)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield f"{check.__name__.strip('_').replace('_', ' ')}: not in this version's format ({error!r})"


# -- one cell


def _fingerprint(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[str]:
    protocol, fingerprint = results["protocol"], results["fingerprint"]
    for name in ("task", "model", "method", "ratio", "budget", "settings", "options"):
        if protocol[name] != fingerprint[name]:
            yield f"its fingerprint has {name}={fingerprint[name]}, but its protocol {name}={protocol[name]}"
    of_cell = {name: protocol[name] for name in ("task", "model", "method", "ratio", "budget", "settings")}
    # JSON made lists of tuples, which a folder's name shows.
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in protocol["changed_options"].items()}
    expected = Cell(**of_cell, options=options).folder(Path())
    if folder.absolute().parts[-3:] != expected.parts:
        yield f"its folder does not match its protocol: expected {expected.as_posix()}"
    try:
        # As JSON has them, which makes lists of tuples.
        defaults = json.loads(dumps(method_options(protocol["method"], protocol["options"].get("scorer"))))
    except KVCompressError as error:
        yield str(error)
        return
    if unknown := sorted(protocol["options"].keys() - defaults.keys()):
        yield f"{protocol['method']} has no option {', '.join(unknown)} in this version"
        return
    # Options added in a later version had their defaults.
    changed = {name: value for name, value in protocol["options"].items() if value != defaults[name]}
    if dumps(changed) != dumps(protocol["changed_options"]):
        yield f"its changed options are {protocol['changed_options']}, but its options imply {changed}"
    given, settings = results.get("config"), protocol["settings"]  # lm-eval's tasks have none
    for name, value in {"limit": None, "offset": 0, "batch_size": 1}.items() if given else ():
        if (said := given.get(name) or value) != settings.get(name, value):
            yield f"lmms-eval was given {name}={said}, but its settings have {settings.get(name, value)}"
    if missing := [name for name in ("code", "data", "tasks") if not fingerprint.get(name)]:
        yield f"its fingerprint has no {', '.join(missing)}"


def _versions(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[str]:
    environment = results["environment"]
    if missing := [name for name in ENVIRONMENT if not environment.get(name)]:
        yield f"its environment lacks {', '.join(missing)}: run the cell again with this version"
    if missing := [name for name in VERSIONS if not environment.get("versions", {}).get(name)]:
        yield f"the versions of {', '.join(missing)} are missing"


def _samples(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[str]:
    """Check that every question has a scored line for each answer filter."""
    if results["protocol"]["settings"].get("predict_only") or headline(results) is None:
        yield "it has no score (was it run with --predict_only?)"
        return
    asked = {task: counts["effective"] for task, counts in results["n-samples"].items()}
    lines = Counter((sample["task"], sample["doc_id"]) for sample in samples)
    there = Counter(task for task, _ in lines)
    for task in sorted(asked.keys() | there.keys()):
        if asked.get(task, 0) != there[task]:
            yield f"{there[task]} of {asked.get(task, 0)} questions of {task} are present"
        if len({count for (of, _), count in lines.items() if of == task}) > 1:
            yield f"some questions of {task} have more lines than others: answers are missing or duplicated"
    unscored = Counter()
    for sample in samples:
        metrics = {key.partition(",")[0] for key in results["results"].get(sample["task"], {}) if "," in key}
        if all(sample.get(metric) is None for metric in metrics):
            unscored[sample["task"]] += 1
    for task, count in unscored.items():
        yield f"{count} lines of {task} have no score"


def _scores(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[str]:
    """Check that each metric aggregated by mean equals the mean of its questions' scores."""
    for task, config in results["configs"].items():
        key_of_score = score_key(results, task)
        means = {each["metric"] for each in config.get("metric_list") or [] if each.get("aggregation") == "mean"}
        for key, score in results["results"].get(task, {}).items():
            metric, _, of_filter = key.partition(",")
            if metric not in means or not isinstance(score, int | float):
                continue
            lines = [each for each in samples if (each["task"], each.get("filter")) == (task, of_filter)]
            scores = [number_of(each[metric], key_of_score) for each in lines if metric in each]
            if scores and not any(map(math.isnan, scores)) and abs(np.mean(scores) - score) > 1e-6:
                yield f"{metric} of {task} is {score:g}, but the mean over its questions is {np.mean(scores):g}"


def _ratio(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[str]:
    outside = []
    for sample, row in _rows(samples):
        low, high = plausible.realised_ratio(results["protocol"], row)
        if not low <= (mean := float(np.mean(row["realised_ratio"]))) <= high:
            outside.append(f"{mean:.4f} for {_name(sample)}, not between {max(low, 0):.4f} and {min(high, 1):.4f}")
    yield from _first("realised ratios do not match the request", outside, len(samples))


def _bytes(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[str]:
    environment, rows = results["environment"], list(_rows(samples))
    if not (config := environment.get("config")):
        return  # `_versions` reports it
    bounds = [plausible.held_bytes(results["protocol"], environment, row) for _, row in rows]
    least, most = min(low for low, _ in bounds), max(high for _, high in bounds)
    outside = []
    for (sample, row), own in zip(rows, bounds, strict=True):
        low, high = own if row["batch_size"] == 1 else (least, most)  # in a batch, bytes are divided equally
        if not low <= row["kv_held_bytes"] <= high:
            outside.append(f"{row['kv_held_bytes']} for {_name(sample)}, not between {low:.0f} and {high:.0f}")
    shape = f"{config['kv_heads']} KV heads of {config['head_dim']} in {environment['dtype']}"
    yield from _first(f"KV bytes do not match {shape}", outside, len(samples))


def _times(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[str]:
    wrong, rows, is_spared = [], list(_rows(samples)), False
    for sample, row in rows:
        reused = row.get("reused_tokens")  # by a prefix cache: what it spares is not timed
        is_spared |= bool(reused)
        may_lack = {"ttft_s": bool(reused), "tpot_s": row["tokens_out"] < 2 or (row["slots"] and reused is not None)}
        if not all(_is_positive(row[name]) or (lacks and row[name] is None) for name, lacks in may_lack.items()):
            wrong.append(f"ttft_s={row['ttft_s']}, tpot_s={row['tpot_s']} for {_name(sample)}")
    yield from _first("times are not above 0", wrong, len(samples))
    if not is_spared and not _is_positive(results["efficiency"].get("answers_per_s")):
        yield f"answers_per_s is {results['efficiency'].get('answers_per_s')}, not above 0"
    for name in MEDIANS:
        values = [row[name] for _, row in rows if row[name] is not None]
        said = results["efficiency"].get(name, {}).get("median")
        if values and (said is None or not math.isclose(said, np.median(values), rel_tol=1e-9)):
            yield f"the median of {name} is given as {said}, but that of its questions is {np.median(values):g}"


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _fingerprint, _versions, _samples, _scores, _ratio, _bytes, _times,
)  # fmt: skip


# -- all cells


def _without_full(cells: dict[str, Content]) -> Iterator[str]:
    """Check that each cell has a full-cache cell with the same settings, protocol and questions."""
    known: dict[str, tuple] = {}
    for name, (cell, samples) in cells.items():
        try:
            protocol, questions = cell["protocol"], {(sample["task"], sample["doc_id"]) for sample in samples}
            alike = protocol["task"], protocol["model"], json.dumps(protocol["settings"], sort_keys=True), questions
            known[name] = alike, protocol_of(cell), protocol["method"] == "full"
        except (KeyError, TypeError):
            continue  # reported already
    whole = [each for each in known.values() if each[2]]
    for name, (alike, protocol, _) in known.items():
        if not any(alike == other and holds_full(protocol, full) for other, full, _ in whole):
            yield f"{name}: there is no cell of the full cache to compare it with: add METHOD full to the command"


# -- helpers


def _rows(samples: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each answer's measurement once, with a line of its question, which has a line per answer filter."""
    seen = set()
    for sample in samples:
        key = sample["task"], sample["doc_id"]
        if key not in seen:
            seen.add(key)
            for row in sample.get("measurements", [sample["measurement"]]):
                yield sample, row


def _first(what: str, found: list[str], of: int) -> Iterator[str]:
    """Yield one line for all questions with the same problem, naming the first."""
    if found:
        yield f"{len(found)} of {of} {what}: {found[0]}"


def _name(sample: dict[str, Any]) -> str:
    return f"question {sample['doc_id']} of {sample['task']}"


def _is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number) and number > 0
