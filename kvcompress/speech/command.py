"""`kvcompress speech`: measure how soon an omni model speaks, with several KV caches."""

import argparse
from pathlib import Path

from ..bench.flags import add_flags
from ..command_line import Parser
from ..flag_types import fraction, label, new_file, whole
from .kinds import AFTER_THE_TEXT, PARTS, STRATEGIES

WINDOW = [4, 4, 2]  # streaming.Window's defaults; importing it takes seconds


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "speech",
        description="Time to first audio and real-time factor of Qwen2.5-Omni, cold and warm, with several KV caches.",
    )
    add = this.add_argument
    add("model", type=label, help="hub id or local path")
    add("method", type=label, metavar="METHOD[:OPTION=VALUE...]")
    add("ratio", type=fraction)
    add(
        "--strategies",
        nargs="+",
        choices=list(STRATEGIES),
        default=list(AFTER_THE_TEXT),
        metavar="STRATEGY",
        help=f"of {', '.join(STRATEGIES)} (default: the first four)",
    )
    add("--no-compile", dest="compile", action="store_false", help="static caches without compiling")
    add("--compress-talker", action="store_true", help="the method compresses the talker's cache, too")
    add("--decode-budget", type=whole(1), help="entries that the method keeps in the thinker while it writes")
    add(
        "--talker-decode-budget",
        type=whole(1),
        help="entries that the method keeps in the talker while decoding; implies --compress-talker",
    )
    add("--without", nargs="+", choices=list(PARTS), default=[], metavar="PART", help=f"of {', '.join(PARTS)}")
    add("--prompts", type=new_file, metavar="JSONL", help='{"text":, "image": FILE, "audio": WAV FILE} a line')
    add("--text-tokens", type=whole(1), default=128, help="the longest text (128)")
    add("--codec-tokens", type=whole(1), default=1024, help="the longest speech, 50 tokens a second (1024)")
    add(
        "--window",
        nargs=3,
        type=whole(),
        default=WINDOW,
        metavar=("CHUNK", "BEHIND", "AHEAD"),
        help="blocks of codec tokens that become sound at once, and blocks that token2wav sees before and after them "
        f"(default: {' '.join(map(str, WINDOW))})",
    )
    add("--one-piece", action="store_true", help="the waveform at the end, as transformers makes it")
    add("--exact", action="store_true", help="every answer has exactly these lengths")
    add("--repeats", type=whole(1), default=3, help="warm answers to each prompt, per strategy (3)")
    add("--cold", type=whole(), default=3, help="cold starts per strategy, each a process; 0: none (3)")
    add("--speaker", type=label, help="default: the checkpoint's first")
    add("--seed", type=whole(), default=0, help="of the talker's samples (0)")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of the model (auto)")
    add("--save-audio", type=new_file, metavar="FOLDER", help="the last warm answers, as they are spoken")
    add(
        "--html",
        action="store_true",
        help="also write a page that plays the last warm answers; without --save-audio they go to OUT-audio",
    )
    add_flags(this, "--device", "--threads", "--resume", out=Path("speech"))
    return this


def main(arguments: list[str]) -> int:
    """Run the benchmark; return the exit code. Raises KVCompressError, if possible before anything is loaded."""
    given = parser().parse_args(arguments)
    from .run import measure

    return measure(given, arguments)
