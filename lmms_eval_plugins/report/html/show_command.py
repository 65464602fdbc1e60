"""`kvcompress show`: draw which patches of an image and which words of a question are kept.

kvcompress show IMAGE "QUESTION" --model tiny --method snapkv --ratio 0.1 window_size=8
"""

import argparse
from pathlib import Path

from kvcompress.command_line import Parser, returns_exit_code
from kvcompress.flag_types import label, path


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "show",
        description="Answer one question with a compressed KV cache, and show which parts of the prompt are kept.",
    )
    this.add_argument("image", type=path)
    this.add_argument("question")
    this.add_argument("options", nargs="*", metavar="option=value", help="options of the methods or the model")
    this.add_argument("--model", type=label, default="tiny", help="hub id or local folder (tiny: the bundled model)")
    this.add_argument("--method", type=label, default="snapkv", help="one, or a comma list (snapkv)")
    this.add_argument(
        "--ratio", type=label, default="0.2", help="fraction to keep, or a comma list; - with budget= (0.2)"
    )
    this.add_argument("--out", type=path, default=Path("survivors.html"), help="a .html or .png file (survivors.html)")
    return this


@returns_exit_code("files")
def main(arguments: list[str]) -> None:
    """Write the picture."""
    given = parser().parse_intermixed_args(arguments)
    from .show import show

    show(given)
