"""Token methods: vision tokens dropped before or inside the language model, so that the prompt pass gets shorter."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import kvcompress
from kvcompress.policy import all_options, make_policy
from tests.families import FAMILIES, VLM_FAMILIES
from tests.masked_reference import generate

NEW = 4
TOLERANCE = 1e-4  # fp32, logits of order 1
LENGTHS, IMAGES = [40, 26, 61, 9], [1, 1, 2, 0]


def budget(ratio: float, tokens: int) -> int:
    return max(1, math.floor(ratio * tokens + 0.5)) if tokens else 0


def batch(family: str, lengths=LENGTHS, images=IMAGES, layers: int = 4) -> tuple:
    model = FAMILIES[family].build(layers)
    return model, FAMILIES[family].inputs(model, lengths, images)


def vision_of(inputs: dict) -> torch.Tensor:
    return inputs["input_ids"] == 1


def kept_columns(cache: kvcompress.CompressedCache) -> list[list[list[int]]]:
    """[layer][row]: the columns stored, the same for every KV head."""
    layers = [cache.kept_indices(layer) for layer in range(len(cache.layers))]
    for rows in layers:
        for heads in rows:
            assert all(torch.equal(head, heads[0]) for head in heads)
    return [[heads[0].tolist() for heads in rows] for rows in layers]


@contextmanager
def hidden_from(model: torch.nn.Module, kept: list[list[list[int]]]) -> Iterator[None]:
    """Plain attention in which a layer sees, of all columns up to the last that is listed, only the listed ones."""

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        columns, new = key.shape[2], query.shape[2]
        visible = torch.ones(new, columns, dtype=torch.bool).tril(columns - new)
        visible = visible.expand(len(query), 1, -1, -1).clone()
        for row, listed in enumerate(kept[module.layer_idx]):
            hidden = sorted(set(range(columns)) - set(listed) - set(range(max(listed) + 1, columns)))
            visible[row, ..., hidden] = False
        visible[..., -new:] |= torch.eye(new, dtype=torch.bool)  # pads and dropped tokens: no NaN
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    AttentionInterface.register("hidden_from", attention)
    AttentionMaskInterface.register("hidden_from", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = "hidden_from"
    try:
        yield
    finally:
        config._attn_implementation = before


def full_attention(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, ...]:
    """The weights of every layer, (batch, heads, columns, columns), by transformers' eager attention."""
    model.set_attn_implementation("eager")
    try:
        return model(**inputs, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")


# -- the mechanism, with FastV


@pytest.mark.parametrize("ratio", [0.05, 0.5])
@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_fastv_equals_the_full_model_in_which_dropped_tokens_are_hidden_from_layer_k_on(family, ratio):
    model, inputs = batch(family)
    with kvcompress.compress(model, "fastv", ratio) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert len(kept[1][0]) > len(kept[2][0])


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_fastv_keeps_what_the_last_token_attends_to_in_the_layer_before(family, layer):
    model, inputs = batch(family)
    vision, real = vision_of(inputs), inputs["attention_mask"].bool()
    weights = full_attention(model, inputs)[layer - 1].double().mean(1)[:, -1]  # (batch, columns)
    with kvcompress.compress(model, "fastv", 0.3, layer=layer) as session:
        generate(model, inputs, 1)
    kept = kept_columns(session.cache)
    for row in range(len(LENGTHS)):
        best = weights[row].masked_fill(~vision[row], -1).topk(budget(0.3, int(vision[row].sum()))).indices
        text = (real[row] & ~vision[row]).nonzero()[:, 0]
        assert kept[layer][row] == sorted([*best.tolist(), *text.tolist()])
        assert kept[layer - 1][row] == real[row].nonzero()[:, 0].tolist()
        assert all(later[row] == kept[layer][row] for later in kept[layer:])
    ratios = session.cache.realised_ratios()
    assert ratios[layer] == pytest.approx([len(k) / n for k, n in zip(kept[layer], LENGTHS, strict=True)])
    assert ratios[layer - 1] == [1.0] * len(LENGTHS)


@contextmanager
def noting(model: torch.nn.Module) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Of every decoder layer that runs: the columns of its MLP, and the cosines that its attention rotates by."""
    widths, cosines, handles = [], [], []
    for layer in model.get_decoder().layers:
        handles += [
            layer.mlp.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1])),
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs: cosines.append(kwargs["position_embeddings"][0]), with_kwargs=True
            ),
        ]
    try:
        yield widths, cosines
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_layers_behind_the_choice_run_on_fewer_columns_at_their_own_positions(family):
    model, inputs = batch(family)
    with noting(model) as (widths, cosines), kvcompress.compress(model, "fastv", 0.25) as session:
        generate(model, inputs, 2)
    vision = vision_of(inputs).sum(1).tolist()
    left = [n - v + budget(0.25, v) for n, v in zip(LENGTHS, vision, strict=True)]
    assert widths == [61, 61, max(left), max(left), 1, 1, 1, 1]
    whole, shorter = (cos.expand(len(LENGTHS), -1, -1) for cos in cosines[1:3])
    for row, columns in enumerate(kept_columns(session.cache)[2]):
        assert torch.equal(shorter[row, -left[row] :], whole[row, columns[: left[row]]])


@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_a_text_only_prompt_and_ratio_one_run_as_the_full_model_bit_for_bit(family):
    model, inputs = batch(family)
    tokens, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, "fastv", 1.0):
        ours, logits = generate(model, inputs, NEW)
    assert torch.equal(ours, tokens)
    assert torch.equal(logits, expected)
    model, inputs = batch(family, [17, 30], [0, 0])
    _, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, "fastv", 0.1) as session:
        _, logits = generate(model, inputs, NEW)
    assert torch.equal(logits, expected)
    assert session.cache.realised_ratios() == [[1.0, 1.0]] * 4


METHODS = sorted(
    name
    for name, info in kvcompress.list_methods().items()
    if issubclass(info.cls, kvcompress.TokenMethod) and name != "dycoke"  # which is for video
)
ON_ALL_FAMILIES = [("fastv", family) for family in VLM_FAMILIES]


@pytest.mark.parametrize(("method", "family"), ON_ALL_FAMILIES)
@pytest.mark.parametrize("ratio", [0.1, 0.6])
def test_a_row_alone_keeps_the_same_tokens_and_has_the_same_logits(method, family, ratio):
    model, inputs = batch(family)
    with kvcompress.compress(model, method, ratio) as session:
        tokens, logits = generate(model, inputs, NEW)
    together = kept_columns(session.cache)
    for row, length in enumerate(LENGTHS):
        solo = FAMILIES[family].solo(inputs, row)
        with kvcompress.compress(model, method, ratio) as session:
            _, alone = generate(model, solo, NEW, forced=tokens[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], atol=TOLERANCE, rtol=0)
        pads = max(LENGTHS) - length
        assert [[c - pads for c in layer[row]] for layer in together] == [
            layer[0] for layer in kept_columns(session.cache)
        ]


@pytest.mark.parametrize("family", ["llava-onevision", "qwen2.5-vl"])
@pytest.mark.parametrize(
    "options",
    [
        {"first_token": "compressed"},
        {"cache_implementation": "static", "max_new_tokens": NEW},
        {"cache_implementation": "offloaded"},
    ],
    ids=["first-token-compressed", "static", "offloaded"],
)
def test_every_storage_and_protocol_decodes_as_the_reference(family, options):
    model, inputs = batch(family)
    with kvcompress.compress(model, "fastv", 0.3, **options) as session:
        tokens, logits = generate(model, inputs, NEW)
    with hidden_from(model, kept_columns(session.cache)):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llava-onevision", "qwen2.5-vl"])
def test_a_second_prompt_sees_what_was_kept(family):
    model, first = batch(family, [40], [1])
    more = torch.randint(8, 128, (1, 9), generator=torch.Generator().manual_seed(1))
    with kvcompress.compress(model, "fastv", 0.3) as session:
        tokens, _ = generate(model, first, NEW)
        cache, ids = session.cache, torch.cat([first["input_ids"], tokens, more], 1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in first:
            second["mm_token_type_ids"] = torch.zeros_like(ids)
            second["mm_token_type_ids"][:, :40] = first["mm_token_type_ids"]
        answer, logits = generate(model, second, NEW, past_key_values=cache)
    with hidden_from(model, kept_columns(cache)):
        plain = DynamicCache(config=model.config)
        generate(model, first, NEW, forced=tokens, past_key_values=plain)
        _, expected = generate(model, second, NEW, forced=answer, past_key_values=plain)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_eager_and_sdpa_agree_with_and_without_padding(implementation):
    for lengths, images in (([40], [1]), (LENGTHS, IMAGES)):
        model, inputs = batch("qwen2-vl", lengths, images)
        with kvcompress.compress(model, "fastv", 0.3):
            tokens, expected = generate(model, inputs, NEW)
        model.set_attn_implementation(implementation)
        try:
            with kvcompress.compress(model, "fastv", 0.3):
                _, logits = generate(model, inputs, NEW, forced=tokens)
        finally:
            model.set_attn_implementation("sdpa")
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_no_hook_outlives_the_context_also_after_an_exception(method):
    model, inputs = batch("llava-onevision", [40], [1])
    generate(model, inputs, 1)

    def state() -> list:
        return [
            (name, sorted(module.__dict__), len(module._forward_pre_hooks), len(module._forward_hooks))
            for name, module in model.named_modules()
        ]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    before = state()
    with kvcompress.compress(model, method, 0.5):
        generate(model, inputs, 2)
        between = state()
    assert state() == before
    assert sum(a != b for a, b in zip(before, between, strict=True)) == 1  # the model's own, that any method has
    handle = model.get_decoder().layers[3].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), kvcompress.compress(model, method, 0.5):
        generate(model, inputs, 2)
    handle.remove()
    assert state() == before


def test_the_last_token_stays_also_where_it_is_a_vision_token():
    model, inputs = batch("qwen2-vl", [40], [1])
    end = int(vision_of(inputs)[0].nonzero().max()) + 1
    cut = {name: tensor[:, :end] if tensor.shape[:2] == (1, 40) else tensor for name, tensor in inputs.items()}
    with kvcompress.compress(model, "fastv", 0.1) as session:
        generate(model, cut, 2)
    assert kept_columns(session.cache)[3][0][-2:] == [end - 1, end]  # the only vision token, and the decoded one
    assert int(vision_of(inputs)[0, kept_columns(session.cache)[3][0][:-1]].sum()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "fastv"}, "'fastv' needs ratio="),
        ({"method": "fastv", "ratio": 1.5}, "ratio=1.5 is not in"),
        ({"method": "fastv", "ratio": 0.5, "layer": 0}, "'fastv': option 'layer' is 0"),
        ({"method": "fastv", "ratio": 0.5, "scorer": "snapkv"}, "'fastv' has no option 'scorer'"),
        ({"method": "fastv", "ratio": 0.5, "decode_ratio": 0.5}, "'fastv' has no option 'decode_ratio'"),
        ({"method": "fastv", "ratio": 0.5, "ratio_of": "prompt"}, "'fastv' drops vision tokens only"),
        ({"method": "snapkv", "ratio": 0.5, "scorer": "fastv"}, "'fastv' cannot be a scorer"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_runs(arguments, message):
    with pytest.raises(kvcompress.KVCompressError, match=message) as error:
        kvcompress.compress(FAMILIES["qwen2-vl"].build(), **arguments)
    assert "\n" not in str(error.value)


def test_what_only_the_model_can_tell_is_an_error_too():
    model, inputs = batch("qwen2-vl", [40], [1], layers=3)
    with pytest.raises(kvcompress.KVCompressError, match="layer=7 is not below the model's 3 layers"):
        with kvcompress.compress(model, "fastv", 0.5, layer=7):
            model.generate(**inputs, max_new_tokens=1)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(kvcompress.KVCompressError, match="need input_ids"):
        with kvcompress.compress(model, "fastv", 0.5):
            model.generate(inputs_embeds=embeds, max_new_tokens=1)


def test_options_say_what_the_ratio_counts():
    info = kvcompress.list_methods()["fastv"]
    assert issubclass(info.cls, kvcompress.TokenMethod)
    assert all_options(info)["ratio_of"] == "vision"
    assert make_policy("fastv", 0.5).options["ratio_of"] == "vision"
    with pytest.raises(kvcompress.KVCompressError, match="it is no cluster"):
        kvcompress.make_cluster("fastv")
