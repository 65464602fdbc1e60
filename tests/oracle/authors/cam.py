"""zyxxmu/cam (CaM's authors): what the attention of its generation runs (cam_hf/utils_hh) keeps, and what its cache
for streams (generate_task/streaming_llm) keeps and merges."""

import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from kvcompress.scoring.layer_view import uniform_noise

from .ours import IMAGE
from .recording import Recording, kept_columns
from .script import Recordings, prompts, run
from .states import DECODED, States, states

STEPS = 24  # of the stream, behind a prompt that fills the cache
STREAMS = (("random_mha", 24), ("random_mha", 36))

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    sys.path[:0] = [str(checkout / "cam_hf/utils_hh"), str(checkout / "generate_task/streaming_llm")]
    import modify_llama_cam as theirs
    from kv_cache_cam import StartRecentKVCache_cam

    for name, prompt, budget in prompts():
        if budget < 4:
            continue  # of a recent window of less than two tokens they index what is not there
        for decoded in (0, DECODED):
            kept = generated(theirs, states(name), prompt, decoded, budget)
            options = {"decode_budget": budget} if decoded else {}
            yield Recording("cam", "cam", options, name, prompt, budget, kept, decoded)
    for name, budget in STREAMS:
        kept, values = streamed(StartRecentKVCache_cam, states(name), budget)
        options = {"decode_budget": budget, "followers": 16}
        label = "cam, as a stream"
        yield Recording(label, "cam", options, name, budget, budget, kept, STEPS, values=values)


def halves(budget: int) -> tuple[int, int]:
    """First and recent tokens."""
    return budget - budget // 2, budget // 2


def generated(theirs: object, given: States, prompt: int, decoded: int, budget: int) -> torch.Tensor:
    """bool (layers, kv_heads, tokens): what the mask for the next step lets it see. Their window counts the token to
    come, so that it is one more than what is stored."""
    first, recent = halves(budget)
    repeated, kept = given.repeated(), []
    for place in range(given.layers):
        heads, head_dim = given.queries.shape[1], given.queries.shape[3]
        attention = SimpleNamespace(
            num_heads=heads,
            head_dim=head_dim,
            hidden_size=heads * head_dim,
            start_budget_ratio=(first + 0.5) / prompt,
            recent_budget_ratio=(recent + 1.5) / prompt,
            rotary_emb=lambda values, seq_len: (None, None),
            o_proj=torch.nn.Identity(),
            cache_budget_records=[],
            input_length=[],
            attention_masks_next=None,
            previous_scores=None,
        )
        past, pieces = None, [slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, prompt + decoded))]
        for tokens in pieces:
            projected = [x.transpose(1, 2).flatten(2) for x in repeated.layer(place, tokens)]
            attention.q_proj, attention.k_proj, attention.v_proj = (lambda hidden, x=x: x for x in projected)
            mask = None
            if tokens.start == 0:
                unseen = torch.full((prompt, prompt), torch.finfo(torch.float32).min).triu(1)
                mask = unseen[None, None]
            with mock.patch.object(theirs, "apply_rotary_pos_emb", lambda q, k, *angles: (q, k)):
                _, _, past = theirs.LlamaAttention_cam.forward(
                    attention, projected[0], mask, past_key_value=past, use_cache=True
                )
        seen = attention.attention_masks_next[0, :, 0, : prompt + decoded] > 0
        if budget >= prompt + decoded:
            seen = torch.ones_like(seen)  # they let nothing be seen that fits
        kept.append(seen[:: given.groups])
    return torch.stack(kept)


def streamed(cache_class: type, given: States, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept columns and values, of a stream that is fed token by token. Their draws are ours, for the comparison
    of values."""
    first, recent = halves(budget)
    tokens = budget + STEPS
    ids = torch.ones(budget, dtype=torch.long)
    ids[slice(*given.vision)] = IMAGE
    seed = zlib.crc32(ids.numpy().tobytes())
    kept, merged = [], []
    for place in range(given.layers):
        cache, past = cache_class(first, recent), None
        queries, keys, values = given.layer(place, slice(0, tokens))
        for token in range(tokens):
            new = tuple(x[:, :, token : token + 1].clone() for x in (keys, values))
            past = new if past is None else tuple(torch.cat(pair, 2) for pair in zip(past, new, strict=True))
            logits = queries[:, :, token : token + 1] @ past[0].mT * keys.shape[-1] ** -0.5
            view = SimpleNamespace(lengths=[budget + 1], tokens=(token + 1,), place=place, row_seeds=(seed,))
            draws = uniform_noise(view, keys[:, :, : budget + 1], "cam")[:, :, first, None]

            def bernoulli(chance: torch.Tensor, draws: torch.Tensor = draws) -> torch.Tensor:
                return (draws < chance).float()

            with mock.patch("torch.bernoulli", bernoulli):
                past = cache(logits.softmax(-1), past)
        kept.append(kept_columns(past[0][0], keys[0]))
        merged.append(past[1][0])
    return torch.stack(kept), torch.stack(merged)


if __name__ == "__main__":
    functions = (
        "cam_hf/utils_hh/modify_llama_cam.py: LlamaAttention_cam.forward; "
        "generate_task/streaming_llm/kv_cache_cam.py: StartRecentKVCache_cam"
    )
    run(recordings, "zyxxmu/cam", functions)
