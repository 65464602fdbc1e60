"""The attention function of compressed models: the base implementation, and what compression adds.

It is registered with transformers as `kvcompress_<base>`, once per base implementation used. The state of the keys'
layer decides between three cases:

- prefill: nothing is stored yet. Attend to the whole prompt with the model's own mask; then compress and store it.
- continuation: a second prompt on a filled cache. Attend to the kept entries and, causally, to the new tokens; then
  compress and store the new ones.
- decode: one token, already appended to the kept entries. Ragged entries are read in place.

After the first prompt the layer builds the mask, since layers differ in length and the model builds one mask for
all. The model's is then asked only which new tokens see each other: some let those of an image do so in both
directions."""

import sys
from collections.abc import Callable
from functools import partial

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.layer import LayerKeys
from ..cache.phases import EVERY
from ..errors import KVCompressError
from ..kernels.attention_sums import attention_with_sums
from ..kernels.column_sums import Noted

PREFIX = "kvcompress_"
QUERIES = 1024  # under a mask at a time; with 128 to 1024 attention took as long as with all, and gave the same bits

# By the id of a decoder's config, while a session is entered: whether this thread is in a forward pass that started
# in the session.
connected: dict[int, Callable[[], bool]] = {}


def set_attention(config: PreTrainedConfig, name: str) -> None:
    """Set a config's attention implementation, but not those of the configs inside it, such as a vision tower's."""
    config._attn_implementation = {"": name}


def register(name: str, attention: Callable, base: str, mask: Callable | None = None) -> None:
    """Register an attention implementation under the masks of another, `base`, or under `mask(that one, ...)`."""
    AttentionInterface.register(name, attention)
    if base in ALL_MASK_ATTENTION_FUNCTIONS:
        masks = ALL_MASK_ATTENTION_FUNCTIONS[base]
        AttentionMaskInterface.register(name, partial(mask, masks) if mask else masks)


def register_attention(base: str) -> str:
    """Register the compressed form of the attention implementation `base` and return its name."""
    name = PREFIX + base
    register(name, partial(compressed_attention, base), base, prompt_mask)
    return name


def prompt_mask(base_mask: Callable, batch_size, q_length, kv_length, q_offset=0, local_size=None, **kwargs):
    """Return the base's mask for a prefill and for layers with sliding windows.

    Return None for decode steps and for later prompts that are simply causal, since the layer then builds the mask."""
    # With static shapes the offset is on the device; one query then is a decode step.
    is_later = q_length == 1 if isinstance(q_offset, torch.Tensor) else q_offset > 0
    if local_size is None and is_later and (q_length == 1 or kwargs.get("allow_is_causal_skip", True)):
        return None
    return base_mask(batch_size, q_length, kv_length, q_offset=q_offset, local_size=local_size, **kwargs)


