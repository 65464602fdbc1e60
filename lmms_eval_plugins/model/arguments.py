"""Every argument of `--model kvcompress --model_args ...`, checked before anything is loaded."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jinja2 import TemplateError, TemplateSyntaxError
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

import kvcompress
from kvcompress import KVCompressError
from kvcompress.calibration.files import BUNDLED as BUNDLED_CALIBRATIONS
from kvcompress.errors import first_fault, plain_number, shown, unknown_name
from kvcompress.methods import untyped

from .input_methods import INPUT_METHODS, Compression, choose, method_info, method_options

# Defaults where questions are not timed one by one:
LOOK_AHEAD = 2  # batches
CACHE_GB = 4.0  # for prefills, and for prefixes

TINY_MODEL = "tiny"
TINY_CHECKPOINT = Path(__file__).parents[1] / "tiny_vlm" / "checkpoint"
BUNDLED_CALIBRATIONS[TINY_MODEL] = TINY_CHECKPOINT.with_name("calibrations")

# Arguments of lmms-eval's LLaVA wrappers -> (values that match what transformers does, what to do instead).
LEGACY_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "truncation": ((False,), "prompts are never cut; shorten them with max_pixels= or max_frames_num="),
    "truncate_context": ((False,), "prompts are never cut; shorten them with max_pixels= or max_frames_num="),
    "model_name": ((), "the architecture is read from the checkpoint's config.json, so leave it out"),
    "conv_template": (
        (),
        "the checkpoint's own chat template is used; chat_template=FILE replaces it, system_prompt= adds to it",
    ),
    "customized_config": ((), "edit config.json in a local copy of the checkpoint and give that as pretrained="),
    "mm_spatial_pool_stride": ((2,), "transformers' LLaVA-OneVision pools video frames by 2"),
    "mm_spatial_pool_mode": (("bilinear",), "transformers' LLaVA-OneVision pools video frames bilinearly"),
    "token_strategy": (("single",), "a video is one placeholder in the prompt"),
    "video_decode_backend": (("pyav",), "videos are decoded with PyAV"),
}
OF_TABLE = ("metric", "filter")  # what an evaluation's table shows
TEMPLATE_NAME = re.compile(r"[a-z]\w{,98}", re.ASCII | re.IGNORECASE)
AUTO = {"batch_size": ("auto(:[1-9][0-9]{0,5})?", "auto, nor auto:N"), "slots": ("auto", "auto")}
PROSE = ("system_prompt",)  # text of any kind
NAMED = 3  # methods in an error, of those that have an option
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
LLAVA_ONEVISION_ARGUMENTS = ("mm_spatial_pool_stride", "mm_spatial_pool_mode", "tile_every_image")


def number_or_auto(value: Any, field: ValidationInfo) -> Any:
    """Parse a batch size or a number of slots from a command line: a number, or one of its AUTO words. Raises
    KVCompressError."""
    pattern, words = AUTO[field.field_name]
    if value is None or (isinstance(value, str) and re.fullmatch(pattern, value)):
        return value
    try:
        number = plain_number(value, int)
    except ValueError:
        number = None
    if not isinstance(number, int | float) or number < 1 or number != int(number):
        raise KVCompressError(f"{field.field_name}={shown(value)} is neither a positive whole number, nor {words}")
    return int(number)


class Arguments(BaseModel):
    """Base of all arguments: numbers are plain numbers; text is neither blank nor has control characters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, field: ValidationInfo) -> Any:
        value = plain_number(value, cls.model_fields[field.field_name].annotation)
        if isinstance(value, str) and not value.strip():
            raise ValueError("Input should not be blank")
        if isinstance(value, str) and not value.isprintable() and field.field_name not in PROSE:
            raise ValueError("Input should have no control characters")
        return value


class Size(Arguments):
    """A method and its size, as they are given."""

    method: str = "full"
    ratio: float | None = None
    budget: int | None = None


