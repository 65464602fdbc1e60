"""What kvpress keeps, recorded: makes `kvpress.npz`, which `test_kvpress.py` reads.

kvpress needs transformers below 5.3, so it lives in an environment of its own:

    python -m venv kvpress-env
    kvpress-env/bin/pip install kvpress==0.5.5
    kvpress-env/bin/python tests/oracle/make_kvpress_fixtures.py

Tiny random models run one prompt each; every press then compresses the same states, for several numbers of kept
entries. The file holds, for each prompt `<model>-<length>`:

    <prompt>/queries        float32 (layers, heads, length, head_dim), rotated
    <prompt>/keys, values   float32 (layers, kv_heads, length, head_dim), keys rotated
    <prompt>/o_proj         float32 (layers, hidden, heads * head_dim)
    <prompt>/inv_freq       float32 (head_dim / 2): column c is at position c
    <prompt>/<press>/<n>    the kept columns as bits: numpy.packbits of (layers, kv_heads, length) along the last
                            dimension; n: entries that the press was asked for, per layer and head
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from kvpress import (
    AdaKVPress,
    BasePress,
    CapPress,
    ChunkKVPress,
    CompactorPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    CURPress,
    ExpectedAttentionPress,
    FinchPress,
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    LeverageScorePress,
    NonCausalAttnPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.presses import leverage_press
from kvpress.utils import get_prerope_query_states
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 2, 16, 1536
KEPT = {301: [30, 61, 90, 150, 211], 150: [15, 41, 75], 203: [20, 49, 101], 1030: [103, 309, 515, 721]}
SINKS = 4

PRESSES = {
    "streamingllm": StreamingLLMPress,
    "knorm": KnormPress,
    "keydiff": KeyDiffPress,
    "tova": TOVAPress,
    "observed-attention": ObservedAttentionPress,
    "snapkv-8-5": lambda: SnapKVPress(window_size=8, kernel_size=5),
    "snapkv-16-7": lambda: SnapKVPress(window_size=16, kernel_size=7),
    "snapkv-64-5": SnapKVPress,
    "pyramidkv-64-5": PyramidKVPress,
    "pyramidkv-8-5": lambda: PyramidKVPress(window_size=8),
    "pyramidkv-8-5-beta-3": lambda: PyramidKVPress(window_size=8, beta=3),
    "lagkv-128": LagKVPress,
    "lagkv-64": lambda: LagKVPress(lag_size=64),
    "lagkv-16": lambda: LagKVPress(lag_size=16),
    "cur": CURPress,
    "cur-key": lambda: CURPress(leverage_type="key"),
    "cur-avg": lambda: CURPress(leverage_type="kv_avg", local_window_size=10),
    "cur-global": lambda: CURPress(use_local_approximation=False),
    "value-norm": lambda: CURPress(leverage_type="value", use_local_approximation=False, num_sinks=0),
    "expected-attention": ExpectedAttentionPress,
    "expected-attention-eps": lambda: ExpectedAttentionPress(epsilon=1e-2),
    "expected-attention-mean": lambda: ExpectedAttentionPress(use_covariance=False, n_future_positions=64),
    "capkv": CapPress,
    "leverage": LeverageScorePress,
    "non-causal": NonCausalAttnPress,
    "non-causal-64": lambda: NonCausalAttnPress(chunk_size=64),
    "compactor": CompactorPress,
    "finch-8": lambda: finch(8),
    "criticalkv-8-5": lambda: CriticalKVPress(SnapKVPress(window_size=8)),
    "chunkkv-8-5": lambda: ChunkKVPress(SnapKVPress(window_size=8)),
    "chunkkv-8-5-by-7": lambda: ChunkKVPress(SnapKVPress(window_size=8), chunk_length=7),
    "adakv-snapkv-8-5": lambda: AdaKVPress(SnapKVPress(window_size=8)),
    "adakv-snapkv-8-5-half": lambda: AdaKVPress(SnapKVPress(window_size=8), alpha_safeguard=0.5),
    "adakv-cur": lambda: AdaKVPress(CURPress()),
    "adakv-keydiff": lambda: AdaKVPress(KeyDiffPress()),
    "adakv-expected-attention-eps": lambda: AdaKVPress(ExpectedAttentionPress(epsilon=1e-2)),
    "critical-adakv-8-5-safe": lambda: CriticalAdaKVPress(SnapKVPress(window_size=8), alpha_safeguard=0.9),
    "critical-adakv-8-5": lambda: CriticalAdaKVPress(SnapKVPress(window_size=8)),
}


def finch(window: int) -> FinchPress:
    press = FinchPress(rerotate_keys=False)
    press.window_size = window  # it is the question's length, which the press finds by a delimiter
    return press


def draw_as_ours() -> None:
    """Give the leverage press, whose Gaussian is a new one at each call, the one that ours draws with seed 0."""

    def gaussian(*shape: int, **kwargs: object) -> torch.Tensor:
        return torch.randn(shape[-2:], generator=torch.Generator().manual_seed(0)).expand(shape)

    leverage_press.torch = SimpleNamespace(**{**vars(torch), "randn": gaussian})


def numbers_kept(press: BasePress, length: int) -> list[int]:
    """How many entries a press is asked to keep: numbers that cut no tie, since kvpress resolves ties at random.
    All tokens of an observation window are equal; with LagKV, those of the same rank in each partition."""
    if not isinstance(press, LagKVPress):
        return [n for n in KEPT[length] if n > getattr(press, "window_size", 0)]
    scored = (length - SINKS) // press.lag_size - 1  # partitions; the last one is a reference only
    ranks = (press.lag_size // 8, press.lag_size // 2, press.lag_size * 3 // 4)
    return [length - scored * press.lag_size + scored * rank for rank in ranks] if scored > 0 else []


@dataclass
class LayerInput:
    """What one attention layer was given, and what it made of it."""

    module: torch.nn.Module
    hidden: torch.Tensor
    kwargs: dict
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def attentions(self) -> torch.Tensor:
        """(1, heads, length, length), as eager attention returns them."""
        length, head_dim = self.keys.shape[2:]
        groups = self.queries.shape[1] // self.keys.shape[1]
        logits = self.queries @ self.keys.repeat_interleave(groups, 1).mT * head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return logits.masked_fill(future, float("-inf")).softmax(-1)


def make_model(name: str, layers: int) -> PreTrainedModel:
    """A random model whose attention is peaked: with the usual initialisation it is flat."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": HEADS * HEAD_DIM, "intermediate_size": 96, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)) if name == "qwen2" else LlamaForCausalLM(LlamaConfig(**sizes))
    for parameter_name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif parameter_name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.1)
        if parameter_name.endswith("q_proj.weight"):
            weight.data.mul_(3.0)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def run(model: PreTrainedModel, ids: torch.Tensor) -> list[LayerInput]:
    """One prompt (1, length) through the model: the inputs and states of each layer."""
    calls = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((module, kwargs)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    inputs = []
    for (module, kwargs), stored in zip(calls, cache.layers, strict=True):
        module.rotary_emb = model.model.rotary_emb  # as a press does when it is attached
        module.masked_key_indices = None
        queries = get_prerope_query_states(module, kwargs["hidden_states"])
        queries, _ = apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])
        inputs.append(LayerInput(module, kwargs["hidden_states"], kwargs, queries, stored.keys, stored.values))
    return inputs


