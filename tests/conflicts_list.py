"""The list of what does not go together in docs/model-args.md: `python -m tests.conflicts_list` writes it anew.

tests/kvcompress/policy/test_conflicts.py compares it with `kvcompress.policy.conflicts`.
"""

import itertools
import textwrap
from pathlib import Path

import kvcompress
from kvcompress.policy.conflicts import CONFLICTS, Conflict
from kvcompress.policy.make import make_policy
from kvcompress.policy.options import Engine
from kvcompress.policy.policy import Policy
from tests.support.calibrations import needs_of
from tests.support.families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "model-args.md"
BEGIN, END = "<!-- made by `python -m tests.conflicts_list` -->\n", "<!-- end of what it makes -->\n"


def policies() -> dict[str, Policy]:
    """Each of the library's methods with its defaults, at a ratio that all of them accept."""
    model = FAMILIES["qwen2"].build()
    made = {}
    for name, info in kvcompress.list_methods().items():
        if info.cls.__module__.startswith("kvcompress."):
            made[name] = make_policy(name, 1.0, **needs_of(name, model))
    return made


def methods_of(conflict: Conflict, made: dict[str, Policy]) -> str:
    """The methods that a conflict is about."""
    names = [name for name, policy in made.items() if conflict.is_in(policy)]
    dropping = {name for name, policy in made.items() if policy.tokens is not None}
    listed = ", ".join(f"`{name}`" for name in names if name not in dropping)
    return ", ".join(filter(None, ["token methods" if dropping <= set(names) else "", listed]))


def rendered() -> str:
    """A list of features, each with what does not go with it."""
    made = policies()
    lines = []
    for feature, conflicts in itertools.groupby(CONFLICTS, key=lambda conflict: conflict.feature):
        lines.append(f"- **{feature}**")
        for conflict in conflicts:
            other = f"`{conflict.other}=`" if hasattr(Engine, conflict.other) else conflict.other
            if conflict.other == "method":
                other = methods_of(conflict, made) or "methods with an `update_kv` of their own"
            lines += textwrap.wrap(
                f"- {other}: {conflict.reason}", 120, initial_indent="  ", subsequent_indent="    ",
                break_on_hyphens=False,
            )  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + rendered() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
