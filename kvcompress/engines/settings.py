"""What an engine is told of a policy, and what it does differently."""

from collections.abc import Collection
from dataclasses import dataclass, fields

from ..errors import KVCompressError
from ..methods import method_info
from ..policy.options import Engine, all_options
from ..policy.policy import Policy


@dataclass(frozen=True)
class Settings:
    """A policy as an engine's settings.

    Attributes:
        engine: its name, as after `--engine`.
        method: the method's name.
        ratio: the fraction kept.
        settings: the engine's own names and values, nested as the engine nests them.
        differences: what the engine does otherwise, a sentence each.
    """

    engine: str
    method: str
    ratio: float
    settings: dict[str, object]
    differences: tuple[str, ...]


def check_carried(policy: Policy, engine: str, carried: Collection[str]) -> None:
    """Raise KVCompressError if an option of every method has a value that the engine cannot be told.

    `carried` names the options that it can."""
    default = all_options(method_info(policy.method))
    for name in [field.name for field in fields(Engine) if field.name not in carried]:
        value = policy.options.get(name)
        if name in default and value != default[name]:
            raise KVCompressError(
                f"{engine} cannot be told {name}={value!r}; of such options it has: {listed(carried)}"
            )


def listed(names: Collection[str]) -> str:
    """Return names in a row, sorted, or `none`."""
    return ", ".join(sorted(names)) or "none"
