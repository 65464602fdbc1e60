"""Read YAML files that a user wrote."""

from pathlib import Path
from typing import Any

import yaml

from kvcompress.errors import one_line, shown

from .errors import UsageError


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, which YAML forbids and PyYAML silently overwrites. A tag such as lmms-eval's `!function`
    is dropped and its value read as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise yaml.constructor.ConstructorError(
                    problem=f"{shown(key)} occurs twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.add_multi_constructor("!", lambda loader, tag, node: str(node.value))


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Read the mapping in a file. Raises a one-line UsageError that calls the file `what`."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UsageError(f"{what} {shown(str(path))} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise UsageError(f"{what} {path} is not YAML: {one_line(error, 300)}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{what} {path} holds {shown(found)}, not keys with values")
    if wrong := [key for key in found if not isinstance(key, str)]:
        raise UsageError(f"{what} {path}: the key {shown(wrong[0])} is not text")
    return found
