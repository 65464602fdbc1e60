"""FFY0/DefensiveKV, a fork of kvpress. Its fused kernel is replaced by the plain function that it is tested against."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .recording import Recording, kept_columns, save
from .released import definitions
from .states import NAMES, cases, states

DIFFERENCES: dict[str, tuple[float, str]] = {}


def main() -> None:
    checkout = Path(sys.argv[1])
    for name in ("kvpress", "kvpress.presses"):  # its own __init__ wants other libraries
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    for name, part in (("base", "BasePress"), ("scorer", "ScorerPress")):
        sys.modules[f"kvpress.presses.{name}_press"] = SimpleNamespace(**{part: object})
    plain = definitions(checkout / "kvpress/ops/vw_norm.py", "l1norm")["l1norm"]
    sys.modules["kvpress.ops.vw_norm"] = SimpleNamespace(vw_l1norm=plain)
    sys.modules["kvpress.ops"] = ModuleType("kvpress.ops")
    by_head = import_module("kvpress.presses.efficient_defensivekv_press").EfficientDefensiveKVPress
    by_layer = import_module("kvpress.presses.efficient_layer_defensivekv_press").EfficientLayerDefensiveKVPress

    def keep(press: object, name: str, prompt: int) -> torch.Tensor:
        given = states(name)
        heads, kv_heads, head_dim = given.queries.shape[1], given.keys.shape[1], given.keys.shape[3]
        flat = [
            [x[place, :, :prompt].flatten(0, 1) for place in range(given.layers)] for x in (given.keys, given.values)
        ]
        lens = {}

        def metadata(place: int) -> SimpleNamespace:
            def update(head_lens: torch.Tensor, *_: object) -> None:
                lens[place] = head_lens.tolist()

            return SimpleNamespace(
                bsz=1,
                num_key_value_heads=kv_heads,
                head_lens=[prompt] * kv_heads,
                _update_metadata_while_compressing=update,
            )

        cache = SimpleNamespace(
            metadata_list=[metadata(place) for place in range(given.layers)],
            layer_scores=[],
            key_cache=flat[0],
            value_cache=flat[1],
        )
        for place in range(given.layers):
            queries = given.queries[place : place + 1, :, :prompt].transpose(1, 2).flatten(2)
            module = SimpleNamespace(
                config=SimpleNamespace(
                    num_attention_heads=heads,
                    num_key_value_heads=kv_heads,
                    num_hidden_layers=given.layers,
                    hidden_size=heads * head_dim,
                ),
                head_dim=head_dim,
                num_key_value_groups=given.groups,
                layer_idx=place,
                q_proj=lambda hidden: hidden,  # queries, rotated already: they are given cos 1 and sin 0
                o_proj=SimpleNamespace(weight=given.o_proj[place]),
            )
            rotation = (torch.ones(1, prompt, head_dim), torch.zeros(1, prompt, head_dim))
            arguments = {"position_embeddings": rotation, "past_key_values": cache}
            among = (cache.key_cache[place], cache.value_cache[place])
            cache.key_cache[place], _ = press.compress(module, queries, *among, None, arguments)
        kept = []
        for place in range(given.layers):
            of_heads = cache.key_cache[place].split(lens[place])
            among = given.keys[place, :, :prompt]
            kept.append(torch.cat([kept_columns(h[None], a[None]) for h, a in zip(of_heads, among, strict=True)]))
        return torch.stack(kept)

    recordings = []
    for name in NAMES:
        for prompt, budget in cases(name):
            for label, press, preset, window in (
                ("defensivekv", by_head, {}, 32),
                ("defensivekv, window_size=8", by_head, {}, 8),
                ("defensivekv, preset=layer", by_layer, {"preset": "layer"}, 32),
                ("defensivekv, preset=layer, window_size=8", by_layer, {"preset": "layer"}, 8),
            ):
                if budget <= window or budget >= prompt:
                    continue
                made = press(compression_ratio=1 - (budget + 1e-3) / prompt, window_size=window)
                # Heads share a budget by default: said again, for `ours.share` to count ties over all heads.
                options = {**preset, "window_size": window, "head_budget": "adaptive"}
                kept = keep(made, name, prompt)
                recordings.append(Recording(label, "defensivekv", options, name, prompt, budget, kept))
    functions = "kvpress/presses: EfficientDefensiveKVPress, EfficientLayerDefensiveKVPress"
    save("defensivekv", recordings, "FFY0/DefensiveKV", checkout, functions)


if __name__ == "__main__":
    main()