class ModelArguments(Arguments):
    """The lmms-eval model's arguments, without those of the compression. `docs/model-args.md` explains them."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    pretrained: str
    revision: str = Field("main", max_length=200)
    trust_remote_code: bool = False
    device: str | None = None
    device_map: str | None = None
    tp_plan: Literal["auto"] | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: (
        Literal["quanto-int8", "quanto-int4", "torchao-int8", "torchao-int4", "bnb-int8", "bnb-int4"] | None
    ) = None
    attn_implementation: Literal["sdpa", "flash_attention_2", "eager"] | None = None
    batch_size: Annotated[int | str, BeforeValidator(number_or_auto)] = 1
    max_batch_size: PositiveInt | None = None
    slots: Annotated[int | str | None, BeforeValidator(number_or_auto)] = None
    prefill_tokens: PositiveInt | None = None
    use_cache: Literal[True] = True
    on_oom: Literal["raise", "halve_batch", "offload"] = "raise"
    look_ahead: NonNegativeInt | None = None
    vision_cache_gb: NonNegativeFloat = 4.0
    prompt_cache_gb: NonNegativeFloat | None = None
    prefix_cache_gb: NonNegativeFloat | None = None
    max_new_tokens: PositiveInt = 128
    max_frames_num: PositiveInt = 32
    video_fps: PositiveFloat | None = None
    video_min_pixels: PositiveInt | None = None
    video_max_pixels: PositiveInt | None = None
    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt | None = None
    image_resize: Literal["qwen_vl_utils"] | None = None
    tile_every_image: bool = False
    chat_template: str | None = None
    system_prompt: str | None = None
    measurements_path: Path | None = None
    legacy: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @property
    def fits_itself(self) -> bool:
        """Whether the run itself finds out how many requests fit together."""
        return isinstance(self.batch_size, str) or self.slots == "auto"

    @property
    def on_oom_in_force(self) -> str:
        """`on_oom`, with its default: `halve_batch` for an automatic size, which may turn out too large."""
        return "halve_batch" if self.fits_itself and "on_oom" not in self.model_fields_set else self.on_oom

    @property
    def batches_ahead(self) -> int:
        """`look_ahead`, with its default."""
        return self._of_many(LOOK_AHEAD, 0) if self.look_ahead is None else self.look_ahead

    @property
    def gb_for_prompts(self) -> float:
        """`prompt_cache_gb`, with its default."""
        return self._of_many(CACHE_GB, 0.0) if self.prompt_cache_gb is None else self.prompt_cache_gb

    def gb_for_prefixes(self, share: bool) -> float:
        """`prefix_cache_gb`, with its default; `share`: whether questions share images or videos."""
        return self._of_many(share * CACHE_GB, 0.0) if self.prefix_cache_gb is None else self.prefix_cache_gb

    def _of_many(self, many: float, one: float) -> float:
        """Return `one` if questions are timed one by one, else `many`."""
        return one if self.batch_size == 1 and self.slots is None else many

    @field_validator("device", "device_map")
    @classmethod
    def _check_device(cls, name: str | None, field: ValidationInfo) -> str | None:
        maps = DEVICE_MAPS if field.field_name == "device_map" else ()
        if name is None or name in maps:
            return name
        try:
            is_device = torch.device(name).type != "meta"
        except (RuntimeError, ValueError):
            is_device = False
        if not is_device:
            allowed = ", ".join([*maps, "cpu", "cuda", "cuda:0", "mps"])
            raise KVCompressError(f"{field.field_name}={shown(name)} is not a device: {allowed}")
        return name

    @field_validator("chat_template", "system_prompt")
    @classmethod
    def _check_text(cls, name: str | None) -> str | None:
        if name is not None and os.path.isfile(name):
            try:
                Path(name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                raise ValueError("Input should be a file that can be read, in UTF-8") from None
        return name

    @field_validator("chat_template")
    @classmethod
    def _check_template(cls, name: str | None) -> str | None:
        """Check the syntax of a file; other errors show only when it renders a conversation. A name may refer to one of
        the checkpoint's templates, which are not known before it is loaded."""
        from transformers.utils.chat_template_utils import _compile_jinja_template  # adds tags to Jinja's

        if name in (None, "plain"):
            return name
        if not os.path.isfile(name):
            if TEMPLATE_NAME.fullmatch(name):
                return name
            raise KVCompressError(f"chat_template={shown(name)} is neither a file, nor 'plain', nor a template's name")
        try:
            _compile_jinja_template(Path(name).read_text(encoding="utf-8"))
        except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
            what = f"line {error.lineno}" if isinstance(error, TemplateSyntaxError) else type(error).__name__
            reason = error.message if isinstance(error, TemplateSyntaxError) else error
            raise KVCompressError(f"chat_template={shown(name)} is no Jinja template: {what}: {reason}") from None
        return name

    @field_validator("pretrained")
    @classmethod
    def _bundled(cls, name: str) -> str:
        if name == TINY_MODEL:
            return str(TINY_CHECKPOINT)
        return name

    @model_validator(mode="after")
    def _check_together(self) -> "ModelArguments":
        size, slots, plan = (f"{name}={getattr(self, name)!r}" for name in ("batch_size", "slots", "tp_plan"))
        if isinstance(self.batch_size, int) and self.max_batch_size is not None:
            raise KVCompressError(f"max_batch_size={self.max_batch_size} goes with batch_size=auto only")
        if self.prefill_tokens is not None and not isinstance(self.slots, int):
            raise KVCompressError(f"prefill_tokens= goes with a number of slots, not with {slots}")
        if self.slots is not None and self.batch_size != 1:
            raise KVCompressError(
                f"{slots} does not go with {size}: each request has a prefill of its own; give one of the two"
            )
        if self.slots is not None and self.on_oom == "offload":
            raise KVCompressError(f"on_oom='offload' does not go with {slots}: raise and halve_batch do")
        if self.tp_plan is None:
            return self
        if isinstance(self.batch_size, str):
            raise KVCompressError(f"{size} does not go with {plan}: give a number")
        # Name -> the only value that works with tp_plan.
        for name, value in {"device_map": None, "quantization": None, "on_oom": "raise", "slots": None}.items():
            if getattr(self, name) != value:
                raise KVCompressError(f"{name}={getattr(self, name)!r} does not go with {plan}")
        return self

    @field_validator("measurements_path")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        if path is not None and max(len(os.fsencode(part)) for part in path.parts or [""]) > 255:
            raise ValueError("File name too long")
        return path and path.absolute()  # the working directory may change before it is written


