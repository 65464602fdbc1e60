"""The state of a request while its prompt is prefilled, at once or in pieces, and while it decodes."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..cache.cache import CompressedCache
from ..cache_name import NAMES
from ..errors import KVCompressError
from ..hooks.positions import next_position
from ..hooks.resumed_prompt import ResumedPrompt
from .request import Answer, Request, prepare

WITHOUT_MEDIA = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", *NAMES, "use_cache"),
    "logits_to_keep",
)


@dataclass(frozen=True)
class ConnectedModel:
    """A model with compression connected.

    Attributes:
        is_connected: whether compression is still connected.
        new_cache: creates the cache of one prompt.
        prefill: runs the forward pass over a prompt with these inputs, or over its next piece.
    """

    model: PreTrainedModel
    is_connected: Callable[[], bool]
    new_cache: Callable[[], CompressedCache]
    prefill: Callable[[ResumedPrompt | None, Mapping[str, Any]], ModelOutput]


class RequestState:
    """A request while its prompt is prefilled, at once or in pieces, and while it decodes.

    Attributes:
        waited_s: seconds from the start of the run until the prefill began.
        cache: the cache that holds the prompt; None before the first piece, and once the request has a slot.
        sampler: chooses its tokens, after the first piece.
        position: after the last piece, the position of the token to feed next.
        sizes: size of the slot that it needs; empty until that is known.
    """

    def __init__(
        self,
        index: int,
        request: Request | Mapping[str, torch.Tensor],
        clock: Callable[[], float],
        began: float,
        prefill_tokens: int | None,
    ):
        """`began` is when the run began, by `clock`; `prefill_tokens` is the most tokens of a piece; None: the prompt
        is one piece."""
        self._clock, self._started = clock, clock()
        self.index, self.waited_s = index, self._started - began
        self.request = Request(request) if isinstance(request, Mapping) else request
        self.cache: CompressedCache | None = None
        self.sizes: list[int] = []
        self._pieces = None if prefill_tokens is None else ResumedPrompt(prefill_tokens)
        self._first_at = self._latest_at = self._pause_s = 0.0  # times of tokens, and the longest between two

    @torch.no_grad()
    def prefill(self, connected: ConnectedModel, options: Mapping[str, Any]) -> torch.Tensor | None:
        """Prefill the next piece. After the last one, return the logits (vocabulary,) of the next token, otherwise
        None.

        Args:
            options: options of `generate` for all requests.
        """
        if self.cache is None:
            if not isinstance(self.request, Request):
                raise KVCompressError(
                    f"a request is a mapping of model inputs or a Request, not a {type(self.request).__name__}"
                )
            self._check_wanted()
            self.cache = connected.new_cache()
            inputs, self.sampler = prepare(connected.model, self.request, options, self.cache)
            output = connected.prefill(self._pieces, inputs)
            # Later passes use the embeddings of the first, so no image is encoded again.
            self._inputs = {name: value for name, value in inputs.items() if name in WITHOUT_MEDIA}
        else:
            self._check_wanted()
            output = connected.prefill(self._pieces, self._inputs)
        if self._pieces is not None and not self._pieces.is_through:
            return None
        self.position = next_position(self._inputs.get("position_ids"), self.cache.seen_tokens)
        return output.logits[0, -1]

    def _check_wanted(self) -> None:
        if self.request.is_wanted is not None and not self.request.is_wanted():
            raise KVCompressError("the request was taken back")

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values of the prompt, and for the queries of pieces."""
        return self.cache.nbytes + (0 if self._pieces is None else self._pieces.nbytes)

    def end_prompt(self) -> None:
        """Record what the prompt costs, and drop its inputs and pieces."""
        self._tokens_in = self.cache.seen_tokens
        self._kv_bytes_prompt = self.cache.nbytes - self.cache.room_nbytes
        self._realised_ratios = [of_rows[0] for of_rows in self.cache.realised_ratios()]
        self._inputs = self._pieces = None

    def add(self, token: int) -> bool:
        """Append a token; return True if it is the last."""
        now = self._clock()
        if self._first_at:
            self._pause_s = max(self._pause_s, now - self._latest_at)
        else:
            self._first_at = now
        self._latest_at = now
        return self.sampler.add(token)

    def answer(self) -> Answer:
        tokens = self.sampler.tokens
        is_one = len(tokens) == 1
        return Answer(
            self.index,
            torch.tensor(tokens),
            waited_s=self.waited_s,
            ttft_s=self._first_at - self._started,
            tpot_s=None if is_one else (self._latest_at - self._first_at) / (len(tokens) - 1),
            pause_s=None if is_one else self._pause_s,
            tokens_in=self._tokens_in,
            kv_bytes_prompt=self._kv_bytes_prompt,
            realised_ratios=self._realised_ratios,
        )

    def failed(self, error: Exception) -> Answer:
        """Return the answer of a request that ended with an error, whose frames then hold no tensors."""
        traceback.clear_frames(error.__traceback__)
        return Answer(self.index, torch.tensor([], dtype=torch.long), error, self.waited_s)
