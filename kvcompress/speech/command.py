"""`kvcompress speech`: measure how soon an omni model speaks, with several KV caches."""

import argparse
from pathlib import Path

from ..command_line import Parser
from ..flag_types import device_name, fraction, label, new_file, threads, whole
from .kinds import AFTER_THE_TEXT, STRATEGIES

WINDOW = [4, 4, 2]  # streaming.Window's defaults; importing it takes seconds


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "speech",
        description="Time to first audio and real-time factor of Qwen2.5-Omni, cold and warm, with several KV caches.",
    )
    this.add_argument("model", type=label, help="hub id or local path")
    this.add_argument("method", type=label, metavar="METHOD[:OPTION=VALUE...]")
    this.add_argument("ratio", type=fraction)
    this.add_argument(
        "--strategies", nargs="+", type=label, default=list(AFTER_THE_TEXT), help=f"of {', '.join(STRATEGIES)}"
    )
    this.add_argument("--no-compile", dest="compile", action="store_false", help="static caches without compiling")
    this.add_argument("--compress-talker", action="store_true", help="also compress the talker's cache")
    this.add_argument(
        "--decode-budget", type=whole(1), help="entries that the method keeps in the thinker while decoding"
    )
    this.add_argument(
        "--talker-decode-budget",
        type=whole(1),
        help="entries that the method keeps in the talker while decoding; implies --compress-talker",
    )
    this.add_argument("--without", nargs="+", type=label, default=[], metavar="PART", help="of vision, audio, speech")
    this.add_argument(
        "--prompts", type=new_file, metavar="JSONL", help='{"text":, "image": FILE, "audio": WAV FILE} per line'
    )
    this.add_argument("--text-tokens", type=whole(1), default=128, help="the longest text")
    this.add_argument("--codec-tokens", type=whole(1), default=1024, help="the longest speech, 50 tokens per second")
    this.add_argument(
        "--window",
        nargs=3,
        type=whole(),
        default=WINDOW,
        metavar=("CHUNK", "BEHIND", "AHEAD"),
        help="blocks of codec tokens that become sound at once, and blocks that token2wav sees before and after them "
        f"(default: {' '.join(map(str, WINDOW))})",
    )
    this.add_argument("--one-piece", action="store_true", help="make the waveform at the end, as transformers does")
    this.add_argument("--exact", action="store_true", help="give every answer exactly these lengths")
    this.add_argument("--repeats", type=whole(1), default=3, help="warm answers to each prompt, per strategy")
    this.add_argument("--cold", type=whole(), default=3, help="cold starts per strategy, each in its own process")
    this.add_argument("--speaker", type=label, help="default: the checkpoint's first")
    this.add_argument("--seed", type=whole(), default=0)
    this.add_argument("--device", type=device_name, help="default: cuda if available")
    this.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    this.add_argument("--threads", type=threads, help="CPU threads (default: torch's own)")
    this.add_argument("--save-audio", type=new_file, metavar="FOLDER", help="save the last warm answers' audio here")
    this.add_argument(
        "--html",
        action="store_true",
        help="also write a page that plays the last warm answers; without --save-audio they go to OUT-audio",
    )
    this.add_argument("--out", type=new_file, default=Path("speech"), help="without a suffix: .json, .md, .html")
    this.add_argument("--resume", action="store_true", help="keep the results that are already in the .json")
    return this


def main(arguments: list[str]) -> int:
    """Run the benchmark; return the exit code. Raises KVCompressError, if possible before anything is loaded."""
    given = parser().parse_args(arguments)
    from .run import measure

    return measure(given, arguments)
