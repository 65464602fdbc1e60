"""Groups of questions about the same images and videos; asked one after the other, they share most of their prefill."""

import contextlib
import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from datasets import Dataset, Features, Image, Video
from lmms_eval.api.instance import Instance
from lmms_eval.protocol import ChatMessages
from torch.utils._pytree import tree_leaves

from .answerer import question
from .prompts import digest


class SharedMedia:
    """Requests grouped by the images and videos that they show."""

    def __init__(self, requests: Iterable[Instance], task_dict: dict[str, dict[str, Any]]):
        """`task_dict` maps task -> split -> documents, as lmms-eval passes it to a model."""
        self._groups: dict[tuple[str, int], Hashable] = {}
        stored: dict[tuple[str, str], Dataset | None] = {}
        for request in requests:
            _, messages, _, doc_id, task, split = request.args
            documents = task_dict[task][split]
            if (task, split) not in stored:
                columns = media_columns(getattr(documents, "features", None))
                stored[task, split] = documents.select_columns(columns).with_format("arrow") if columns else None
            shown = b""
            if (media := stored[task, split]) is not None:
                shown = stored_media(media, doc_id)
            else:
                with contextlib.suppress(Exception, SystemExit):  # raised again when the question is asked
                    shown = media_of(messages(documents[doc_id]))
            self._groups[question(request)] = (task, shown) if shown else question(request)

    def groups(self, requests: list[Instance]) -> list[Hashable]:
        """Return the group of each request; requests with the same images and videos have equal groups."""
        return [self._groups[question(request)] for request in requests]

    def together(self, requests: list[Instance], shortness: Callable[[Instance], int]) -> Callable[[Instance], tuple]:
        """Return a key that sorts requests which show the same next to each other: the group with the longest prompt
        first, and in each group the longest prompt first."""
        longest: dict[Hashable, int] = {}
        for request, group in zip(requests, self.groups(requests), strict=True):
            longest[group] = min(longest.get(group, 0), shortness(request))
        places = {group: place for place, group in enumerate(longest)}

        def key(request: Instance) -> tuple[int, int, int]:
            group = self._groups[question(request)]
            return longest[group], places[group], shortness(request)

        return key


def media_columns(features: Features | None) -> list[str]:
    """Return the columns of a data set that hold images or videos, alone or in lists."""

    def holds_media(feature: Any) -> bool:
        if isinstance(feature, dict):
            return any(map(holds_media, feature.values()))
        if isinstance(feature, list | tuple):
            return any(map(holds_media, feature))
        return isinstance(feature, Image | Video) or holds_media(getattr(feature, "feature", ()))

    return [name for name, feature in (features or {}).items() if holds_media(feature)]


def stored_media(documents: Dataset, doc_id: int) -> bytes:
    """Return a digest of a document's stored images and videos, without decoding them; empty if there are none.

    `documents` has only these columns, in Arrow's format."""
    stored = tree_leaves(documents[doc_id].to_pylist())  # bytes, file names and None
    parts = [part if isinstance(part, bytes) else str(part or "").encode() for part in stored]
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.digest() if any(parts) else b""


def media_of(messages: list[dict[str, Any]] | str) -> bytes:
    """Return a digest of the images and videos of lmms-eval's messages; empty if there is none."""
    if isinstance(messages, str):
        return b""
    shown = [{**each, "content": [part for part in each["content"] if part["type"] != "text"]} for each in messages]
    return digest(ChatMessages(messages=shown)) if any(each["content"] for each in shown) else b""
