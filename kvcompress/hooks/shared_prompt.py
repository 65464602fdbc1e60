"""One prefill for several methods: what each layer's attention was handed is kept, and compressed again.

A prefill computes the same whatever is kept of it, and a method only looks at it. So it runs once. Every further
generation with the same prompt hands those states to its own cache, layer by layer, and goes on with the answer.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..cache.cache import CompressedCache
from ..cache.layer import CompressedLayer
from ..cache.scope import States
from ..device import synchronise
from ..errors import KVCompressError
from ..scoring.rotary import Rotary
from .model import text_decoder, unwrapped, writing_part
from .positions import PositionRecorder, go_on_from, note_positions, rope_deltas
from .replacement import wrapped
from .rotary import watch_rotary


@dataclass(frozen=True)
class Attended:
    """What a layer's attention was handed: query (batch, heads, columns, head_dim), key and value (batch, kv_heads,
    columns, head_dim), in the CPU's memory, and on which `device` it was."""

    layer_idx: int
    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    device: torch.device

    @property
    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)


@dataclass(frozen=True)
class PromptPass:
    """A prefill through a model.

    Attributes:
        inputs: what tells it from that of another batch: `input_ids`, `attention_mask` and the like.
        layers: in their order.
        position_ids: that the text decoder was given; None where it counts by itself.
        rotary: how the queries were rotated; None where that is not known, and no method asks for it.
        output: what the model returned: the logits of what comes next.
        rope_deltas: of a model that counts an image's positions in its own way (Qwen2-VL), else None.
        seconds: what the model's own work took, without compression.
    """

    inputs: dict[str, Any]
    layers: list[Attended]
    position_ids: torch.Tensor | None
    rotary: Rotary | None
    output: ModelOutput
    rope_deltas: torch.Tensor | None
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def is_of(self, inputs: dict[str, Any]) -> bool:
        return all(_is_equal(value, inputs[name]) for name, value in self.inputs.items())


