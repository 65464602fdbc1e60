"""`scope="context-first"`: a prompt's context passes through the text decoder and is compressed before its question,
which attends to the kept entries. KVzip (2505.23416) and kvpress evaluate in this way.

The model's own forward runs once for the whole prompt, as in a chunked prefill. The entries kept of the context do not
depend on the question, so a `PrefixCache` holds them for the next one."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.contents import Contents
from ..cache.prefix_tree import Columns
from ..errors import KVCompressError
from .chunked_prefill import before_pass, columns_of

# Given a context's arguments of the text decoder, runs its pass unless what it keeps is known.
ReadContext = Callable[[dict, Callable[[], None]], None]


def read_context_first(
    decoder: PreTrainedModel, cache: CompressedCache, read: ReadContext, choose: Callable[[], None]
) -> list[RemovableHandle]:
    """Let the contexts of the prefill announced to `cache` pass through `decoder` first.

    Args:
        read: see `ReadContext`.
        choose: makes the choices that wait for the whole context.

    Returns:
        The handles that undo this; none if all of the prompt is context, or nothing is.

    Raises:
        KVCompressError: if the rows' questions differ in length, since a batch is cut at one column.
    """
    whole = cache.announced
    questions = {length - context for length, context in zip(whole.lengths, whole.context, strict=True)}
    if questions == {0} or not any(whole.context):
        return []
    if len(questions) > 1:
        raise KVCompressError(
            f"scope='context-first' cuts all rows of a batch at one column, but their questions have "
            f"{', '.join(map(str, sorted(questions)))} tokens: pass them one by one, or to generate_many"
        )
    start = whole.columns - questions.pop()

    def feed(kwargs: dict) -> dict:
        context = columns_of(kwargs, 0, start, whole.columns)

        def compress() -> None:
            decoder(**context)
            choose()

        cache.begin(whole.columns_from(0, start))
        read(context, compress)
        cache.begin(whole.question_from(start))
        return columns_of(kwargs, start, whole.columns, whole.columns)

    return [before_pass(decoder, feed)]


class KeptContexts:
    """The contents of caches that have read a context, in at most `room` bytes; the least recently used are dropped.

    Attributes:
        nbytes: bytes held.
    """

    def __init__(self, room: int):
        self.room, self.nbytes = room, 0
        self._contents: OrderedDict[object, Contents] = OrderedDict()

    def find(self, key: object) -> Contents | None:
        if (found := self._contents.get(key)) is not None:
            self._contents.move_to_end(key)
        return found

    def add(self, key: object, contents: Contents) -> None:
        if contents.nbytes > self.room:
            return
        self._contents[key] = contents
        self.nbytes += contents.nbytes
        while self.nbytes > self.room:
            _, oldest = self._contents.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def clear(self) -> None:
        self._contents.clear()
        self.nbytes = 0


def context_key(identity: object, cache: CompressedCache, columns: int, given: list[Columns]) -> object:
    """Return a key that is equal for caches that keep the same entries of a context.

    Args:
        identity: the decoder in its present state.
        columns: of the context, pads included.
        given: what identifies each row's tokens.
    """
    found = hashlib.sha256()
    found.update(f"{columns}".encode())
    for part in (part for row in given for part in row):
        found.update(f"{part.dtype} {tuple(part.shape)} ".encode())
        found.update(part.detach().double().cpu().numpy().tobytes())
    return identity, repr(sorted(cache.asked.items())), found.digest()