def compressed_attention(
    base: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention contract.

    `query` is (batch, heads, queries, head_dim), `key` and `value` are (batch, kv_heads, keys, head_dim). Returns the
    output (batch, queries, heads, head_dim), and weights or None."""
    layer = getattr(key, "kv_layer", None)
    if layer is None:  # a layer that keeps transformers' own storage
        check_came_through(module)
        return run_base(base, module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4 and attention_mask.shape[1] > 1:
        raise KVCompressError(
            f"a {type(module).__name__} masks each head differently, and compression follows masks for all heads alike"
        )
    given, key = key, key.plain if isinstance(key, LayerKeys) else key
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if getattr(module, "layer_idx", layer.layer_idx) != layer.layer_idx:
        return attend_to_others(base, module, query, given, value, attention_mask, scaling=scaling, **kwargs)
    if isinstance(given, LayerKeys):
        given.use()
    if not layer.is_first_prompt:
        kwargs["scaling"] = scaling
        result = attend_to_kept(base, module, query, key, value, layer, given, attention_mask, **kwargs)
    elif layer.wants_sums and can_compute_sums(base, module, query, attention_mask, kwargs):
        output, sums = attention_with_sums(query, key, value, scaling)
        query.column_sums = Noted(key, scaling, sums)
        result = output, None
    else:
        result = run_base(base, module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    layer.after_attention(query, scaling, module)
    return result


def check_came_through(module: torch.nn.Module) -> None:
    """Raise KVCompressError in a forward pass that bypassed the session, without one of our caches."""
    if torch.compiler.is_compiling():
        return
    is_in_pass = connected.get(id(module.config))
    if is_in_pass is None:
        raise KVCompressError(
            "a model's config was copied inside compress(...) or attach(...), with kvcompress's attention in it: call "
            "set_attn_implementation of the model that has the copy"
        )
    if not is_in_pass():
        raise KVCompressError(
            "a forward pass bypassed kvcompress: inside compress(...) or attach(...), call the model itself "
            "(model(...) or model.generate(...)), not its forward or a part of it; if its generate calls a part's, as "
            "BLIP-2's does its language_model's, compress that part"
        )


def can_compute_sums(base: str, module: torch.nn.Module, query, mask, kwargs: dict) -> bool:
    """Whether a prompt's attention can be computed here together with its column sums.

    That is so where plain PyTorch computes the sums, on a CPU in fp32, for plain causal attention."""
    if base != "sdpa" or mask is not None or query.shape[2] == 1:
        return False
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_plain = is_causal and not kwargs.get("dropout") and has_plain_weights(kwargs)
    return is_plain and query.device.type == "cpu" and query.dtype == torch.float32 and not query.requires_grad


def attend_to_others(base: str, module: torch.nn.Module, query, given, value, mask, **kwargs):
    """Run the base implementation in a layer without its own keys, which gets those of an earlier layer in `given`.

    A model may leave out queries of a prompt whose outputs are not needed. `mask` is the model's; other arguments are
    as in `compressed_attention`."""
    if not isinstance(given, LayerKeys):
        raise KVCompressError("a model whose layers share keys cannot be compiled while its cache is compressed")
    key, queries = given.plain, query.shape[2]
    if given.is_first_prompt:
        if mask is None and 1 < queries < key.shape[2]:
            mask = torch.ones(queries, key.shape[2], dtype=torch.bool, device=key.device)
            mask = base_mask_format(base, mask.tril(key.shape[2] - queries)[None, None], query.dtype)
        return run_base(base, module, query, key, value, mask, **kwargs)
    if given.in_place:  # over the entries now stored
        return attend_to_kept(base, module, query, key, value, given.kv_layer, given, None, **kwargs)
    mask = None if given.mask is None else given.mask[:, :, -queries:]
    query, key = with_bias(query, key, given.kv_layer, kwargs["scaling"])
    return attend_under(base, module, query, key, value, mask, **kwargs)


def attend_to_kept(base: str, module: torch.nn.Module, query, key, value, layer, given, model_mask, **kwargs):
    """Run the base implementation over a layer's kept entries, under the layer's mask, which is then stored in `given`.

    `model_mask` is the model's; other arguments are as in `compressed_attention`."""
    query, key = with_bias(query, key, layer, kwargs["scaling"])
    if layer.decodes_in_place:
        if can_decode_in_place(base, query, kwargs):
            return layer.storage.decode(query, kwargs["scaling"]).transpose(1, 2), None
        key, value = layer.storage.read()
    queries = query.shape[2]
    # Layers without keys of their own attend under the whole mask later.
    if base == "sdpa" and queries > QUERIES and not getattr(module.config, "num_kv_shared_layers", 0):
        return attend_in_blocks(base, module, query, key, value, layer, model_mask, **kwargs)
    mask = with_new_tokens(layer.mask(queries), model_mask, queries)  # (batch, 1 or kv_heads, queries, keys)
    is_per_head = layer.has_fixed_shapes or (mask is not None and mask.shape[1] > 1)
    if base == "sdpa" and is_per_head and queries == 1 and not kwargs.get("dropout"):
        result = one_query_per_head(query, key, value, mask, kwargs["scaling"]), None
    else:
        result = attend_under(base, module, query, key, value, mask, **kwargs)
    if isinstance(given, LayerKeys):
        given.mask = mask
    return result


def attend_in_blocks(base: str, module: torch.nn.Module, query, key, value, layer, model_mask, **kwargs):
    """Like `attend_to_kept`, `QUERIES` queries at a time: no mask is as large as all queries times all keys."""
    queries, outputs = query.shape[2], []
    for first in range(0, queries, QUERIES):
        rows = slice(first, first + QUERIES)
        mask = with_new_tokens(layer.mask(queries, rows), model_mask, queries, rows)
        outputs.append(attend_under(base, module, query[:, :, rows], key, value, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def with_new_tokens(
    mask: torch.Tensor | None, model_mask: torch.Tensor | None, new: int, rows: slice = EVERY
) -> torch.Tensor | None:
    """Return a layer's mask in which the tokens of a later prompt also see those that the model's mask shows them.

    `mask` has the `rows` of `new` tokens, the model's those of all."""
    if mask is None or new == 1 or model_mask is None or model_mask.ndim != 4:
        return mask
    shown = model_mask[:, :, rows, -new:]
    shown = shown if shown.dtype == torch.bool else shown == 0
    return torch.cat([mask[..., :-new], mask[..., -new:] | shown], dim=-1)


def with_bias(query: torch.Tensor, key: torch.Tensor, layer, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys for a method that gives keys a bias: one more channel than the model's queries have."""
    if key.shape[3] == query.shape[3]:
        return query, key
    if layer.is_whole:  # no key has one; strides other than the model's would change the last bits of the products
        return query, key[..., : query.shape[3]].contiguous()
    return torch.nn.functional.pad(query, (0, 1), value=1 / scaling), key


def attend_under(base: str, module: torch.nn.Module, query, key, value, mask, **kwargs):
    """Run the base implementation under a mask for one or all KV heads.

    The mask is bool (batch, 1 or kv_heads, queries, keys) or None; other arguments are as in `compressed_attention`."""
    if "flash" in base and (more := key.shape[3] - value.shape[3]) > 0:  # it takes states of one size
        value = torch.nn.functional.pad(value, (0, more))
        return attend_under(base, module, query, key, value, mask, **kwargs)[0][..., :-more], None
    if mask is None or mask.shape[1] == 1:
        return run_base(base, module, query, key, value, base_mask_format(base, mask, query.dtype), **kwargs)
    batch, kv_heads = key.shape[:2]
    if "flash" not in base and base != "flex_attention":
        mask = mask.repeat_interleave(query.shape[1] // kv_heads, dim=1)
        return run_base(base, module, query, key, value, base_mask_format(base, mask, query.dtype), **kwargs)
    # Flash attention supports padding per sequence, not per head, and transformers' flex attention takes the first
    # head's mask for all: each KV head becomes its own sequence.
    query = query.reshape(batch * kv_heads, -1, *query.shape[2:])
    key, value = key.flatten(0, 1).unsqueeze(1), value.flatten(0, 1).unsqueeze(1)
    mask = base_mask_format(base, mask.flatten(0, 1).unsqueeze(1), query.dtype)
    # (batch * kv_heads, queries, groups, head_dim)
    output, _ = run_base(base, module, query, key, value, mask, **kwargs)
    return output.unflatten(0, (batch, kv_heads)).transpose(1, 2).flatten(2, 3), None


def can_decode_in_place(base: str, query: torch.Tensor, kwargs: dict) -> bool:
    """Whether entries can be attended to in place: plain attention without dropout, whose gradient nobody asks for.

    `eager` never does that, since it also returns the weights."""
    has_gradient = torch.is_grad_enabled() and query.requires_grad
    return base != "eager" and has_plain_weights(kwargs) and not has_gradient and not kwargs.get("dropout")


def has_plain_weights(kwargs: dict) -> bool:
    """Whether the attention weights are the plain softmax of the products."""
    return all(kwargs.get(name) is None for name in ("softcap", "s_aux", "position_bias"))


def one_query_per_head(query, key, value, mask, scaling: float) -> torch.Tensor:
    """Run a decode step with the query heads of each KV head as its queries; `mask` is (batch, 1 or kv_heads, 1, keys).

    Unlike transformers' masked path, this does not repeat keys and values."""
    packed = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # (batch, kv_heads, groups, head_dim)
    output = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(query.shape[0], 1, -1, value.shape[3])


def run_base(base: str, module: torch.nn.Module, *args, **kwargs):
    """Run the base implementation. `eager` is not registered, since each modelling file has its own."""
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)
    attend = ALL_ATTENTION_FUNCTIONS[base]
    if "flash" not in base:
        return attend(module, *args, **kwargs)
    config = module.config  # from which flash attention reads which kernels to use
    ours = config._attn_implementation
    set_attention(config, base)
    try:
        return attend(module, *args, **kwargs)
    finally:
        set_attention(config, ours)


def base_mask_format(base: str, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert the layer's bool mask (batch, 1 or heads, queries, keys) to the format of `base`."""
    if mask is None or base == "sdpa":
        return mask
    if "flash" in base:  # causal by itself, aligned to the right; only takes the padding of keys
        visible = mask[:, 0, -1]
        return None if visible.all() else visible
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
