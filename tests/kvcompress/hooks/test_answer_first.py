"""Hindsight: what the full cache's own answer needs, against the model's own attention weights."""

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.answers import attending_by
from tests.support.families import FAMILIES, MORE_FAMILIES
from tests.support.kept import kept_of_row

LENGTH, TOKENS = 40, 6


def of_answer(model, inputs: dict, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The full cache's greedy answer: of each layer the weights (heads, queries, prompt and answer) of the queries of
    the prompt's last token and of the answer's, and the values (kv_heads, keys, head_dim); the answer's ids."""
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in inputs:
            whole["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, tokens))
        with attending_by(model, "eager"):
            output = model(**whole, output_attentions=True, use_cache=True)
    first = inputs["input_ids"].shape[1] - 1
    values = [layer.values[0] for layer in output.past_key_values.layers if hasattr(layer, "values")]
    return [weights[0, :, first:] for weights in output.attentions], values, ids[0, first + 1 :]


@pytest.mark.parametrize("family", ["qwen2", "llama", "llava-onevision", "qwen2-vl", "gemma3", "qwen3.5"])
def test_hindsight_keeps_what_the_full_caches_answer_attends_to(family):
    chosen = (FAMILIES | MORE_FAMILIES)[family]
    model = chosen.build()
    inputs = chosen.inputs(model, [LENGTH], [1] if chosen.is_vlm else None)
    weights, _, answer = of_answer(model, inputs, TOKENS)
    with kvcompress.compress(model, "hindsight", 0.3, answer_tokens=TOKENS) as session:
        ids, _ = generate(model, inputs, 1)
    assert ids[0, -1] == answer[0]
    if family == "qwen3.5":  # its layers with linear attention have no weights
        weights = dict(zip((layer.layer_idx for layer in session.cache.compressed_layers), weights, strict=True))
    for layer in (layer.layer_idx for layer in session.cache.compressed_layers):
        received = weights[layer][..., :LENGTH].sum(1).unflatten(0, (2, -1)).mean(1)
        best = received.topk(12).indices.sort().values
        assert [head.tolist() for head in session.cache.kept_indices(layer)[0]] == best.tolist()


def test_by_output_it_keeps_what_moves_the_layers_output_most_when_left_out():
    model = FAMILIES["llama"].build()
    inputs = FAMILIES["llama"].inputs(model, [LENGTH])
    weights, values, _ = of_answer(model, inputs, TOKENS)
    with kvcompress.compress(model, "hindsight", 0.3, answer_tokens=TOKENS, by="output") as session:
        generate(model, inputs, 1)
    for layer, (of_layer, of_values) in enumerate(zip(weights, values, strict=True)):
        projection = model.model.layers[layer].self_attn.o_proj.weight.double()
        size = of_values.shape[2]
        error = torch.zeros(2, LENGTH, dtype=torch.double)
        for head, of_head in enumerate(of_layer.double()):
            part = projection[:, head * size : (head + 1) * size]
            value = of_values[head // 2].double()
            for column in range(LENGTH):
                without = of_head.clone()
                without[:, column] = 0
                moved = (without / without.sum(1, keepdim=True) - of_head) @ value @ part.T
                error[head // 2, column] += moved.square().sum()
        best = error.topk(12).indices.sort().values
        assert [head.tolist() for head in session.cache.kept_indices(layer)[0]] == best.tolist()


def test_an_answer_that_ends_is_scored_to_its_end_alone_and_in_a_batch(monkeypatch):
    """Behind its end a row has no vote, whatever the others still say."""
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [33, LENGTH])
    answers = [of_answer(model, FAMILIES["qwen2"].solo(inputs, row), TOKENS)[2].tolist() for row in range(2)]
    end = next(token for token in answers[0][1:] if token not in answers[1])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end])
    kept = []
    for given in (inputs, FAMILIES["qwen2"].solo(inputs, 0)):
        with kvcompress.compress(model, "hindsight", budget=12, answer_tokens=TOKENS) as session:
            model(**given)
        first = given["input_ids"].shape[1] - 33
        kept.append(kept_of_row(session.cache, 0, first))
    assert kept[0] == kept[1]
    until = answers[0].index(end)
    with kvcompress.compress(model, "hindsight", budget=12, answer_tokens=until) as session:
        model(**FAMILIES["qwen2"].solo(inputs, 0))
    assert kept[1] == kept_of_row(session.cache)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    with kvcompress.compress(model, "hindsight", budget=12, answer_tokens=TOKENS) as session:
        model(**FAMILIES["qwen2"].solo(inputs, 0))
    assert kept[1] != kept_of_row(session.cache)


def test_where_the_answer_ends_at_once_the_prompts_last_token_chooses(monkeypatch):
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [LENGTH])
    weights, _, answer = of_answer(model, inputs, TOKENS)
    monkeypatch.setattr(model.generation_config, "eos_token_id", int(answer[0]))
    with kvcompress.compress(model, "hindsight", budget=12, answer_tokens=TOKENS) as session:
        model(**inputs)
    for layer, of_layer in enumerate(weights):
        best = of_layer[:, 0, :LENGTH].unflatten(0, (2, -1)).mean(1).topk(12).indices.sort().values
        assert [head.tolist() for head in session.cache.kept_indices(layer)[0]] == best.tolist()


