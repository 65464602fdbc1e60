"""DyCoke: what later frames do not repeat, and what a decode step looks at."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import kvcompress
from kvcompress.check.reference import attended, attending_by, generate
from tests.support.token_methods import TOLERANCE, kept_columns, video_batch


@contextmanager
def hiding_while_decoding(model: torch.nn.Module, first: int, drop: float, vision: torch.Tensor) -> Iterator[list[int]]:
    """Plain attention in which at decode steps the layers from `first` on see the best of the vision tokens (batch,
    columns) only, by the layer before; all of them where that one attends as at the step before. Yields how many rows
    were shown all at each step."""
    before, hidden, whole = None, None, []

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        nonlocal before, hidden
        columns, is_step = key.shape[2], query.shape[2] == 1
        if attention_mask is None:
            visible = torch.ones(query.shape[2], columns, dtype=torch.bool).tril(columns - query.shape[2])
        else:
            itself = torch.eye(query.shape[2], columns, dtype=torch.bool)  # pads: no NaN
            visible = attention_mask | itself if query.shape[2] > 1 else attention_mask
        if is_step and module.layer_idx >= first:
            visible = visible.expand(len(query), 1, 1, columns) & ~hidden[:, None, None]
        output, weights = attended(query, key, value, visible, scaling)
        if is_step and module.layer_idx == first - 1:
            now = weights.mean(1)[:, 0].double()
            hidden = torch.zeros(len(query), columns, dtype=torch.bool)
            for row, shown in enumerate(vision):
                places = shown.nonzero()[:, 0]
                alike = 0.0 if before is None else torch.cosine_similarity(now[row, places], before[row, places], dim=0)
                if alike < 0.9:
                    best = now[row, places].topk(int(len(places) * (1 - drop))).indices.tolist()
                    hidden[row, [c for i, c in enumerate(places.tolist()) if i not in best]] = True
            before = now
            whole.append(int((~hidden.any(1)).sum()))
        return output, None

    with attending_by(model, attention):
        yield whole


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static", "max_new_tokens": 6}, {"cache_implementation": "offloaded"}],
    ids=["dynamic", "static", "offloaded"],
)
@pytest.mark.parametrize("sharpness", [0.05, 1.0], ids=["alike", "changing"])
def test_dycoke_hides_from_the_later_layers_what_a_step_s_token_does_not_look_at(options, sharpness, monkeypatch):
    model, inputs, _ = video_batch("qwen2-vl", [7, 5])
    queries = model.get_decoder().layers[1].self_attn.q_proj
    plain = queries.forward
    monkeypatch.setattr(queries, "forward", lambda states: sharpness * plain(states))
    with kvcompress.compress(model, "dycoke", 1.0, layer=2, decode_drop=0.6, **options) as session:
        tokens, logits = generate(model, inputs, 6)
    assert session.cache.realised_ratios() == [[1.0, 1.0]] * 4
    vision = inputs["mm_token_type_ids"].bool()
    with hiding_while_decoding(model, 2, 0.6, vision) as whole:
        _, expected = generate(model, inputs, 6, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert whole[0] == 0  # there is no step before it
    assert (min(whole[1:]) == 2) if sharpness < 1 else (sum(whole) < 3)


def test_dycoke_remembers_what_the_layer_before_its_own_attended_to():
    model, inputs, _ = video_batch("qwen2-vl", [7])
    with kvcompress.compress(model, "dycoke", 0.6, layer=2) as session:
        generate(model, inputs, 2)
    remembers = [layer.memory.attended is not None for layer in session.cache.compressed_layers]
    assert remembers == [False, True, False, False]


def test_dycoke_may_keep_every_fourth_frame_alone():
    model, inputs, _ = video_batch("qwen2-vl", [4])
    for variant, least in (("code", 0.5), ("paper", 0.25)):
        with kvcompress.compress(model, "dycoke", least, variant=variant) as session:
            generate(model, inputs, 1)
        assert len(kept_columns(session.cache)[0][0]) == inputs["input_ids"].shape[1] - 48 * (1 - least)
