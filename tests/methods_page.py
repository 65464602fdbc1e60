"""docs/methods.md, the list of all registered methods, and docs/methods/: a page for each.

`python -m tests.methods_page` writes them; tests/kvcompress/test_docs.py compares them with the registry. What a method
keeps, its options and its paper stand in the method's file, its accuracy and how far the authors' code keeps the same
in the tables of benchmarks/results/. What checks it is listed here. The part of a page after its mark is written by
hand and is kept: how the method differs from its paper and from the authors' code.
"""

import inspect
import re
import sys
import textwrap
from pathlib import Path

import kvcompress
from benchmarks.methods_figure import TITLES
from kvcompress.methods import MethodInfo

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "methods.md"
FOLDER = ROOT / "docs" / "methods"
TABLES = ROOT / "benchmarks" / "results"
MARK = "<!-- end of the part made by `python -m tests.methods_page`; the part below is written by hand -->\n"

AUTHORS, KVPRESS, VLLM, FORMULA, PARTS, DRAWS = "authors' code", "kvpress", "vllm", "formula", "its parts", "its draws"
LIGHTCOMPRESS = "LightCompress"
CHECKED_BY = {
    **dict.fromkeys(("adakv", "cake", "cam", "chunkkv", "criticalkv", "csp", "d2o", "h2o", "infinipot-v"), AUTHORS),
    **dict.fromkeys(("attention-matching", "defensivekv"), AUTHORS),
    **dict.fromkeys(("knorm", "kvzip", "lagkv", "look-m", "meda", "mixkv", "prefixkv", "pyramidkv", "r-kv"), AUTHORS),
    **dict.fromkeys(("snapkv", "streamingllm", "tgv-kv", "tova"), AUTHORS),
    **dict.fromkeys(("cdpruner", "divprune", "dycoke", "evs", "fastv", "fastvid", "framefusion", "holitom"), AUTHORS),
    **dict.fromkeys(("prumerge+", "pyramiddrop", "sparsevlm", "vidcom2", "visionzip", "vispruner"), AUTHORS),
    **dict.fromkeys(("compactor", "lava", "leverage", "morphkv", "non-causal-attention"), AUTHORS),
    **dict.fromkeys(("duoattention", "fastkvzip", "q-filters", "sparsemm", "triattention"), AUTHORS),
    **dict.fromkeys(("dropkv", "entropy-gated-chunkkv", "kvzap"), KVPRESS),
    "kvcrush": VLLM,
    **dict.fromkeys(("capkv", "cur", "expected-attention", "finch", "keydiff", "kvcompose"), KVPRESS),
    "adamixkv": PARTS,
    "dart": LIGHTCOMPRESS,
    "random-tokens": DRAWS,
    **dict.fromkeys(("aircache", "full", "hindsight", "random", "recent", "sagekv", "simlayerkv"), FORMULA),
    **dict.fromkeys(("vl-cache", "vnorm"), FORMULA),
}

PROTOCOL = """\
Percent of questions answered, with 95 % intervals, by the requested ratio. The answer's first token is also computed on
the compressed cache. Brackets give the kept share if it differs from the ratio. ▼: worse than `random`.\
"""
AGREEMENT = """\
Of the entries that their code keeps on recorded states, the percent that ours keeps too, by ratio
([how](../../benchmarks/results/fidelity.md)).\
"""
TOKEN_AGREEMENT = """\
Of the recorded states that their code lets through, the percent that ours lets through too: the least of some prompts
([how](../../benchmarks/results/fidelity.md)).\
"""
CHECKS = {
    AUTHORS: "the authors' code: the entries that it keeps and merges, recorded in `tests/oracle/authors/`",
    KVPRESS: "[kvpress](https://github.com/NVIDIA/kvpress), which implements the method, in the same way",
    LIGHTCOMPRESS: "[LightCompress](https://github.com/ModelTC/LightCompress), which has a port of the authors' code",
    VLLM: "a [pull request to vLLM](https://github.com/vllm-project/vllm/pull/47967) with the method, in the same way",
    FORMULA: "a plain float64 reference in `tests/oracle/`",
    DRAWS: "its draws: every token, and every pair, stays equally often",
    PARTS: "its parts: it keeps the same entries as `adakv` with the scores and options of its recipe",
}

