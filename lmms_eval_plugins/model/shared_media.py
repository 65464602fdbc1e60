"""Which questions show the same images and videos: asked one after the other, they share most of their prefill."""

import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from datasets import Dataset, Features, Image, Video
from lmms_eval.api.instance import Instance
from lmms_eval.protocol import ChatMessages

from .answerer import question
from .media import digest


class SharedMedia:
    """Requests in groups, each of which shows the same images and videos."""

    def __init__(self, requests: Iterable[Instance], task_dict: dict[str, dict[str, Any]]):
        """`task_dict`: task -> split -> documents, as lmms-eval gives it to a model."""
        self._groups: dict[tuple[str, int], Hashable] = {}
        columns: dict[tuple[str, str], list[str]] = {}
        for request in requests:
            _, messages, _, doc_id, task, split = request.args
            documents = task_dict[task][split]
            if (task, split) not in columns:
                columns[task, split] = media_columns(getattr(documents, "features", None))
            if named := columns[task, split]:
                shown = undecoded(documents, named, doc_id)
            else:
                shown = media_of(messages(documents[doc_id]))
            self._groups[question(request)] = (task, shown) if shown else question(request)

    def groups(self, requests: list[Instance]) -> list[Hashable]:
        """The group of each request: equal where they show the same."""
        return [self._groups[question(request)] for request in requests]

    def together(self, requests: list[Instance], shortness: Callable[[Instance], int]) -> Callable[[Instance], tuple]:
        """A key that sorts requests which show the same next to each other: the group of the longest prompt first, and
        the longest prompt of each group first."""
        longest: dict[Hashable, int] = {}
        for request, group in zip(requests, self.groups(requests), strict=True):
            longest[group] = min(longest.get(group, 0), shortness(request))
        places = {group: place for place, group in enumerate(longest)}

        def key(request: Instance) -> tuple[int, int, int]:
            group = self._groups[question(request)]
            return longest[group], places[group], shortness(request)

        return key


def media_columns(features: Features | None) -> list[str]:
    """The columns of a data set that hold images or videos, alone or in lists."""

    def holds_media(feature: Any) -> bool:
        if isinstance(feature, dict):
            return any(map(holds_media, feature.values()))
        if isinstance(feature, list | tuple):
            return any(map(holds_media, feature))
        return isinstance(feature, Image | Video) or holds_media(getattr(feature, "feature", ()))

    return [name for name, feature in (features or {}).items() if holds_media(feature)]


def undecoded(documents: Dataset, columns: list[str], doc_id: int) -> bytes | None:
    """A digest of a document's images and videos as they are stored; None where it has none."""
    row = documents.with_format("arrow")[doc_id]
    stored = [row.column(name).to_pylist() for name in columns]
    return hashlib.blake2b(repr(stored).encode(), digest_size=16).digest() if any(map(_is_there, stored)) else None


def _is_there(stored: Any) -> bool:
    return any(map(_is_there, stored)) if isinstance(stored, list) else stored is not None


def media_of(messages: list[dict[str, Any]] | str) -> bytes | None:
    """A digest of the images and videos of lmms-eval's messages; None where there is none."""
    if isinstance(messages, str):
        return None
    shown = [{**each, "content": [part for part in each["content"] if part["type"] != "text"]} for each in messages]
    return digest(ChatMessages(messages=shown)) if any(each["content"] for each in shown) else None
