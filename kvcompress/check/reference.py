"""The reference for selection methods: the full model under a mask that hides exactly what was dropped.

It is plain fp32 attention with repeated KV heads and no code of kvcompress. Wrong positions, grouping, masks or gathers
in the compressed cache all show up as a difference in logits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessor, LogitsProcessorList
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "kvcompress_reference"
# [layer][row][kv_head] -> columns of the sequence; None for a layer that is not compressed
Kept = list[list[list[torch.Tensor]] | None]


@contextmanager
def only_attending_to(model: torch.nn.Module, kept: Kept | dict[int, Kept]) -> Iterator[None]:
    """Let a query see only the columns in `kept` of earlier passes; its own pass is causal or follows the model's mask.

    If entries are evicted while decoding, `kept` is a dictionary: columns seen before a pass -> those that were
    kept."""

    before_pass = {}  # layer with keys -> columns before this pass

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        source = keys_of(module)
        if not isinstance(kept, dict) and kept[source] is None:
            plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
            return plain(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        groups = query.shape[1] // key.shape[1]
        if source == module.layer_idx:
            before_pass[source] = key.shape[2] - query.shape[2]
        first = before_pass[source]
        new = key.shape[2] - first  # a layer without keys may have queries for only the last of them
        visible = torch.zeros(*key.shape[:3], dtype=torch.bool, device=key.device)
        now = kept[first] if isinstance(kept, dict) and first else kept
        for row, heads in enumerate(now[source] if first else []):
            for head, columns in enumerate(heads):
                visible[row, head, columns[columns < first].to(key.device)] = True
        visible = visible[:, :, None].repeat(1, 1, query.shape[2], 1)
        visible[..., first:] = torch.ones(new, new, device=key.device).tril().bool()[-query.shape[2] :]
        visible = visible.repeat_interleave(groups, 1)
        if attention_mask is not None:  # for a first prompt it is complete: Gemma 3's images see themselves both ways
            visible = visible & attention_mask if first else attention_mask.expand_as(visible).clone()
        visible[..., first:] |= torch.eye(new, dtype=torch.bool, device=key.device)[-query.shape[2] :]  # pads: no NaN
        return attended(query, key, value, visible, scaling)[0], None

    with attending_by(model, attention):
        yield


@contextmanager
def hidden_from(model: torch.nn.Module, kept: list[list[list[int]]]) -> Iterator[list[torch.Tensor]]:
    """Let a layer see, of all columns up to the last that is listed for it in `kept`, [layer][row], only those.

    Yields the attention weights of each layer that ran, (batch, heads, queries, columns)."""
    noted = []

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        columns, new = key.shape[2], query.shape[2]
        visible = torch.ones(new, columns, dtype=torch.bool).tril(columns - new)
        visible = visible.expand(len(query), 1, -1, -1).clone()
        if attention_mask is not None and new == columns:  # Molmo 2's images look at themselves both ways
            visible = attention_mask.expand_as(visible).clone()
        for row, listed in enumerate(kept[module.layer_idx]):
            hidden = sorted(set(range(columns)) - set(listed) - set(range(max(listed) + 1, columns)))
            visible[row, ..., hidden] = False
        visible[..., -new:] |= torch.eye(new, dtype=torch.bool)  # pads and dropped tokens: no NaN
        output, weights = attended(query, key, value, visible, scaling)
        noted.append(weights)
        return output, None

    with attending_by(model, attention):
        yield noted


@contextmanager
def attending_by(model: torch.nn.Module, attention: Callable[..., tuple]) -> Iterator[None]:
    """Let the model's attention be computed by a function with transformers' arguments, under sdpa's masks."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute plain attention under `visible`, bool (batch, 1 or heads, queries, keys).

    Returns the output (batch, queries, heads, head_dim) and the weights (batch, heads, queries, keys)."""
    groups = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), weights


def keys_of(module: torch.nn.Module) -> int:
    """Return the layer whose keys an attention uses: in Gemma 3n and 4 the last layers have no keys of their own."""
    config = module.config
    first = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    if module.layer_idx < first:
        return module.layer_idx
    kinds = config.layer_types
    return max(layer_idx for layer_idx in range(first) if kinds[layer_idx] == kinds[module.layer_idx])


class Force(LogitsProcessor):
    """Makes `generate` emit the given tokens (batch, new), whatever the logits."""

    def __init__(self, prompt_length: int, tokens: torch.Tensor):
        self.prompt_length, self.tokens = prompt_length, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.tokens[:, input_ids.shape[1] - self.prompt_length]
        return torch.full_like(scores, float("-inf")).scatter(1, token[:, None], 0.0)


def generate(
    model: torch.nn.Module, inputs: dict, new_tokens: int, forced: torch.Tensor | None = None, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate greedily or with forced tokens; return tokens (batch, new) and raw logits (batch, new, vocabulary)."""
    prompt = inputs["input_ids"].shape[1]
    if forced is not None:
        kwargs["logits_processor"] = LogitsProcessorList([Force(prompt, forced)])
    output = model.generate(
        **inputs,
        **kwargs,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[:, prompt:], torch.stack(output.logits, 1)
