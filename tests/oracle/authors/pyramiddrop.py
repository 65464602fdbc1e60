"""Cooperx521/PyramidDrop: pdrop_rank_drop, which chooses at the end of each stage.

It takes the queries and keys of the layer that comes next; here that layer is given the weights of the one before, by
whose attention our method chooses.
"""

import math
from pathlib import Path
from types import SimpleNamespace

import torch

from .token_recording import Prompt, Recordings, TokenRecording, released, run, through

FILE, NAME = "llava/model/modeling_llama_pdrop.py", "LlamaModel.pdrop_rank_drop"
BEFORE, QUESTION, LAYERS, HEADS = 7, 9, 32, 2

ours = through


def causal_mask(_: torch.Tensor, shape: tuple[int, int], *__: object, **___: object) -> torch.Tensor:
    batch, tokens = shape
    return torch.full((batch, 1, tokens, tokens), -torch.inf).triu(1)


def layer(weights: tuple[torch.Tensor, torch.Tensor]) -> SimpleNamespace:
    """A decoder layer with these weights of queries and keys, which does not rotate them."""
    queries, keys = weights
    attention = SimpleNamespace(
        num_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=len(queries) // HEADS,
        q_proj=lambda hidden: hidden @ queries,
        k_proj=lambda hidden: hidden @ keys,
        v_proj=lambda hidden: hidden,
        rotary_emb=lambda values, seq_len: (None, None),
    )
    return SimpleNamespace(self_attn=attention, input_layernorm=lambda hidden: hidden)


def recordings(checkout: Path) -> Recordings:
    names = {"torch": torch, "nn": torch.nn, "math": math, "IGNORE_INDEX": -100}
    names["_prepare_4d_causal_attention_mask"] = causal_mask
    names["apply_rotary_pos_emb"] = lambda queries, keys, *_: (queries, keys)
    drop = released(checkout / FILE, NAME, names)
    cases = [(0.5, 576, 270, (8, 16, 24)), (0.4, 1000, 406, (8, 16, 24)), (0.5, 128, 46, (4, 12, 20))]
    for seed, (share, images, mean, steps) in enumerate(cases):
        drawn = {"seed": 100 * seed, "layers": LAYERS, "before": BEFORE, "images": images, "behind": QUESTION}
        prompt = Prompt.draw(**drawn)
        model = SimpleNamespace(
            config=SimpleNamespace(),
            training=False,
            layers={step: layer(prompt.weights[step - 1]) for step in steps},
            image_token_posi=[BEFORE],
            prompt_len=[BEFORE + QUESTION],
            image_tokens=[images],
            image_token_ratio_list=[1.0, share, share**2, share**3],
        )
        hidden, positions, states = prompt.hidden, torch.arange(prompt.hidden.shape[1])[None], []
        for stage, step in enumerate(steps):
            positions, _, hidden, _ = drop(model, stage, step, hidden, positions, None, None)
            states.append(hidden[0, BEFORE:-QUESTION])
        yield TokenRecording("pyramiddrop", "pyramiddrop", {"steps": steps}, drawn, mean, states)


if __name__ == "__main__":
    run(recordings, "Cooperx521/PyramidDrop", f"{FILE}: {NAME}")
