"""Start the talker of a Qwen2.5-Omni with the first text tokens, while the thinker still writes.

In transformers' `generate` the thinker writes all of its text, then the talker all of its codec tokens. But the
talker's prefill reads only the states of the prompt and of the first text token, and each of its steps adds one text
token. Here, `generate` therefore gets the thinker's result as if the text ended after two tokens. The thinker continues
in its own thread, and each talker step takes the next text token's states as soon as they exist. What `generate`
appends after two tokens, the end of the text and then padding, is appended after the last token.
"""

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5OmniForConditionalGeneration,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..errors import KVCompressError
from ..hooks.replacement import Replacement

FEWEST_TEXT_TOKENS = 2  # transformers' `generate` fails to speak a single one


def generate_overlapped(
    model: Qwen2_5OmniForConditionalGeneration, **generate_kwargs: Any
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Run `model.generate(**generate_kwargs)` for one prompt, with the same text and speech tokens but overlapped.

    A thinker that samples shares torch's generator with the talker; the order of their draws is then random.

    Returns:
        as `generate`: LongTensor (1, tokens), the prompt and the text; float32 (samples,).

    Raises:
        KVCompressError: for several prompts, and for a text of one token, which transformers cannot speak.
    """
    if len(generate_kwargs["input_ids"]) != 1:
        raise KVCompressError(
            f"{len(generate_kwargs['input_ids'])} prompts: speech can overlap text for one prompt at a time"
        )
    reply = Reply()
    with ThreadPoolExecutor(1) as pool, reply.written_by(model.thinker, pool), reply.read_by(model.talker):
        try:
            _, waveform = model.generate(**generate_kwargs)
            return reply.sequences(), waveform
        finally:
            reply.stopped.set()


class EachToken(StoppingCriteria):
    """Calls `do` with the ids (1, tokens) after each token of a `generate`, and ends it once `stopped` is set."""

    def __init__(self, stopped: threading.Event, do: Callable[[torch.LongTensor], None]):
        self.stopped, self.do = stopped, do

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        self.do(input_ids)
        return torch.full((input_ids.shape[0],), self.stopped.is_set(), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Begun:
    """The part of a thinker's result that transformers reads.

    Attributes:
        sequences: (1, prompt and two tokens).
        hidden_states: embeddings and last hidden states of the prompt and of the first token, (1, tokens, hidden).
    """

    sequences: torch.LongTensor
    hidden_states: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class Reply:
    """Passes the thinker's text to the talker.

    Attributes:
        stopped: event that ends the thinker when set.
    """

    def __init__(self):
        self.stopped = threading.Event()
        self._begun = threading.Event()  # two tokens exist, or no more will come
        self._two_tokens: torch.LongTensor | None = None
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []  # states of the prompt and of the first token
        self._later: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._fed = 0  # text tokens that the thinker has read back
        self._writing: Future[Any] | None = None

    def sequences(self) -> torch.LongTensor:
        """Wait for the whole text and return it after the prompt. Raises the thinker's exception, if any."""
        return self._writing.result().sequences

    # -- the thinker

    @contextmanager
    def written_by(self, thinker: PreTrainedModel, pool: ThreadPoolExecutor) -> Iterator[None]:
        """Make `thinker.generate` return after two tokens and continue in `pool`."""
        generate, update = thinker.generate, thinker._update_model_kwargs_for_generation

        def write(**kwargs: Any) -> Any:
            try:
                return generate(**kwargs)
            finally:
                self._later.put(None)
                self._begun.set()

        def begin(stopping_criteria: Any = (), **kwargs: Any) -> Begun:
            columns = kwargs["input_ids"].shape[1]

            def release_talker(sequences: torch.LongTensor) -> None:
                if sequences.shape[1] == columns + FEWEST_TEXT_TOKENS:
                    self._two_tokens = sequences
                    self._begun.set()

            criteria = [*stopping_criteria, EachToken(self.stopped, release_talker)]
            kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
            # With the settings of this thread.
            self._writing = pool.submit(contextvars.copy_context().run, lambda: write(**kwargs))
            self._begun.wait()
            if self._two_tokens is None:
                text = self.sequences().shape[1] - columns
                raise KVCompressError(f"the text has {text} token: speech needs at least {FEWEST_TEXT_TOKENS}")
            return Begun(self._two_tokens, tuple(self._first))

        def note(outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            # Not in a hook on the module, which would be compiled with it.
            self._take(outputs.hidden_states[0], outputs.hidden_states[-1])
            outputs.hidden_states = None  # otherwise `generate` holds every layer's until the text ends
            return update(outputs, model_kwargs, *args, **kwargs)

        with (
            Replacement(thinker, "generate", begin),
            Replacement(thinker, "_update_model_kwargs_for_generation", note),
        ):
            yield

    def _take(self, embeddings: torch.Tensor, last: torch.Tensor) -> None:
        if len(self._first) < 2:
            self._first.append((embeddings, last))
        else:
            self._later.put(embeddings + last)
        self._fed += 1

    # -- the talker

    @contextmanager
    def read_by(self, talker: PreTrainedModel) -> Iterator[None]:
        """Make each step of `talker.generate` wait for its text token."""
        parts: Iterator[torch.Tensor] = iter(())

        def hand_over(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            nonlocal parts
            if kwargs.get("inputs_embeds") is not None:  # the prefill
                parts = self._parts(kwargs["thinker_reply_part"])
                return args, kwargs
            return args, {**kwargs, "thinker_reply_part": next(parts)}

        hook = talker.register_forward_pre_hook(hand_over, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _parts(self, ending: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the states that the talker's steps add, (1, 1, hidden) each, endlessly.

        `ending` (1, 2, hidden) are the states that transformers appends to the text; the second is repeated."""
        while (part := self._later.get()) is not None:
            yield part
        sequences = self.sequences()
        prompt = self._two_tokens.shape[1] - FEWEST_TEXT_TOKENS
        if self._fed != sequences.shape[1] - prompt:  # the prompt, and every text token except the last
            raise KVCompressError(
                f"transformers fed {self._fed - 1} of {sequences.shape[1] - prompt} text tokens to the thinker, as it "
                "does on devices where it checks late whether a text ends (mps): speech cannot overlap text there"
            )
        yield ending[:, :1]
        while True:
            yield ending[:, 1:]
