"""One prefill for several methods: each layer's attention inputs are recorded and compressed again.

A prefill's result does not depend on which entries are kept, so it needs to run only once. Every further generation
with the same prompt feeds the recorded states to its own cache, layer by layer, and then decodes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..cache.cache import CompressedCache
from ..cache.layer import CompressedLayer
from ..cache.scope import States
from ..cache_name import CACHE, NAMES, cache_in
from ..device import device_of, now
from ..errors import KVCompressError
from ..policy.policy import Policy
from ..scoring.rotary import Rotary
from .hidden_states import watch_inputs
from .model import text_decoder, unwrapped
from .positions import rope_deltas, set_rope_deltas
from .replacement import wrapped
from .rotary import watch_rotary
from .second_pass import Results, SecondPass
from .second_reading import DecoderInputs


@dataclass(frozen=True)
class Attended:
    """The recorded inputs of one layer's attention, in CPU memory.

    Attributes:
        states: queries, keys and values, as in `States`.
        device: the device that they were on.
        hidden: the hidden states that entered the layer, (batch, columns, hidden_size), if the method of the recorded
            generation reads them.
    """

    layer_idx: int
    module: torch.nn.Module
    scaling: float
    device: torch.device
    states: list[torch.Tensor]
    hidden: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in (*self.states, self.hidden) if state is not None)


@dataclass(frozen=True)
class PromptPass:
    """A recorded prefill.

    Attributes:
        inputs: the inputs that identify the batch, in CPU memory: all tensors, and `logits_to_keep`.
        layers: the layers' attention inputs, in order.
        decoder_inputs: the text decoder's inputs, in CPU memory.
        rotary: the rotation of the queries; None if it is unknown, in which case no method needs it.
        output: the model's output, with the logits of the next token.
        rope_deltas: the position offset of a model with its own image positions (Qwen2-VL), otherwise None.
        seconds: seconds of the model's own work, without compression.
        second_passes: what methods found that read the prompt twice or answered it first.
    """

    inputs: dict[str, Any]
    layers: list[Attended]
    decoder_inputs: DecoderInputs
    rotary: Rotary | None
    output: ModelOutput
    rope_deltas: torch.Tensor | None
    seconds: float
    second_passes: Results = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.decoder_inputs.nbytes + sum(layer.nbytes for layer in self.layers)

    def is_of(self, inputs: dict[str, Any]) -> bool:
        names = self.inputs.keys() | inputs.keys()
        return all(_is_equal(self.inputs.get(name), inputs.get(name)) for name in names)

    def serves(self, policy: Policy) -> bool:
        """Whether it holds what the policy's method reads."""
        return not policy.cluster.reads_hidden or all(layer.hidden is not None for layer in self.layers)


