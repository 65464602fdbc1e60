"""`kvcompress train`: train what a learned method needs for a model, on a text of your own.

`kvzap` and `fastkvzip` get the checkpoint that their option `checkpoint=` reads, `duoattention` its file for
`calibration=`. A run that was cut goes on when it is started again.
"""

import argparse
import time
from importlib import import_module

from ..bench.flags import add_flags
from ..command_line import Parser, key_values
from ..errors import KVCompressError, loading, shown, unknown_name, validated
from ..files import check_not_read, check_output
from ..flag_types import label, new_file, whole

METHODS = ["duoattention", "fastkvzip", "kvzap"]  # each is a module of this package


def parser() -> argparse.ArgumentParser:
    this = Parser("train", description=__doc__)
    this.add_argument("method", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    this.add_argument("model", type=label, help="hub id or local path")
    this.add_argument(
        "options", nargs="*", type=label, metavar="OPTION=VALUE", help="of the training: docs/calibration.md"
    )
    this.add_argument("--text", type=new_file, required=True, metavar="FILE", help="a text in UTF-8 to learn from")
    this.add_argument("--out", type=new_file, required=True, help="what to write: a folder for kvzap, else a file")
    this.add_argument("--seed", type=whole(), default=0, help="for everything that is drawn (0)")
    add_flags(this, "--device")
    this.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the model (auto)")
    return this


def main(arguments: list[str]) -> None:
    """Run the command. Raises KVCompressError."""
    flags = parser().parse_intermixed_args(arguments)
    from dataclasses import asdict, fields

    from transformers import AutoConfig

    from ..calibration.command import load
    from .run import Run

    how = import_module(f"{__package__}.{flags.method}")
    given, known = key_values(flags.options), [field.name for field in fields(how.Options)]
    for name in given:
        if name not in known:
            raise unknown_name(f"training {flags.method} has no option", name, known)
    options = validated(how.Options, f"training {flags.method}: option", given)
    out = flags.out.absolute()
    check_not_read(out, "--text", flags.text)
    check_output(out.parent, out.name)
    if flags.method == "kvzap" and out.exists():
        raise KVCompressError(f"--out {shown(str(flags.out))} is a file, and kvzap writes a folder")
    settings = {"method": flags.method, "model": flags.model, "dtype": flags.dtype, **asdict(options)}
    run = Run(out, flags.text, flags.seed, settings)
    run.check_state()
    start = time.perf_counter()
    with loading(flags.model):
        config = AutoConfig.from_pretrained(flags.model)
    how.check(config)
    run.model, run.tokenizer = load(flags.model, config, flags.dtype, flags.device)
    run.model.requires_grad_(False)
    summary = how.train(run, options)
    run.end()
    print(f"written: {flags.out}: {flags.method}, {summary}; {time.perf_counter() - start:.1f} s")