INTRODUCTION = """\
<!-- The whole page is made by `python -m tests.methods_page`; edit that file, or a method's own. -->
# Methods

Each method has a page with what it keeps, its options and presets, for most its accuracy, and how it differs from its
paper and from the authors' code. Every KV method also takes the engine's options, such as `head_budget=` and `merge=`
([model-args.md](model-args.md)). Which one to use: [methods-compared.md](methods-compared.md). In Python,
`kvcompress.list_methods()` returns this list.

"""
TOKENS = """\
They drop vision tokens before or inside the language model: [token-methods.md](token-methods.md).
"""
CHECKED = """\
## What checks them

For all methods, model families and random shapes, tests check that decoding equals the full cache under a mask that
hides exactly the evicted entries, that budgets are exact, and that a row does not depend on its batch. The column
*checked by* names what also checks a method's own selection:

| | |
|---|---|
| authors' code | keeps and merges the same entries of the same states ([shares](../benchmarks/results/fidelity.md)) |
| kvpress, LightCompress | the same, with [kvpress]'s or [LightCompress]'s implementation |
| vllm | the same, with an unmerged [pull request to vLLM][47967] |
| formula | a plain float64 reference, written from the paper, where no code was released, or none of the default |
| its parts | it keeps the same entries as `adakv` with the scores and options of its recipe |
| its draws | every token, and every pair of tokens, stays equally often |

Of the formulas, `simlayerkv`'s `variant="code"` is checked by its authors' code, `full` by the plain model's logits bit
for bit, `random` by its distribution, and `hindsight` by the model's own attention weights.

[kvpress]: https://github.com/NVIDIA/kvpress
[LightCompress]: https://github.com/ModelTC/LightCompress
[47967]: https://github.com/vllm-project/vllm/pull/47967

Differences that all methods share: [differences.md](differences.md). Vision-language methods on any prompt:
[vision-methods.md](vision-methods.md).
"""


def own_methods() -> dict[str, MethodInfo]:
    """The library's methods; a notebook or a test may have registered others."""
    methods = kvcompress.list_methods().items()
    return {name: info for name, info in methods if info.cls.__module__.startswith("kvcompress.")}


def idea(info: MethodInfo) -> str:
    """What follows the name in the first line of the method's file, without the link."""
    line = sys.modules[info.cls.__module__].__doc__.splitlines()[0]
    return line.split(": ", 1)[1].split(" https://")[0].rstrip(".")


def paper_label(url: str) -> str:
    """`2404.14469` of an arXiv link; elsewhere where it was published."""
    if "arxiv.org" in url:
        return url.rsplit("/", 1)[1]
    return "OpenReview" if "openreview.net" in url else "PMLR"


def table(methods: dict[str, MethodInfo]) -> str:
    rows = ["| method | idea | paper | checked by |", "|---|---|---|---|"]
    for name, info in methods.items():
        paper = f"[{paper_label(info.paper)}]" if info.paper else ""
        rows.append(f"| [{name}] | {idea(info)} | {paper} | {CHECKED_BY[name]} |")
    return "\n".join(rows) + "\n"


def render() -> str:
    """The list."""
    methods = own_methods()
    kv = {name: info for name, info in methods.items() if issubclass(info.cls, kvcompress.KVCluster)}
    tokens = {name: info for name, info in methods.items() if name not in kv}
    links = {f"[{paper_label(info.paper)}]: {info.paper}" for info in methods.values() if info.paper}
    links |= {f"[{name}]: methods/{name}.md" for name in methods}
    sections = [
        f"{INTRODUCTION}## KV methods\n\n{table(kv)}",
        f"## Token methods\n\n{TOKENS}\n{table(tokens)}",
        CHECKED,
    ]
    return "\n".join([*sections, "\n".join(sorted(links)) + "\n"])