class SharedPrompt:
    """Shares the prefill of one generation with others that have the same prompt, text and images.

    ```python
    known = None
    for method in ("snapkv", "knorm"):
        with SharedPrompt(model, known) as shared, kvcompress.compress(model, method, 0.2):
            output = model.generate(**inputs)
        known = shared.prompt_pass
    ```

    Tokens and kept sets are the same as if the generation ran the prefill itself. The prefill does run if a method
    changes it (see `is_shareable`), for a batch with other inputs, and for the first method that reads hidden states. A
    method that reads the prompt twice or answers it first does so once for all its budgets.

    Attributes:
        prompt_pass: the generation's prefill; None if it cannot be shared or has more bytes than `room`.
        is_known: whether the prefill was reused instead of run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        known: PromptPass | None = None,
        room: float = math.inf,
        elsewhere_s: Callable[[], float] = lambda: 0.0,
    ):
        """Prepare to share a prefill.

        Args:
            known: an earlier prefill to reuse.
            room: the most bytes that a recorded prefill may have.
            elsewhere_s: returns the seconds so far of work that does not count as the prefill's, such as a vision
                tower's.
        """
        self.model = unwrapped(model)
        self.known, self.room, self.elsewhere_s = known, room, elsewhere_s
        self.prompt_pass: PromptPass | None = None
        self.is_known, self._correction_s = False, 0.0
        self._second_pass: SecondPass | None = None

    @property
    def correction_s(self) -> float:
        """Seconds to add to the generation's time to get that of a generation that runs the prefill and records
        nothing."""
        return self._correction_s + (0.0 if self._second_pass is None else self._second_pass.saved_s)

    def __enter__(self) -> "SharedPrompt":
        self._replaced = wrapped(self.model, "forward", self._prompt_forward)
        return self

    def __exit__(self, *exception: object) -> None:
        self._replaced.remove()

    def _prompt_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._replaced.remove()  # decoding, which may be compiled, does not pass through here
        cache = cache_in(kwargs)  # a session passes everything by name
        is_wanted = self.known is not None or self.room > 0
        if not is_wanted or not is_shareable(self.model, cache, kwargs):
            return forward(*args, **kwargs)
        device = device_of(self.model)
        start = now(device)
        inputs = _fetched(kwargs)
        is_known = self.known is not None and self.known.is_of(inputs) and self.known.serves(cache.policy)
        comparing_s = now(device) - start
        if is_known:
            self.prompt_pass, self.is_known = self.known, True
            return self._replay(cache, comparing_s)
        return self._record(forward, cache, inputs, kwargs, comparing_s)

    def _record(
        self,
        forward: Callable[..., Any],
        cache: CompressedCache,
        inputs: dict[str, Any],
        kwargs: dict[str, Any],
        comparing_s: float,
    ) -> Any:
        rotaries: list[Rotary] = []
        decoder, hidden = text_decoder(self.model), {}
        try:
            handles = watch_rotary(decoder, rotaries.append)
        except KVCompressError:  # unknown: no method that needs it gets here
            handles = []
        found: list[DecoderInputs] = []
        handles.append(DecoderInputs.watch(decoder, found.append))
        if cache.policy.cluster.reads_hidden:
            handles += watch_inputs(decoder, hidden.__setitem__)
        recorders = [_LayerRecorder(layer, self.room / len(cache.layers), hidden) for layer in cache.layers]
        elsewhere_s, start = self.elsewhere_s(), now(device_of(self.model))
        try:
            output = forward(**kwargs)
        finally:
            for handle in [*handles, *recorders]:
                handle.remove()
        self._correction_s = -comparing_s - sum(recorder.recording_s for recorder in recorders)
        # The decoder saw only the end of a resumed prompt: the prefix cache has the rest.
        is_whole = found and not cache.resumed_at and all(recorder.attended for recorder in recorders)
        if is_whole and isinstance(output, ModelOutput):
            seconds = now(device_of(self.model)) - start - (self.elsewhere_s() - elsewhere_s)
            seconds -= sum(recorder.recording_s + recorder.compressing_s for recorder in recorders)
            recorded = PromptPass(
                inputs,
                [recorder.attended for recorder in recorders],
                found[0].to("cpu"),
                rotaries[0] if rotaries else None,
                type(output)(logits=output.logits),
                rope_deltas(self.model),
                seconds,
            )
            if self.known is not None and self.known.is_of(inputs):  # it lacks hidden states, whose reader took longer
                recorded = replace(recorded, seconds=self.known.seconds, second_passes=self.known.second_passes)
            if recorded.nbytes <= self.room:
                self.prompt_pass = recorded
                self._share_second_pass(cache)
        return output

    def _share_second_pass(self, cache: CompressedCache) -> None:
        if not cache.policy.cluster.second_pass:
            return
        inputs = self.prompt_pass.decoder_inputs.to(device_of(self.model))
        self._second_pass = cache.second_pass = SecondPass(inputs, self.prompt_pass.second_passes)

    def _replay(self, cache: CompressedCache, loading_s: float) -> ModelOutput:
        known = self.known
        if (positions := known.decoder_inputs.position_ids) is not None:
            cache.last_position = positions[..., -1:].to(device_of(self.model))
        if known.rotary is not None:
            cache.rotate(known.rotary)
        set_rope_deltas(self.model, known.rope_deltas)
        for layer in known.layers:
            start = now(layer.device)
            query, key, value = (state.to(layer.device) for state in layer.states)
            hidden = layer.hidden.to(layer.device) if cache.policy.cluster.reads_hidden else None
            loading_s += now(layer.device) - start
            if hidden is not None:
                features = cache.policy.cluster.hidden_features(hidden, layer.layer_idx)
                cache.layers[layer.layer_idx].set_features(features)
            cache.update(key, value, layer.layer_idx)
            cache.layers[layer.layer_idx].after_attention(query, layer.scaling, layer.module)
        self._correction_s = known.seconds - loading_s
        self._share_second_pass(cache)
        return type(known.output)(logits=known.output.logits, **{CACHE: cache})


class _LayerRecorder:
    """Records one layer's attention inputs, if they have at most `room` bytes, and times its compression.

    `hidden`: the hidden states that entered each layer, by its index, which are taken out."""

    def __init__(self, layer: CompressedLayer, room: float, hidden: dict[int, torch.Tensor]):
        self.attended: Attended | None = None
        self.recording_s = self.compressing_s = 0.0
        self._layer_idx, self._room, self._hidden = layer.layer_idx, room, hidden
        self.remove = layer.listen(self._listen).remove

    def _listen(self, states: States, compress: Callable[[], None]) -> None:
        tensors, hidden = (states.queries, states.keys, states.values), self._hidden.pop(self._layer_idx, None)
        if sum(tensor.nbytes for tensor in (*tensors, hidden) if tensor is not None) > self._room:
            compress()  # untimed: timing would make the device wait at every layer
            return
        device = states.queries.device
        start = now(device)
        *own, hidden = (None if tensor is None else tensor.detach().cpu() for tensor in (*tensors, hidden))
        self.attended = Attended(self._layer_idx, states.module, states.scaling, device, own, hidden)
        recorded_at = now(device)
        compress()
        self.recording_s, self.compressing_s = recorded_at - start, now(device) - recorded_at


def is_shareable(model: PreTrainedModel, cache: object, kwargs: dict[str, Any]) -> bool:
    """Return whether a forward pass is a first prompt whose prefill other methods can share.

    The method must not drop tokens on the way or read the prompt in parts. All layers must be compressed, and only the
    next token's logits may be asked for.
    """
    if not isinstance(cache, CompressedCache) or not all(isinstance(layer, CompressedLayer) for layer in cache.layers):
        return False
    if not cache.layers[0].is_first_prompt:
        return False
    if any(kwargs.get(name) for name in ("output_attentions", "output_hidden_states")):
        return False
    policy = cache.policy
    # attention_sums.py computes the attention itself, equal up to rounding; here it must be equal bit for bit.
    in_fp32 = model.device.type == "cpu" and model.dtype == torch.float32
    if policy.sums_attention and in_fp32 and cache.announced.padding is None:
        return False
    return policy.tokens is None and policy.engine.prefill_chunk is None and policy.engine.scope != "context-first"


def _fetched(kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Return the inputs of a forward pass that its result depends on, in CPU memory."""
    inputs = {name: tree_leaves(value) for name, value in kwargs.items() if name not in NAMES}  # some are nested
    tensors = {
        (name, place): leaf.detach().cpu()
        for name, leaves in inputs.items()
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    }
    return {**tensors, "logits_to_keep": kwargs.get("logits_to_keep")}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other
