"""`kvcompress calibrate`: gather the statistics of a model that a calibrated method needs, and save them."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.flags import add_flags
from ..command_line import Parser, key_values
from ..errors import KVCompressError, loading, shown
from ..files import check_not_read, check_output
from ..flag_types import label, new_file, whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from .files import Calibration


def parser(further: Callable[[Any], None] | None = None) -> argparse.ArgumentParser:
    """Create the parser; `further` adds flags to the group of sources, of which exactly one must be given."""
    this = Parser("calibrate", description=__doc__)
    this.add_argument("model", type=label, help="hub id or local path")
    this.add_argument("options", nargs="*", type=label, metavar="OPTION=VALUE", help="options of the method")
    this.add_argument("--method", type=label, required=True, help="a calibrated method")
    this.add_argument("--out", type=new_file, required=True, help="the file, NAME.safetensors")
    this.add_argument("--questions", type=whole(1), default=32, help="prompts to draw, at most all (32)")
    this.add_argument("--seed", type=whole(), default=0, help="seed for drawing them (0)")
    data = this.add_mutually_exclusive_group(required=True)
    if further is not None:
        further(data)
    data.add_argument("--text", type=new_file, metavar="FILE", help="a text in UTF-8, cut into pieces")
    data.add_argument(
        "--published", type=new_file, metavar="FILE", help="a file that the method's authors published; no model is run"
    )
    this.add_argument("--length", type=whole(1), default=2048, help="tokens of a piece of text (2048)")
    add_flags(this, "--device")
    this.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of the model (auto)"
    )
    return this


def write(calibration: "Calibration", out: Path, seconds: float) -> None:
    """Save the calibration and print a summary."""
    from .files import save

    save(calibration, out)
    print(
        f"written: {out}: {calibration.method} of {calibration.model}, from {calibration.prompts} prompts, "
        f"{calibration.tokens} tokens, in {seconds:.1f} s"
    )


def main(arguments: list[str]) -> None:
    """Run the command. Raises KVCompressError."""
    calibrate(parser().parse_intermixed_args(arguments))


def calibrate(flags: argparse.Namespace) -> None:
    """Calibrate on a text, or convert a published file. Raises KVCompressError."""
    from transformers import AutoConfig

    from ..cache.cache import CompressedCache
    from . import collect
    from .files import Calibration, ModelIdentity, check_tensors
    from .text import pieces, read_text

    options = key_values(flags.options, ("method",))
    name, cluster = collect.calibrated_method(flags.method, **options)
    check_not_read(flags.out, "--text", flags.text)
    check_not_read(flags.out, "--published", flags.published)
    check_output(flags.out.absolute().parent, flags.out.name)
    if flags.text is not None:
        read_text(flags.text)  # what is wrong with it is said before a model is loaded
    start = time.perf_counter()
    with loading(flags.model):
        config = AutoConfig.from_pretrained(flags.model)
    if flags.published is not None:
        model = ModelIdentity.of(config, len(CompressedCache(config).compressed_layers))
        known = cluster.from_published(flags.published, model)
        try:
            check_tensors(known, model, cluster.calibrated)
        except KVCompressError as error:
            raise KVCompressError(
                f"--published {shown(str(flags.published))} does not belong to {model}: {error}"
            ) from None
        write(Calibration(name, model, known, data=f"published: {flags.published.name}"), flags.out, 0.0)
        return
    model, tokenizer = load(flags.model, config, flags.dtype, flags.device)
    prompts = pieces(flags.text, tokenizer, flags.length, flags.questions, flags.seed)
    prompts = [{key: tensor.to(model.device) for key, tensor in prompt.items()} for prompt in prompts]
    made = collect.calibrate(model, name, prompts, f"text: {flags.text.name}", flags.seed, **options)
    write(made, flags.out, time.perf_counter() - start)


def load(
    name: str, config: "PreTrainedConfig", dtype: str, device: str | None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model, whose config is known, and its tokenizer; `device` is by default CUDA if available.

    Raises KVCompressError."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from ..device import checked_device

    where = checked_device(device)  # not found out once the weights are in memory
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with loading(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
        return auto.from_pretrained(name, dtype=dtype).eval().to(where), tokenizer
