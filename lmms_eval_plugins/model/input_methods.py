"""Baselines that change what a question shows, while the cache keeps everything: `downsample` and `blind`.

They are methods of an evaluation only: `kvcompress.compress` sees a finished prompt. `reduced_inputs.py` carries them
out."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from kvcompress import methods as core
from kvcompress.errors import KVCompressError, unknown_name, validated
from kvcompress.methods import Method, MethodInfo, method_name
from kvcompress.policy.make import make_policy
from kvcompress.policy.options import all_options
from kvcompress.policy.policy import Policy
from kvcompress.scoring.budget import Budget


class InputMethod(Method):
    """Base class of these methods: a dataclass whose fields are its options, as in the core."""

    size: ClassVar[dict[str, float]] = {}  # the only size, if it takes none


INPUT_METHODS: dict[str, MethodInfo] = {}


def input_method(name: str) -> Callable[[type[InputMethod]], type[InputMethod]]:
    """Class decorator that registers an input method's dataclass under its name."""

    def register(cls: type[InputMethod]) -> type[InputMethod]:
        INPUT_METHODS[name] = MethodInfo(name, cls, cls.paper, {field.name: field.default for field in fields(cls)})
        return cls

    return register


@input_method("downsample")
@dataclass(frozen=True)
class Downsample(InputMethod):
    """Shrinks images and video frames until the model's processor makes as few vision tokens as asked for.

    `ratio` (or `budget`) is the largest share (number) of the question's vision tokens. With `fewer_frames`, a video
    loses frames instead, and the others keep their size."""

    fewer_frames: bool = False


@input_method("blind")
@dataclass(frozen=True)
class Blind(InputMethod):
    """Leaves out images and videos, to show what the model answers without seeing them."""

    size: ClassVar[dict[str, float]] = {"ratio": 0.0}  # of the vision tokens


def method_info(name: str | None) -> MethodInfo:
    """Return the entry of a method of the core or of this module; None means `full`. Raises KVCompressError with the
    valid names."""
    if name is None or (key := method_name(name)) in core.list_methods():
        return core.method_info(name)
    if key not in INPUT_METHODS:
        raise core.no_method(name, [*core.list_methods(), *INPUT_METHODS])
    return INPUT_METHODS[key]


def method_options(name: str | None, scorer: str | None = None) -> dict[str, object]:
    """Return every option that a method accepts, with its default. The cache of an input method is that of `full`; like
    a token method's, its ratio is of the vision tokens."""
    info = method_info(name)
    if issubclass(info.cls, InputMethod):
        return {**info.options, "ratio_of": "vision", **all_options(core.method_info("full"))}
    return all_options(info, scorer)


def size_of(name: str | None) -> dict[str, float]:
    """Return the only size of a method that takes none, such as `full`; empty for the others."""
    info = method_info(name)
    return {"ratio": 1.0} if info.name == "full" else getattr(info.cls, "size", {})


@dataclass(frozen=True)
class Compression:
    """A method with its size and options, checked without a model.

    Attributes:
        method, ratio, budget, options: what is asked for.
        policy: what the cache does.
        inputs: what is done to the inputs before; None: nothing.
        most: the largest share or number of vision tokens that `inputs` leaves; None: none are left.
    """

    method: str
    ratio: float | None
    budget: int | None
    options: dict[str, Any]
    policy: Policy
    inputs: InputMethod | None = None
    most: Budget | None = None

    @property
    def effective(self) -> dict[str, object]:
        """Every option with its effective value."""
        of_inputs = {} if self.inputs is None else {**asdict(self.inputs), "ratio_of": "vision"}
        return {**of_inputs, **self.policy.options}

    @property
    def cache_implementation(self) -> str:
        return self.options.get("cache_implementation", "dynamic")

    def stored_as(self, cache_implementation: str) -> "Compression":
        """Return the same compression with another kind of cache. Raises KVCompressError."""
        options = {**self.options, "cache_implementation": cache_implementation}
        return choose(self.method, self.ratio, self.budget, options)

    @property
    def of_cache(self) -> dict[str, Any]:
        """The arguments of `kvcompress.compress`: with an input method, the cache keeps everything."""
        if self.inputs is not None:
            return options_of_cache(self.options)
        return {"method": self.method, "ratio": self.ratio, "budget": self.budget, **self.options}

    @property
    def identity(self) -> bytes:
        """What tells the same questions apart if they show something else; empty if nothing is done to them."""
        return b"" if self.inputs is None else repr((self.inputs, self.most)).encode()

    def vision_tokens(self, tokens: int) -> int:
        """Return how many vision tokens may be made of pictures that have `tokens` as they are."""
        if self.most is None:
            return 0
        if self.most.ratio is None:
            return min(self.most.entries, tokens)
        return math.floor(self.most.ratio * tokens + 1e-9)


def options_of_cache(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an input method that belong to the cache."""
    return {option: value for option, value in options.items() if option in all_options(core.method_info("full"))}


def choose(method: str | None, ratio: float | None, budget: int | None, options: dict[str, Any]) -> Compression:
    """Check a method, its size and its options. Raises KVCompressError."""
    info = method_info(method)
    asked = (info.name, ratio, budget, options)
    if not issubclass(info.cls, InputMethod):
        return Compression(*asked, make_policy(method, ratio, budget, **options))
    if unknown := [name for name in options if name not in method_options(info.name)]:
        raise unknown_name(f"method {info.name!r} has no option", unknown[0], method_options(info.name))
    if (of := options.get("ratio_of", "vision")) != "vision":
        raise KVCompressError(f"method {info.name!r} changes pictures only: ratio_of='vision', not {of!r}")
    own = {name: value for name, value in options.items() if name in info.options}
    inputs = validated(info.cls, f"method {info.name!r}: option", {**info.options, **own})
    policy = make_policy("full", **options_of_cache(options))
    if inputs.size:
        if budget is not None or ratio not in (None, *inputs.size.values()):
            raise KVCompressError(f"method {info.name!r} takes no size: ratio={ratio}, budget={budget}")
        return Compression(*asked, policy, inputs)
    if ratio is None and budget is None:
        raise KVCompressError(f"method {info.name!r} needs ratio= or budget=: the share or number of vision tokens")
    return Compression(*asked, policy, inputs, Budget(ratio, budget))
