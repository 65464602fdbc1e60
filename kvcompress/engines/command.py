"""`kvcompress export`: translate a method into settings of a serving engine, and say what that does differently."""

import argparse
import json

from ..command_line import Parser, key_values
from ..errors import KVCompressError
from ..files import check_output, write_text
from ..flag_types import fraction, label, new_file, whole

ENGINES = ("openvino", "tensorrt-llm", "triattention-vllm")
SETTINGS = ".json"  # of the settings' file beside a calibration


def parser() -> argparse.ArgumentParser:
    this = Parser("export", description=__doc__)
    this.add_argument("method", type=label, metavar="METHOD", help="a method that the engine has")
    this.add_argument("ratio", type=fraction, metavar="RATIO", help="the fraction kept, in (0, 1]")
    this.add_argument("options", nargs="*", type=label, metavar="OPTION=VALUE", help="options of the method")
    this.add_argument("--engine", choices=ENGINES, required=True)
    this.add_argument("--tokens", type=whole(1), help="openvino: length of the prompts that RATIO is a part of")
    this.add_argument("--block", type=whole(1, 4096), help="openvino: tokens of a block, 16 on a GPU (32)")
    this.add_argument("--out", type=new_file, metavar="FILE", help="settings, NAME.json; for triattention NAME.pt")
    return this


def main(arguments: list[str]) -> None:
    """Run the command: print the settings and the differences, and write them if asked. Raises KVCompressError."""
    flags = parser().parse_intermixed_args(arguments)
    options = key_values(flags.options, ("method", "ratio"))
    if flags.engine != "openvino" and (flags.tokens or flags.block):
        raise KVCompressError(f"--engine {flags.engine} takes neither --tokens nor --block")
    if flags.method == "cdpruner" and (flags.tokens or flags.block):
        raise KVCompressError("cdpruner takes neither --tokens nor --block: it keeps a share of each picture")
    wanted = ".json" if flags.engine == "openvino" else ".pt"
    if flags.out is not None and flags.out.suffix != wanted:
        raise KVCompressError(f"--out {str(flags.out)!r} does not end with {wanted}")
    if flags.out is None and wanted == ".pt":
        raise KVCompressError(f"--engine {flags.engine} needs --out NAME.pt for the calibration")
    from ..policy.make import make_policy

    policy = make_policy(flags.method, flags.ratio, **options)
    if flags.out is not None:
        check_output(flags.out.absolute().parent, flags.out.name, flags.out.with_suffix(SETTINGS).name)
    if flags.engine == "openvino":
        from . import openvino

        found = openvino.export(policy, flags.tokens, flags.block or 32)
    else:
        from . import triattention

        found = triattention.export(policy, flags.engine, flags.out)
    print(json.dumps(found.settings, indent=2))
    for difference in found.differences:
        print(f"differs: {difference}")
    if flags.out is not None:
        write_text(flags.out.with_suffix(SETTINGS), json.dumps(vars(found), indent=2) + "\n")
