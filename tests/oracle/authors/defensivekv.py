"""FFY0/DefensiveKV, a fork of kvpress. Its fused kernel is replaced by the plain function that it is tested against."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from . import presses
from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, prompts, run
from .states import states

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    plain = definitions(checkout / "kvpress/ops/vw_norm.py", "l1norm")["l1norm"]
    stand_ins = {
        "presses.base_press": SimpleNamespace(BasePress=object),
        "presses.scorer_press": SimpleNamespace(ScorerPress=object),
        "ops": ModuleType("kvpress.ops"),
        "ops.vw_norm": SimpleNamespace(vw_l1norm=plain),
    }
    theirs = presses.load(checkout, "efficient_defensivekv", "efficient_layer_defensivekv", stand_ins=stand_ins)
    by_head, by_layer = (theirs[f"Efficient{name}KVPress"] for name in ("Defensive", "LayerDefensive"))

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

    for name, prompt, budget in prompts():
        for label, press, preset, window in (
            ("defensivekv", by_head, {}, 32),
            ("defensivekv, window_size=8", by_head, {}, 8),
            ("defensivekv, preset=layer", by_layer, {"preset": "layer"}, 32),
            ("defensivekv, preset=layer, window_size=8", by_layer, {"preset": "layer"}, 8),
        ):
            if window < budget < prompt:
                made = press(compression_ratio=1 - (budget + 1e-3) / prompt, window_size=window)
                # Heads share a budget by default: said again, for `ours.share` to count ties over all heads.
                options = {**preset, "window_size": window, "head_budget": "adaptive"}
                yield Recording(label, "defensivekv", options, name, prompt, budget, keep(made, name, prompt))


if __name__ == "__main__":
    functions = "kvpress/presses: EfficientDefensiveKVPress, EfficientLayerDefensiveKVPress"
    run(recordings, "FFY0/DefensiveKV", functions)
