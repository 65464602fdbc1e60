"""The table of docs/serving.md: which methods prune or evict in vLLM.

`python -m tests.engines_page` writes it, and scripts/test_engines.sh once its tests are green;
tests/kvcompress/engines/test_media.py compares it with the methods.
"""

from pathlib import Path

from kvcompress.engines import blocks, media
from kvcompress.methods import list_methods, make_method
from kvcompress.tokens.base import TokenMethod
from tests.kvcompress.engines.compared import EVICTED, PRUNED

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
BEGIN, END = "<!-- made by `python -m tests.engines_page` -->\n", "<!-- end of the table -->\n"
WITH = {"cdpruner": {"relevance": "none"}, "dycoke": {"decode_drop": 0}}  # options with which they prune in an engine
PROMPTS = 20
# Compared with transformers by scripts/test_engines.sh, which is green only if all answers are the same.
COMPARED = {asked.get("method") for asked, _ in [*PRUNED.values(), *EVICTED.values()]}


def table() -> str:
    """Return the table, a row per token method, and per KV method that evicts."""
    lines = ["| method | vLLM | answers as in transformers |", "|---|---|---|"]
    for name, info in list_methods().items():
        options = WITH.get(name, {})
        asked = "".join(f" with `{option}={value}`" for option, value in options.items())
        compared = f"{PROMPTS} of {PROMPTS}" if name in COMPARED else ""
        if issubclass(info.cls, TokenMethod):
            obstacle = media.obstacle_of(make_method(name, **options))
            lines.append(f"| `{name}` | {f'no: {obstacle}' if obstacle else f'prunes{asked}'} | {compared} |")
        elif name in blocks.carried():
            lines.append(f"| `{name}` | evicts blocks, on a CPU | {compared} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return a page's text with the table of now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
