"""docs/methods.md: every registered method, from its own file.

`python -m tests.methods_page` writes the page; tests/kvcompress/test_docs.py compares it with the registry. What a
method keeps, its options and its paper stand in the method's file. Only the checks are listed here.
"""

import inspect
import sys
from pathlib import Path

import kvcompress
from kvcompress.methods import MethodInfo

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"

AUTHORS, KVPRESS, FORMULA, PARTS = "authors' code", "kvpress", "formula", "its parts"
CHECKED_BY = {
    **dict.fromkeys(("adakv", "cake", "cam", "chunkkv", "criticalkv", "csp", "d2o", "h2o", "infinipot-v"), AUTHORS),
    **dict.fromkeys(("knorm", "kvzip", "lagkv", "look-m", "meda", "mixkv", "prefixkv", "pyramidkv", "r-kv"), AUTHORS),
    **dict.fromkeys(("snapkv", "streamingllm", "tgv-kv", "tova"), AUTHORS),
    **dict.fromkeys(("cdpruner", "divprune", "dycoke", "evs", "fastv", "framefusion"), AUTHORS),
    **dict.fromkeys(("prumerge+", "sparsevlm", "visionzip", "vispruner"), AUTHORS),
    **dict.fromkeys(("compactor", "lava", "leverage", "morphkv", "non-causal-attention"), AUTHORS),
    **dict.fromkeys(("duoattention", "fastkvzip", "q-filters", "sparsemm", "triattention"), AUTHORS),
    **dict.fromkeys(("entropy-gated-chunkkv", "kvzap"), KVPRESS),
    **dict.fromkeys(("capkv", "cur", "expected-attention", "finch", "keydiff", "kvcompose"), KVPRESS),
    "adamixkv": PARTS,
    **dict.fromkeys(("aircache", "full", "hindsight", "random", "sagekv", "simlayerkv", "vl-cache", "vnorm"), FORMULA),
}

INTRODUCTION = """\
<!-- The whole page is made by `python -m tests.methods_page`; edit that file, or a method's own. -->
# Methods

Each method is one file: `kvcompress/clusters/` for methods that score keys, `kvcompress/tokens/` for methods that drop
vision tokens. Every KV method also takes the engine's options, such as `head_budget=` and `merge=`:
[model-args.md](model-args.md). `kvcompress.list_methods()` has the same list in Python.

## What checks them

Over all methods, model families and drawn shapes, `tests/kvcompress/test_invariants.py` checks among other things:

- decoding equals the full cache under a mask that hides exactly what was dropped;
- budgets are exact;
- a row does not depend on its batch.

The tables name what checks the method's own selection besides:

- *authors' code*: what the authors' released functions keep and merge of the same states, recorded in
  `tests/oracle/authors/`; [differences.md](differences.md) has the shares and every named difference;
- *kvpress*: the same with [kvpress](https://github.com/NVIDIA/kvpress), where the method has its home;
- *formula*: a plain reference, float64, loops, written from the paper, in `tests/oracle/`. No code was released, or
  what runs by default is nobody's: `simlayerkv`'s published rule is `variant="code"`, which its authors' code checks;
  `full` has the logits of the plain model bit for bit, `random` its distribution, and `hindsight` is held against
  the model's own attention weights;
- *its parts*: it keeps what `adakv` does with the scores and options of a recipe, whose parts are checked as above.

Related pages: where a method differs from its paper ([differences.md](differences.md)), what vision-language methods
do on any prompt ([vision-methods.md](vision-methods.md)), all methods compared on two small models
([methods-compared.md](methods-compared.md)).
"""
TOKENS = """\
They drop vision tokens before or inside the language model, so that the prefill itself gets shorter. Their `ratio` is
that of the vision tokens: [token-methods.md](token-methods.md).
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
    """`2404.14469` of an arXiv link; elsewhere the publisher's name."""
    return url.rsplit("/", 1)[1] if "arxiv.org" in url else "PMLR"


def table(methods: dict[str, MethodInfo]) -> str:
    rows = ["| method | idea | paper | checked by |", "|---|---|---|---|"]
    for name, info in methods.items():
        paper = f"[{paper_label(info.paper)}]" if info.paper else ""
        rows.append(f"| `{name}` | {idea(info)} | {paper} | {CHECKED_BY.get(name, 'property tests only')} |")
    return "\n".join(rows) + "\n"


def details(name: str, info: MethodInfo) -> str:
    """What exactly is kept, in the words of the class, the options with their defaults, and the presets."""
    options = ", ".join(f"`{option}={default}`" for option, default in info.options.items()) or "none"
    text = f"### {name}\n\n{inspect.getdoc(info.cls)}\n\nOptions: {options}.\n"
    for preset, values in info.presets.items():
        means = ", ".join(f"`{option}={value}`" for option, value in values.items())
        text += f"\n`preset={preset}`: {means}.\n"
    return text


def render() -> str:
    methods = own_methods()
    kv = {name: info for name, info in methods.items() if issubclass(info.cls, kvcompress.KVCluster)}
    tokens = {name: info for name, info in methods.items() if name not in kv}
    links = {f"[{paper_label(info.paper)}]: {info.paper}" for info in methods.values() if info.paper}
    sections = [
        INTRODUCTION,
        f"## KV methods\n\n{table(kv)}",
        f"## Token methods\n\n{TOKENS}\n{table(tokens)}",
        "## What each keeps, and its options\n",
        *(details(name, info) for name, info in (kv | tokens).items()),
        "\n".join(sorted(links)) + "\n",
    ]
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd())}")
