"""pkunlp-icler/FastV: the forward pass of its LLaMA, which drops tokens in place."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from .token_recording import Prompt, Recordings, TokenRecording, released, run, through

FILE = "src/transformers/src/transformers/models/llama/modeling_llama.py"
SYSTEM, IMAGES, QUESTION, LAYERS = 7, 96, 9, 5

ours = through


def recordings(checkout: Path) -> Recordings:
    names = {"torch": torch, "BaseModelOutputWithPast": SimpleNamespace}
    forward = released(checkout / FILE, "LlamaModel.forward", names)
    for seed, (layer, budget) in enumerate([(2, 48), (2, 24), (1, 10), (3, 95)]):
        drawn = {"seed": 10 * seed, "layers": LAYERS, "before": SYSTEM, "images": IMAGES, "behind": QUESTION}
        prompt = Prompt.draw(**drawn)
        model = SimpleNamespace(
            config=SimpleNamespace(output_attentions=True, output_hidden_states=False, use_return_dict=True),
            layers=[partial(layer_pass, prompt, place) for place in range(LAYERS)],
            _prepare_decoder_attention_mask=lambda *_: None,
            norm=lambda hidden: hidden,
            gradient_checkpointing=False,
            use_fast_v=True,
            fast_v_inplace=True,
            fast_v_sys_length=SYSTEM,
            fast_v_image_token_length=IMAGES,
            fast_v_attention_rank=budget,
            fast_v_agg_layer=layer,
        )
        hidden = forward(model, inputs_embeds=prompt.hidden, use_cache=False).last_hidden_state
        states = [hidden[0, SYSTEM:-QUESTION]]
        yield TokenRecording("fastv", "fastv", {"layer": layer}, drawn, budget, states)


def layer_pass(prompt: Prompt, layer: int, hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's hidden states, and its causal attention weights (1, heads, tokens, tokens)."""
    queries, keys = prompt.queries_and_keys(layer, hidden)
    logits = queries @ keys.transpose(2, 3) * keys.shape[-1] ** -0.5
    return hidden, logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf).softmax(-1)


if __name__ == "__main__":
    run(recordings, "pkunlp-icler/FastV", f"{FILE}: LlamaModel.forward")
