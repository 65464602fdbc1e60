"""The state of a request while its prompt is prefilled, at once or in pieces, and while it decodes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ..cache.cache import CompressedCache
from ..errors import KVCompressError
from ..hooks.positions import PositionRecorder
from ..hooks.resumed_prompt import ResumedPrompt
from .request import Answer, Prompt, Request, TokenChoice, prepare


@dataclass(frozen=True)
class Writer:
    """A model with compression connected.

    Attributes:
        decoder: the model's text decoder.
        is_connected: whether compression is still connected.
        new_cache: creates the cache of one prompt.
        read: runs the forward pass over a prompt with these inputs, or over its next piece.
    """

    model: PreTrainedModel
    decoder: PreTrainedModel
    is_connected: Callable[[], bool]
    new_cache: Callable[[], CompressedCache]
    read: Callable[[ResumedPrompt | None, Mapping[str, Any]], ModelOutput]


class Reading:
    """A request whose prompt is being prefilled.

    Attributes:
        started: when its prefill began.
        waited_s: seconds from the start of the run until then.
        cache: the cache that will hold the prompt.
        prompt: None before the first piece.
        position: after the last piece, the position of the next token.
        axes: after the last piece, the number of axes of a position.
    """

    def __init__(
        self,
        index: int,
        request: Request | Mapping[str, torch.Tensor],
        started: float,
        waited_s: float,
        prefill_tokens: int | None,
    ):
        """`prefill_tokens` is the most tokens of a piece; None: the prompt is one piece."""
        self.index, self.started, self.waited_s = index, started, waited_s
        self.request = Request(request) if isinstance(request, Mapping) else request
        self.prompt: Prompt | None = None
        self._pieces = None if prefill_tokens is None else ResumedPrompt(prefill_tokens)

    @torch.no_grad()
    def read_on(self, writer: Writer, options: Mapping[str, Any]) -> torch.Tensor | None:
        """Prefill the next piece. After the last one, return the logits (vocabulary,) of the next token, otherwise
        None.

        Args:
            options: options of `generate` for all requests.
        """
        if self.prompt is None:
            if not isinstance(self.request, Request):
                raise KVCompressError(
                    f"a request is a mapping of model inputs or a Request, not a {type(self.request).__name__}"
                )
            self.cache = writer.new_cache()
            self.prompt = prepare(writer.model, self.request, options, self.cache)
            with PositionRecorder(writer.decoder) as self._positions:
                output = writer.read(self._pieces, self.prompt.inputs)
            self.prompt.leave_media()
        else:
            output = writer.read(self._pieces, self.prompt.inputs)
        if self._pieces is not None and not self._pieces.is_through:
            return None
        self.position, self.axes = self._positions.next(self.cache.seen_tokens)
        return output.logits[0, -1]

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values, and for the queries of pieces."""
        return self.cache.nbytes + (0 if self._pieces is None else self._pieces.nbytes)


@dataclass
class Running:
    """A request whose prompt is stored.

    Attributes:
        position: position of the token to feed next.
        started, first_at, latest_at: times of the prefill's start, the first and the latest token.
        pause_s: the longest time between two tokens so far.
    """

    index: int
    request: Request
    choice: TokenChoice
    config: GenerationConfig
    tokens_in: int
    position: int
    started: float
    waited_s: float
    cache: CompressedCache | None  # None once it has a slot
    kv_bytes_prompt: int
    realised_ratios: list[float]
    sizes: list[int] = field(default_factory=list)  # size of the slot that it needs
    first_at: float = 0.0
    latest_at: float = 0.0
    pause_s: float = 0.0

    @classmethod
    def of(cls, read: Reading) -> "Running":
        """Create the state from a request whose prompt has been prefilled."""
        cache, prompt = read.cache, read.prompt
        return cls(
            read.index,
            read.request,
            prompt.choice,
            prompt.config,
            prompt.tokens_in,
            read.position,
            read.started,
            read.waited_s,
            cache,
            cache.nbytes - cache.room_nbytes,
            [of_rows[0] for of_rows in cache.realised_ratios()],
        )

    def add(self, token: int) -> bool:
        """Append a token; return True if it is the last."""
        now = time.perf_counter()
        if self.first_at:
            self.pause_s = max(self.pause_s, now - self.latest_at)
        else:
            self.first_at = now
        self.latest_at = now
        return self.choice.add(token)

    def answer(self) -> Answer:
        tokens = self.choice.tokens
        is_one = len(tokens) == 1
        return Answer(
            self.index,
            torch.tensor(tokens),
            waited_s=self.waited_s,
            ttft_s=self.first_at - self.started,
            tpot_s=None if is_one else (self.latest_at - self.first_at) / (len(tokens) - 1),
            pause_s=None if is_one else self.pause_s,
            tokens_in=self.tokens_in,
            kv_bytes_prompt=self.kv_bytes_prompt,
            realised_ratios=self.realised_ratios,
        )
