"""The phase of a prompt that is answered before its entries are chosen: `hindsight`."""

import torch

from ..scoring.answer import Answer
from .phases import EVERY, KeysAndValues, Phase, Waiting
from .scope import States


class Answering(Phase):
    """The answer to a waiting prompt, token by token, on its full cache.

    The answer is attended to like stored entries and dropped at the end; the cluster then says how much it needed each
    entry.

    Attributes:
        pads: bool (batch, tokens) over the answers so far, the current token included: True after the end of an answer.
    """

    def __init__(self, waiting: Waiting):
        super().__init__(waiting.choice, waiting.memory)
        self.waiting, states = waiting, waiting.states
        keys, values, batch = states.keys, states.values, len(states.keys)
        pads = waiting.tokens.pads(keys.shape[2], keys.device)
        # What all queries may see.
        self._before = keys.new_ones(batch, 1, keys.shape[2], dtype=torch.bool) if pads is None else ~pads[:, None]
        if self.memory.storage is not None:  # a prompt on a filled cache
            old = self.memory.storage.read()
            keys, values = torch.cat([old[0], keys], 2), torch.cat([old[1], values], 2)
            stored = self.memory.storage.visible()
            if stored is None:
                stored = self._before.new_ones(batch, 1, old[0].shape[2])
            self._before = torch.cat([stored, self._before.expand(-1, stored.shape[1], -1)], dim=2)
        # The answer is written after a copy of the prompt, so that each token only copies itself.
        room = self.choice.policy.cluster.answer_tokens
        self._keys, self._values = (torch.nn.functional.pad(part, (0, 0, 0, room)) for part in (keys, values))
        self._queries = [states.queries]
        self.pads = self._before.new_zeros(batch, 0)

    @property
    def length(self) -> int:
        return self.waiting.length + self.pads.shape[1]

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        end = self._before.shape[2] + self.pads.shape[1]
        self._keys[:, :, end - 1 : end], self._values[:, :, end - 1 : end] = keys, values
        return self._keys[:, :, :end], self._values[:, :, :end]

    def mask(self, query_length: int, rows: slice = EVERY) -> torch.Tensor:
        """Return the mask of the latest query. A pad sees itself, so that its softmax is defined."""
        answer = ~self.pads[:, None]
        answer[..., -1] = True
        return self._visible(answer)

    def after_attention(self, states: States) -> Phase:
        self._queries.append(states.queries)
        return self

    def finish(self) -> Waiting:
        """Let the cluster score the entries; return the prompt, which still waits."""
        states, candidates = self.waiting.states, self.waiting.candidates
        tokens = self.pads.shape[1]
        end = self._before.shape[2]
        # The prompt's last query sees no token of the answer; an answer token sees itself and those before it.
        causal = self.pads.new_ones(1 + tokens, tokens).tril(-1)
        visible = self._visible(causal & ~self.pads[:, None])
        votes = torch.nn.functional.pad(~self.pads, (1, 0), value=True)
        answer = Answer(
            torch.cat(self._queries, 2),
            self._keys[:, :, : end + tokens],
            self._values[:, :, : end + tokens],
            visible & votes[:, None, :, None],
            states.scaling,
            states.module,
        )
        received = self.choice.policy.cluster.score_by_answer(answer)[..., end - states.keys.shape[2] : end]
        self.memory.answer_scores = received
        if candidates.source is not None:
            received = received.gather(2, candidates.source[:, None].expand(-1, received.shape[1], -1))
        self.waiting.receive(received)
        return self.waiting

    def _visible(self, answer: torch.Tensor) -> torch.Tensor:
        """Return bool (batch, 1 or kv_heads, queries, keys); `answer` (batch, queries, tokens) is the part over the
        answer."""
        before = self._before[:, :, None].expand(-1, -1, answer.shape[1], -1)
        return torch.cat([before, answer[:, None].expand(-1, before.shape[1], -1, -1)], dim=-1)