@torch.no_grad()
def kept_columns(press: BasePress, layer: LayerInput) -> torch.Tensor:
    """bool (kv_heads, length): what the press keeps of one layer."""
    attentions = layer.attentions if isinstance(press, ObservedAttentionPress) else None
    keys, _ = press.compress(layer.module, layer.hidden, layer.keys, layer.values, attentions, layer.kwargs)
    return columns(layer, keys)


def columns(layer: LayerInput, keys: torch.Tensor) -> torch.Tensor:
    """bool (kv_heads, length): which columns `keys` (1, kv_heads, kept, head_dim) holds and no mask hides."""
    kept = torch.stack([torch.isin(*of_head) for of_head in zip(marks(layer.keys), marks(keys), strict=True)])
    if layer.module.masked_key_indices is not None:  # head-wise presses mask instead of removing
        _, heads, masked = layer.module.masked_key_indices
        kept[heads, masked] = False
        layer.module.masked_key_indices = None
    return kept


def marks(keys: torch.Tensor) -> torch.Tensor:
    """int64 (kv_heads, keys): a number for each key (1, kv_heads, keys, head_dim), by all its bits. All keys of a head
    differ, by their rotation."""
    weights = torch.randint(2**62, keys.shape[-1:], generator=torch.Generator().manual_seed(0))
    return (keys[0].contiguous().view(torch.int32).long() * weights).sum(-1)


def main() -> None:
    arrays = {}
    draw_as_ours()
    for name, layers, length in (("qwen2", 3, 301), ("qwen2", 3, 150), ("llama", 4, 203), ("qwen2", 2, 1030)):
        model = make_model(name, layers)
        inputs = run(model, torch.randperm(VOCAB, generator=torch.Generator().manual_seed(length))[None, :length])
        prompt = f"{name}-{length}"
        for states in ("queries", "keys", "values"):
            arrays[f"{prompt}/{states}"] = torch.cat([getattr(layer, states) for layer in inputs]).numpy()
        arrays[f"{prompt}/o_proj"] = torch.stack([layer.module.o_proj.weight for layer in inputs]).numpy()
        arrays[f"{prompt}/inv_freq"] = model.model.rotary_emb.inv_freq.numpy()
        for press_name, make_press in PRESSES.items():
            for n in numbers_kept(make_press(), length):
                press = make_press()
                press.compression_ratio = 1 - (n + 1e-6) / length  # kvpress keeps int((1 - ratio) * length)
                kept = torch.stack([kept_columns(press, layer) for layer in inputs])
                arrays[f"{prompt}/{press_name}/{n}"] = np.packbits(kept.numpy(), axis=-1)
    path = Path(__file__).with_name("kvpress.npz")
    np.savez(path, **arrays)
    print(f"{path}: {len(arrays)} arrays, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
