"""DuoAttention's gates: the mixed attention against masks, its gradient, the prompts, and what the gates are worth."""

import copy

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

import kvcompress
from kvcompress.__main__ import main
from kvcompress.calibration import files
from kvcompress.hooks.model import text_decoder
from kvcompress.train import duoattention
from kvcompress.train.watching import attention_by, computed_again
from tests.support.families import FAMILIES, MORE_FAMILIES

SHORT = {"shortest": 60, "longest": 120, "passkeys": 2, "words": 3, "sinks": 2, "recent": 8}
LAYERS, HEADS = 3, 2


def gates_of(value: float) -> dict[int, torch.Tensor]:
    return {index: torch.full((HEADS,), value, requires_grad=True) for index in range(LAYERS)}


def distance(run, gates, ids, answers=10) -> torch.Tensor:
    mixed = duoattention.MixedAttention(gates, 2, 8)
    with attention_by(run.decoder, mixed):
        return mixed.distance(run.decoder, ids, answers)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(8, 120, (1, 50), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block", [7, 1024])
@pytest.mark.parametrize(("sinks", "recent"), [(2, 8), (0, 1), (12, 5), (3, 100)])
def test_without_full_attention_heads_see_sinks_and_recent_tokens(run, ids, sinks, recent, block, monkeypatch):
    monkeypatch.setattr(duoattention, "BLOCK", block)
    row, column = torch.arange(50)[:, None], torch.arange(50)
    seen = (column <= row) & ((column < sinks) | (column > row - recent))
    with torch.no_grad():
        expected = run.decoder(ids, attention_mask=seen[None, None], use_cache=False).last_hidden_state
        mixed = duoattention.MixedAttention(gates_of(0.0), sinks, recent)
        with attention_by(run.decoder, mixed):
            mixed.distance(run.decoder, ids, 50)
            found = run.decoder(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_with_full_attention_alone_the_model_is_itself(run, ids):
    assert distance(run, gates_of(1.0), ids).item() < 1e-10
    assert distance(run, gates_of(0.0), ids).item() > 1e-3


def attended(layer, states: torch.Tensor, rotary: tuple, seen: torch.Tensor) -> torch.Tensor:
    """The heads' outputs in one layer, (heads, tokens, head_dim), where `seen` (tokens, tokens) says who sees whom."""
    attention, entering = layer.self_attn, layer.input_layernorm(states)
    query, key, value = (
        project(entering).unflatten(-1, (-1, 16)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    key, value = key[0].repeat_interleave(2, 0), value[0].repeat_interleave(2, 0)
    logits = query[0] @ key.mT / 4
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def test_heads_mix_the_models_own_outputs_with_their_attention_to_sinks_and_recent_tokens(run, ids):
    shares = torch.tensor([[0.2, 0.9], [0.5, 0.0], [1.0, 0.4]])
    row, column = torch.arange(50)[:, None], torch.arange(50)
    causal = column <= row
    near = causal & ((column < 2) | (column > row - 8))
    own = mixed = run.decoder.embed_tokens(ids)
    rotary = run.decoder.rotary_emb(own, torch.arange(50)[None])
    for layer, share in zip(run.decoder.layers, shares.repeat_interleave(2, 1), strict=True):
        full = attended(layer, own, rotary, causal)
        part = share[:, None, None]
        outputs = full, part * full + (1 - part) * attended(layer, mixed, rotary, near)
        after = []
        for states, output in zip((own, mixed), outputs, strict=True):
            states = states + layer.self_attn.o_proj(output.transpose(0, 1).flatten(1))
            after.append(states + layer.mlp(layer.post_attention_layernorm(states)))
        own, mixed = after
    expected = (run.decoder.norm(own) - run.decoder.norm(mixed))[0, -10:].square().mean()
    assert distance(run, dict(enumerate(shares)), ids).item() == pytest.approx(expected.item(), rel=1e-4)


def test_gradients_are_those_of_the_distance(run, ids):
    gates = gates_of(0.6)
    mixed = duoattention.MixedAttention(gates, 2, 8)
    with attention_by(run.decoder, mixed), computed_again(run.decoder):
        mixed.distance(run.decoder, ids, 10).backward()
    for index, gate in gates.items():
        for head in range(HEADS):
            sides = []
            for step in (0.02, -0.02):
                moved = gates_of(0.6)
                with torch.no_grad():
                    moved[index][head] += step
                sides.append(distance(run, moved, ids).item())
            assert gate.grad[head].item() == pytest.approx((sides[0] - sides[1]) / 0.04, rel=0.05, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gpt-neox"])
def test_what_is_inside_a_layer_is_not_kept_for_the_backward_pass(family, ids):
    """Also where the output projection of attention has another name."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    if family == "qwen2":
        decoder = text_decoder(copy.deepcopy(FAMILIES["qwen2"].build()))  # tests share it
    else:
        decoder = (
            GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=200, use_parallel_residual=False, **sizes))
            .eval()
            .requires_grad_(False)
            .gpt_neox
        )
    ran = []
    for layer in decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: ran.append(1))
    gates = {index: torch.ones(2 if family == "qwen2" else 4, requires_grad=True) for index in range(3)}
    with attention_by(decoder, mixed := duoattention.MixedAttention(gates, 2, 8)), computed_again(decoder):
        mixed.distance(decoder, ids, 10).backward()
    assert len(ran) == 3 * 3  # the model's own, the mixed model's, and again
    assert all(gate.grad is not None for gate in gates.values())


def test_a_layer_without_keys_of_its_own_is_mixed_by_the_gates_of_those_that_it_reads(ids):
    decoder = text_decoder(
        MORE_FAMILIES["gemma4-e2b"].build()
    )  # layers 3 and 5 have full attention, with the same keys

    def distance(gate: torch.Tensor) -> torch.Tensor:
        mixed = duoattention.MixedAttention(duoattention.with_readers(decoder.config, {3: gate}), 2, 8)
        with attention_by(decoder, mixed), computed_again(decoder):
            return mixed.distance(decoder, ids, 10)

    gate = torch.tensor([0.6, 0.6], requires_grad=True)
    gates = duoattention.with_readers(decoder.config, {1: gate * 2, 3: gate})
    assert gates.keys() == {1, 3, 5}
    assert gates[5] is gate
    with attention_by(decoder, mixed := duoattention.MixedAttention({3: gate, 5: gate}, 2, 8)), computed_again(decoder):
        mixed.distance(decoder, ids, 10).backward()
    for head in range(2):
        step = torch.zeros(2).index_fill(0, torch.tensor(head), 0.02)
        with torch.no_grad():
            slope = (distance(gate + step) - distance(gate - step)) / 0.04
        assert gate.grad[head].item() == pytest.approx(slope.item(), rel=0.05, abs=1e-5)


def test_a_prompt_asks_for_the_passkeys_in_its_text(run):
    prompts = duoattention.Passkeys(run, duoattention.Options(**SHORT))
    lengths = set()
    for step in range(duoattention.LENGTHS):
        ids, answers = prompts.of(step)
        words = run.tokenizer.decode(ids)
        context, asked = words[:-answers], words[-answers:]
        for question in asked.split("\n\n")[:-1]:
            assert question.split("Passkey:")[1] in context
        assert asked.count("Passkey:") == 2
        lengths.add(prompts.length(step))
        assert prompts.of(step) == (ids, answers)
    assert lengths == {60 + 60 * place // 49 for place in range(50)}
    assert prompts.of(0) != prompts.of(duoattention.LENGTHS)


def test_gates_are_highest_where_full_attention_counts(run, tiny, text, tmp_path, capsys):
    out = tmp_path / "duo.safetensors"
    options = [f"{name}={value}" for name, value in SHORT.items()]
    argv = ["train", "duoattention", tiny, *options, "steps=24", "rate=0.05", "penalty=0.5"]
    assert main([*argv, "--text", str(text), "--out", str(out), "--seed", "4"]) == 0
    assert "duoattention, gates from 24 steps; " in capsys.readouterr().out
    made = files.load(out)
    assert (made.prompts, made.seed, made.data, made.options) == (24, 4, "text: text.txt", {"sinks": 2, "recent": 8})
    learned = made.tensors["gates"]
    assert learned.shape == (LAYERS, HEADS)
    prompts = duoattention.Passkeys(run, duoattention.Options(**SHORT))
    costs = torch.zeros(LAYERS, HEADS)  # of taking one head's full attention away
    for step in range(1000, 1003):
        ids, answers = prompts.of(step)
        for layer in range(LAYERS):
            for head in range(HEADS):
                gates = gates_of(1.0)
                with torch.no_grad():
                    gates[layer][head] = 0
                    costs[layer, head] += distance(run, gates, torch.tensor([ids]), answers)
    order = torch.stack([costs.flatten(), learned.flatten()]).argsort(1).argsort(1).float()
    assert torch.corrcoef(order)[0, 1] > 0.6, (costs, learned)
    inputs = torch.tensor([ids])
    with kvcompress.compress(run.model, "duoattention", 0.4, calibration=str(out), sinks=2, recent=8) as session:
        run.model.generate(inputs, max_new_tokens=2)
    kept = [len(head) for layer in range(LAYERS) for head in session.cache.kept_indices(layer)[0]]
    assert kept[learned.flatten().argmax()] == max(kept) > min(kept)


def test_a_text_shorter_than_what_every_head_sees_is_one_line(run):
    with pytest.raises(kvcompress.KVCompressError, match=r"no prompt has more than sinks \+ recent = 90000 tokens"):
        duoattention.train(run, duoattention.Options(**{**SHORT, "sinks": 80000, "recent": 10000}))
