"""The table of docs/serving.md: which token methods prune in which serving engine.

`python -m tests.engines_page` writes it; tests/kvcompress/engines/test_media.py compares it with the methods.
"""

from pathlib import Path

from kvcompress.engines.media import obstacle_of
from kvcompress.methods import list_methods, make_method
from kvcompress.tokens.base import TokenMethod

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
BEGIN, END = "<!-- made by `python -m tests.engines_page` -->\n", "<!-- end of the table -->\n"
WITH = {"cdpruner": {"relevance": "none"}, "dycoke": {"decode_drop": 0}}  # options with which they prune in an engine
# Compared with transformers by scripts/test_engines.sh: prompts of each model.
COMPARED = {"divprune": 20, "evs": 20, "vidcom2": 20, "dycoke": 20}


def table() -> str:
    """Return the table, a row per token method."""
    lines = ["| method | vLLM | answers as in transformers |", "|---|---|---|"]
    for name, info in list_methods().items():
        if not issubclass(info.cls, TokenMethod):
            continue
        options = WITH.get(name, {})
        obstacle = obstacle_of(make_method(name, **options))
        asked = "".join(f" with `{option}={value}`" for option, value in options.items())
        compared = f"{COMPARED[name]} of {COMPARED[name]}" if name in COMPARED else ""
        lines.append(f"| `{name}` | {f'no: {obstacle}' if obstacle else f'prunes{asked}'} | {compared} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return a page's text with the table of now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