def made(name: str, info: MethodInfo) -> str:
    """A method's page down to its mark: what exactly is kept, in the words of the class; options with their defaults,
    presets, what checks it, its accuracy, and how far it agrees with the authors' code."""
    file = Path(sys.modules[info.cls.__module__].__file__).relative_to(ROOT)
    paper = f"Paper: [{paper_label(info.paper)}]({info.paper}). " if info.paper else ""
    options = ", ".join(f"`{option}={default}`" for option, default in info.options.items()) or "none"
    parts = [f"# {name}", inspect.getdoc(info.cls)]
    parts += [filled(f"{paper}Code: [{file.name}](../../{file.as_posix()}). Checked by {CHECKS[CHECKED_BY[name]]}.")]
    parts += [filled(f"Options: {options}.")]
    for preset, values in info.presets.items():
        means = ", ".join(f"`{option}={value}`" for option, value in values.items())
        parts.append(filled(f"`preset={preset}`: {means}."))
    if rows := accuracy(name):
        parts += [
            "## Accuracy",
            filled(PROTOCOL),
            "\n".join(["| | 0.5 | 0.2 | 0.1 | 0.05 |", "|---|---:|---:|---:|---:|", *rows]),
        ]
        parts.append(
            "\n".join(f"[{title}]: ../../benchmarks/results/method_table_{task}.md" for task, title in TITLES.items())
        )
    return "\n\n".join([*parts, *agreement(name)]) + "\n\n" + MARK


def accuracy(name: str) -> list[str]:
    """The method's rows in the first table of each task."""
    rows = []
    for task, title in TITLES.items():
        file = TABLES / f"method_table_{task}.md"
        first = file.read_text(encoding="utf-8").split("\n## ")[1]
        if found := re.search(rf"^\| \**{re.escape(name)}\**(?: \([^|]*)? \|(.*)\|$", first, re.MULTILINE):
            cells = [cell.strip() for cell in found[1].split("|")][:4]
            if any(cells):
                rows.append(f"| [{title}] | {' | '.join(cells)} |")
    return rows


def agreement(name: str) -> list[str]:
    """The method's rows in fidelity.md, with their notes; empty if nothing was recorded of it."""
    text = (TABLES / "fidelity.md").read_text(encoding="utf-8").partition("## Variants")[0]
    row = rf"^\| {re.escape(name)}(?:, ([^|<]*?))? ?(?:<sup>([\d, ]+)</sup> ?)?\| (\[[^|]*\]) \|([^|]*)\|(.*)\|$"
    rows = re.findall(row, text, re.MULTILINE)
    if not rows:
        return []
    marks = sorted({int(mark) for _, marks, *_ in rows for mark in marks.split(",") if mark})
    if drops := len(rows[0][4].split("|")) == 1:  # a method that drops vision tokens: one share at several budgets
        head = ["| with | code | budgets | the same |", "|---|---|---|---:|"]
        lines = [f"| {with_ or 'defaults'} | {code} |{budgets}|{share}|" for with_, _, code, budgets, share in rows]
    else:
        evicts = any(any(cell for cell in shares.split("|")[4:]) for *_, shares in rows)
        ratios = ["0.5", "0.2", "0.1", "0.05"]
        columns = ratios + [f"decoded, {ratio}" for ratio in ratios] if evicts else ratios
        head = [f"| with | code | {' | '.join(columns)} |", f"|---|---|{'---:|' * len(columns)}"]
        lines = [
            f"| {with_ or 'defaults'} | {code} | {' | '.join(shares.split('|')[: len(columns)])} |"
            for with_, _, code, _, shares in rows
        ]
    notes = dict(re.findall(r"^(\d+)\. (.*(?:\n {3}.*)*)", text, re.MULTILINE))
    said = [textwrap.fill(f"- {' '.join(notes[str(mark)].split())}", 118, subsequent_indent="  ") for mark in marks]
    links = dict(re.findall(r"^(\[[^]]+\]): (\S+)$", text, re.MULTILINE))
    parts = ["## Agreement", filled(TOKEN_AGREEMENT if drops else AGREEMENT), "\n".join([*head, *lines])]
    if said:
        parts.append("\n".join(['Where it is less than 100 ("it" and "there" are their code):', "", *said]))
    return [*parts, "\n".join(f"{code}: {links[code]}" for code in sorted({code for _, _, code, *_ in rows}))]


def filled(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def page(name: str, info: MethodInfo) -> str:
    """Return the whole page: the generated part, and the text after the mark."""
    file = FOLDER / f"{name}.md"
    written = file.read_text(encoding="utf-8").partition(MARK)[2] if file.exists() else ""
    return made(name, info) + written


def main() -> None:
    PAGE.write_text(render(), encoding="utf-8")
    FOLDER.mkdir(exist_ok=True)
    for name, info in own_methods().items():
        (FOLDER / f"{name}.md").write_text(page(name, info), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd())} and a page of each method")


if __name__ == "__main__":
    main()