def parse_arguments(**arguments: Any) -> tuple[ModelArguments, Compression]:
    """Parse the model arguments that lmms-eval hands over into the model's and the first compression.

    Raises KVCompressError for unknown arguments and options, for arguments of other LLaVA wrappers that mean nothing
    here, and for values of the wrong type."""
    given = without_none(arguments)
    compression = {name: given.pop(name) for name in ("method", "ratio", "budget") if name in given}
    own, options = split_arguments(given, [compression.get("method")], ("pretrained", "method", "ratio", "budget"))
    model, first = model_arguments(**own), make_compression(**compression, **options)
    check_options(model, first.options)
    return model, first


def check_options(model: ModelArguments, options: Mapping[str, Any]) -> None:
    """Raise KVCompressError if these options of a compression do not work with the model's arguments."""
    kind, slots, size = options.get("cache_implementation", "dynamic"), model.slots, model.batch_size
    if slots is not None and kind not in ("dynamic", "static"):
        raise KVCompressError(f"slots={slots!r} does not go with cache_implementation={kind!r}: dynamic and static do")
    if options.get("scope") == "context-first" and size != 1:
        raise KVCompressError(
            f"scope='context-first' does not go with batch_size={size!r}: it reads one prompt at a time; with slots= "
            "answers are generated together"
        )


def split_arguments(
    given: dict[str, Any], methods: list[str | None], others: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `given` into the model's arguments and the options of `methods` (None is `full`), checking only names.

    Raises KVCompressError for a name that is neither; its message also lists `others` as valid names.
    """
    infos = [method_info(name) for name in methods]
    options = {name: None for info in infos for name in method_options(info.name, given.get("scorer"))}
    asked = ", ".join(dict.fromkeys(info.name for info in infos))
    valid = ModelArguments.model_fields.keys() - {"legacy"}  # holds the LEGACY_ARGUMENTS
    if taken := options.keys() & {*valid, *LEGACY_ARGUMENTS, *OF_TABLE}:
        owner = next(info.name for info in infos if min(taken) in method_options(info.name, given.get("scorer")))
        raise KVCompressError(
            f"option {min(taken)!r} of method {owner!r} needs another name: in an evaluation this one is taken"
        )
    for name in given:
        if name in options or name in valid or name in LEGACY_ARGUMENTS:
            continue
        if owners := [each for each in (*kvcompress.list_methods(), *INPUT_METHODS) if name in method_options(each)]:
            others_too = f" and {len(owners) - NAMED} other methods" if len(owners) > NAMED else ""
            raise KVCompressError(
                f"{name!r} is an option of {', '.join(owners[:NAMED])}{others_too}, not of {asked}; valid: "
                f"{', '.join(options) or 'none'}"
            )
        valid = {*valid - {"pretrained"}, *others, *options}
        hints = (untyped(info.cls, name) for info in infos)
        raise unknown_name(f"neither the model nor {asked} has an argument", name, valid, "".join(hints))
    own = {name: value for name, value in given.items() if name not in options}
    return own, {name: value for name, value in given.items() if name in options}


def model_arguments(**given: Any) -> ModelArguments:
    """Check the model's arguments, including those of other LLaVA wrappers. Raises KVCompressError."""
    given = without_none(given)
    legacy = {name: _legacy_value(name, given.pop(name)) for name in LEGACY_ARGUMENTS if name in given}
    if "pretrained" not in given:
        raise KVCompressError(f"pretrained= is missing: a hub id, a local folder, or {TINY_MODEL!r}")
    return validated(ModelArguments, legacy=legacy, **given)


def make_compression(
    method: str | None = None, ratio: float | None = None, budget: int | None = None, **options: Any
) -> Compression:
    """Check and return a compression; `method=None` is `full`. Raises KVCompressError."""
    size = without_none({"method": method, "ratio": ratio, "budget": budget})
    asked = validated(Size, **size)
    return choose(asked.method, asked.ratio, asked.budget, without_none(options))


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the values that mean the default: None and the string "none". But `merge=none` means: do not merge."""
    return {
        name: value
        for name, value in values.items()
        if str(value) != "None" and (name == "merge" or str(value).lower() != "none")
    }


def _legacy_value(name: str, value: Any) -> Any:
    accepted, instead = LEGACY_ARGUMENTS[name]
    if value in accepted:
        return value
    only = f" other than {accepted[0]}" if accepted else ""
    raise KVCompressError(f"{name}={value!s:.80}: no value{only} is supported: {instead}")


def validated(model: type[BaseModel], **values: Any) -> Any:
    """Build a pydantic model and turn its error into a one-line KVCompressError."""
    try:
        return model(**values)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        if isinstance(cause, KVCompressError):
            raise cause from None
        name, message, value = first_fault(error)
        raise KVCompressError(f"{name}={shown(value)}: {message}") from None
