"""One prompt pass, any number of compressions: record what the attention of each layer is handed, compress it later.

A prompt pass costs the same whatever is kept of it, and a selection method only looks at it. So it runs once, and
each policy replays it into a cache of its own, from where only the answer is computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvcompress
from kvcompress.hook import text_decoder
from kvcompress.rotary import Rotary, watch_rotary

PER_TOKEN = ("input_ids", "attention_mask")
States = list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, float]]


class Recording:
    """A prompt pass of a batch, without any compression.

    Attributes:
        states: per layer the attention module, queries (batch, heads, columns, head_dim), keys and values
            (batch, kv_heads, columns, head_dim), scaling.
        rotary: how the queries and keys of the pass are rotated.
        inputs: `input_ids` and `attention_mask`, both (batch, columns).
        first: LongTensor (batch, 1), the answer's first token on the full cache.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor]):
        self.model = model
        self.inputs = {name: inputs[name] for name in PER_TOKEN}
        with _recording(model) as (self.states, rotaries):
            # Not the model's own forward: `generate` counts the positions of a padded row.
            self.first = model.generate(**inputs, max_new_tokens=1, do_sample=False, use_cache=False)[:, -1:]
        (self.rotary,) = rotaries

    @torch.no_grad()
    def cache(self, method: str, ratio: float | None, **options: object) -> kvcompress.CompressedCache:
        """The cache as the policy leaves it after the prompt."""
        cache = kvcompress.CompressedCache(self.model.config, method, ratio, **options)
        cache.start(*self.inputs["input_ids"].shape, self.inputs["input_ids"], self.inputs["attention_mask"])
        cache.rotate(self.rotary)
        for module, queries, keys, values, scaling in self.states:
            cache.update(keys, values, module.layer_idx)
            cache.layers[module.layer_idx].after_attention(queries, scaling, module)
        cache.finish()
        return cache

    def generate(self, cache: kvcompress.CompressedCache, new: int) -> torch.Tensor:
        """`new` greedy tokens (batch, new) from a cache that `cache` returned, as `generate` gives them inside
        `kvcompress.compress(...)`."""
        ids, mask = self.inputs["input_ids"], self.inputs["attention_mask"]
        columns = ids.shape[1]
        if cache.policy.engine.first_token == "compressed":
            cache.forget_last()
        elif new == 1:
            return self.first
        else:
            ids, mask = torch.cat([ids, self.first], 1), torch.nn.functional.pad(mask, (0, 1), value=1)
        with kvcompress.attach(self.model):
            ids = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=columns + new - ids.shape[1],
                do_sample=False,
            )
        return ids[:, columns:]


@contextmanager
def _recording(model: PreTrainedModel) -> Iterator[tuple[States, list[Rotary]]]:
    """Inside, the text model's attention is torch's own, and what it is given is noted in the two lists."""
    decoder, attend = text_decoder(model), ALL_ATTENTION_FUNCTIONS["sdpa"]
    states: States = []
    rotaries: list[Rotary] = []

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        states.append((module, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling))
        return attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register("recording", attention)
    AttentionMaskInterface.register("recording", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = "recording"
    handles = watch_rotary(decoder, rotaries.append)
    try:
        yield states, rotaries
    finally:
        decoder.config._attn_implementation = before
        for handle in handles:
            handle.remove()