def test_the_answer_sees_the_question_behind_a_context_that_is_compressed_alone():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [LENGTH])
    weights, _, _ = of_answer(model, inputs, TOKENS)
    with kvcompress.compress(
        model, "hindsight", 0.25, answer_tokens=TOKENS, scope="context", context_tokens=32
    ) as session:
        generate(model, inputs, 1)
    for layer, of_layer in enumerate(weights):
        received = of_layer[..., :32].sum(1).unflatten(0, (2, -1)).mean(1)
        best = received.topk(8).indices.sort().values
        expected = [[*one, *range(32, LENGTH)] for one in best.tolist()]
        assert [head.tolist() for head in session.cache.kept_indices(layer)[0]] == expected


def test_nothing_of_the_answer_is_stored_and_the_first_token_is_the_full_caches():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [LENGTH])
    with kvcompress.compress(model, "hindsight", budget=12) as session:
        _, logits = generate(model, inputs, 1)
    _, full = generate(model, inputs, 1)
    assert torch.equal(logits, full)
    assert session.cache.seen_tokens == LENGTH
    assert all(layer.memory.stored == 12 for layer in session.cache.compressed_layers)


def test_a_second_prompt_is_answered_on_what_the_first_left():
    """The first is kept whole here, so that the answer is the full cache's."""
    model, more = FAMILIES["qwen2"].build(), 50
    first, second = (FAMILIES["qwen2"].inputs(model, [length])["input_ids"] for length in (LENGTH, more))
    both = {
        "input_ids": torch.cat([first, second], 1),
        "attention_mask": torch.ones(1, LENGTH + more, dtype=torch.long),
    }
    weights, _, _ = of_answer(model, both, TOKENS)
    with kvcompress.compress(model, "hindsight", budget=LENGTH, answer_tokens=TOKENS) as session, torch.no_grad():
        cache = model(first).past_key_values
        model(second, attention_mask=both["attention_mask"], past_key_values=cache)
    for layer, of_layer in enumerate(weights):
        received = of_layer[..., LENGTH : LENGTH + more].sum(1).unflatten(0, (2, -1)).mean(1)
        best = received.topk(LENGTH).indices.sort().values + LENGTH
        expected = [[*range(LENGTH), *one] for one in best.tolist()]
        assert [head.tolist() for head in session.cache.kept_indices(layer)[0]] == expected


def test_a_second_prompt_of_a_question_alone_has_no_scores_of_an_answer():
    model, options = FAMILIES["qwen2"].build(), {"answer_tokens": TOKENS, "scope": "context", "context_tokens": 30}
    with kvcompress.compress(model, "hindsight", budget=20, **options) as session, torch.no_grad():
        cache = model(FAMILIES["qwen2"].inputs(model, [LENGTH])["input_ids"]).past_key_values
        assert all(layer.memory.answer_scores is not None for layer in session.cache.compressed_layers)
        model(torch.arange(10, 15)[None], past_key_values=cache)
    assert all(layer.memory.answer_scores is None for layer in session.cache.compressed_layers)


def test_a_pass_that_would_give_no_logits_is_refused_before_it_costs_anything(monkeypatch):
    model = FAMILIES["qwen2"].build()
    inputs, read = FAMILIES["qwen2"].inputs(model, [LENGTH]), []
    headless = model.model
    with pytest.raises(kvcompress.KVCompressError, match="lets the model answer first: Qwen2Model has no logits"):
        kvcompress.compress(headless, "hindsight", 0.5)
    handle = headless.layers[0].register_forward_hook(lambda *_: read.append(1))
    cache = kvcompress.CompressedCache(headless.config, "hindsight", 0.5)
    with kvcompress.attach(headless), pytest.raises(kvcompress.KVCompressError, match="Qwen2Model has no logits"):
        headless(**inputs, past_key_values=cache)
    with kvcompress.compress(model, "hindsight", 0.5):
        with pytest.raises(kvcompress.KVCompressError, match="with return_dict=False its logits have no name"):
            model(**inputs, return_dict=False)
        with monkeypatch.context() as patch:
            patch.setattr(model.config, "return_dict", False)
            with pytest.raises(kvcompress.KVCompressError, match="with return_dict=False its logits have no name"):
                model(**inputs)
        assert not read
        model(**inputs)
    handle.remove()
    assert read