class SharedPrompt:
    """Shares the prefill of one generation with others of the same prompt, text and images.

    ```python
    known = None
    for method in ("snapkv", "knorm"):
        with SharedPrompt(model, known) as shared, kvcompress.compress(model, method, 0.2):
            output = model.generate(**inputs)
        known = shared.prompt_pass
    ```

    Tokens and kept sets are those of a generation that runs the pass itself. It does run where a method changes it (see
    `is_shareable`), and for a batch of other tokens.

    Attributes:
        prompt_pass: the generation's; None where it cannot be shared or has more bytes than there is room.
        is_known: whether it did not run.
        correction_s: what must be added to the seconds that the generation took to get those of one that runs the pass
            and keeps nothing of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        known: PromptPass | None = None,
        room: float = math.inf,
        elsewhere_s: Callable[[], float] = lambda: 0.0,
    ):
        """`room`: bytes that a pass may have to be kept. `elsewhere_s`: tells the seconds, so far, of work that is
        not to be counted as the pass's, such as a vision tower's."""
        self.model = writing_part(unwrapped(model))
        self.known, self.room, self.elsewhere_s = known, room, elsewhere_s
        self.prompt_pass: PromptPass | None = None
        self.is_known, self.correction_s = False, 0.0

    def __enter__(self) -> "SharedPrompt":
        self._replaced = wrapped(self.model, "forward", self._prompt_forward)
        return self

    def __exit__(self, *exception: object) -> None:
        self._replaced.remove()

    def _prompt_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._replaced.remove()  # what follows is decoding, maybe compiled: it does not come through here
        cache = kwargs.get("past_key_values")  # a session passes everything by name
        is_wanted = self.known is not None or self.room > 0
        if not is_wanted or not is_shareable(self.model, cache, kwargs):
            return forward(*args, **kwargs)
        inputs = {name: kwargs.get(name) for name in ("input_ids", "attention_mask", "logits_to_keep")}
        if self.known is not None and self.known.is_of(inputs):
            self.prompt_pass, self.is_known = self.known, True
            return self._replay(cache)
        return self._record(forward, cache, inputs, kwargs)

    def _record(
        self, forward: Callable[..., Any], cache: CompressedCache, inputs: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        rotaries: list[Rotary] = []
        try:
            handles = watch_rotary(text_decoder(self.model), rotaries.append)
        except KVCompressError:  # not known: then no method that asks for it gets here
            handles = []
        notes = [_Note(layer, self.room / len(cache.layers)) for layer in cache.layers]
        elsewhere_s, start = self.elsewhere_s(), _now(self.model.device)
        try:
            with PositionRecorder(text_decoder(self.model)) as positions:
                output = forward(**kwargs)
        finally:
            for handle in [*handles, *notes]:
                handle.remove()
        self.correction_s = -sum(note.keeping_s for note in notes)
        # Of a prompt that was resumed the decoder saw the end only: the prefix cache has the rest of it.
        is_whole = not cache.resumed_at and all(note.attended for note in notes)
        if is_whole and isinstance(output, ModelOutput):
            seconds = _now(self.model.device) - start - (self.elsewhere_s() - elsewhere_s)
            seconds -= sum(note.keeping_s + note.compressing_s for note in notes)
            self.prompt_pass = PromptPass(
                inputs,
                [note.attended for note in notes],
                positions.position_ids,
                rotaries[0] if rotaries else None,
                type(output)(logits=output.logits),
                rope_deltas(self.model),
                seconds,
            )
        return output

    def _replay(self, cache: CompressedCache) -> ModelOutput:
        known, loading_s = self.known, 0.0
        note_positions(text_decoder(self.model), known.position_ids)
        if known.rotary is not None:
            cache.rotate(known.rotary)
        go_on_from(self.model, known.rope_deltas)
        for layer in known.layers:
            start = _now(layer.device)
            query, key, value = (state.to(layer.device) for state in layer.states)
            loading_s += _now(layer.device) - start
            cache.update(key, value, layer.layer_idx)
            cache.layers[layer.layer_idx].after_attention(query, layer.scaling, layer.module)
        self.correction_s = known.seconds - loading_s
        return type(known.output)(logits=known.output.logits, past_key_values=cache)


class _Note:
    """Keeps what one layer's attention is handed, where that has at most `room` bytes, and times its compression."""

    def __init__(self, layer: CompressedLayer, room: float):
        self.attended: Attended | None = None
        self.keeping_s = self.compressing_s = 0.0
        self._layer_idx, self._room = layer.layer_idx, room
        self.remove = layer.listen(self._listen).remove

    def _listen(self, states: States, compress: Callable[[], None]) -> None:
        tensors = (states.queries, states.keys, states.values)
        if sum(tensor.nbytes for tensor in tensors) > self._room:
            compress()  # untimed: that would have the device wait at every layer
            return
        device = states.queries.device
        start = _now(device)
        kept = (tensor.detach().cpu() for tensor in tensors)
        self.attended = Attended(self._layer_idx, states.module, *kept, states.scaling, device)
        kept_at = _now(device)
        compress()
        self.keeping_s, self.compressing_s = kept_at - start, _now(device) - kept_at


def is_shareable(model: PreTrainedModel, cache: object, kwargs: dict[str, Any]) -> bool:
    """Whether a forward pass is a first prompt that any method could have run: none that drops tokens on the way, reads
    the prompt twice or in chunks, or sees hidden states; all layers compressed; nothing asked for but what comes next.
    """
    if not isinstance(cache, CompressedCache) or not all(isinstance(layer, CompressedLayer) for layer in cache.layers):
        return False
    if not cache.layers[0].is_first_prompt:
        return False
    if any(kwargs.get(name) for name in ("output_attentions", "output_hidden_states")):
        return False
    policy = cache.policy
    # attention_sums.py computes the attention itself: equal up to rounding, and here it shall be the same bit for bit.
    if policy.needs_sums and model.device.type == "cpu" and model.dtype == torch.float32:
        return False
    sees_more = policy.tokens is not None or policy.cluster.second_pass or policy.cluster.reads_hidden
    return not sees_more and policy.engine.prefill_chunk is None


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _now(device: torch.device) -> float:
    synchronise(device)
    return time.perf_counter()
