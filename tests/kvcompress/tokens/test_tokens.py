"""Token methods: vision tokens dropped before or inside the language model, so that the prefill gets shorter."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForImageTextToText,
    DynamicCache,
    LlavaConfig,
    LlavaNextConfig,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.hooks.video_frames import FrameRecorder
from kvcompress.policy.make import make_policy
from kvcompress.policy.options import all_options
from kvcompress.scoring.vision import vision_token_mask
from kvcompress.tokens import Tokens
from tests.support.examples import paired
from tests.support.families import FAMILIES, MORE_FAMILIES, VLM_FAMILIES

NEW = 3
TOLERANCE = 1e-4  # fp32, logits of order 1
LENGTHS, IMAGES = [40, 26, 61, 9], [1, 1, 2, 0]
METHODS = sorted(
    name
    for name, info in kvcompress.list_methods().items()
    if issubclass(info.cls, kvcompress.TokenMethod) and info.cls.sees not in ("frames", "video")
)
CASES = [(method, family) for family in VLM_FAMILIES for method in ("fastv", "sparsevlm")]
CASES += [(method, "llava-onevision") for method in ("visionzip", "prumerge+", "vispruner")]
CASES += [(method, family) for family in ("qwen2.5-vl", "internvl") for method in ("divprune", "cdpruner")]


def budget(ratio: float, tokens: int) -> int:
    return max(1, math.floor(ratio * tokens + 0.5)) if tokens else 0


def batch(family: str, lengths=LENGTHS, images=IMAGES, layers: int = 4) -> tuple:
    made = (FAMILIES | MORE_FAMILIES)[family]
    model = made.build(layers)
    return model, made.inputs(model, lengths, images)


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
def hidden_from(model: torch.nn.Module, kept: list[list[list[int]]]) -> Iterator[list[torch.Tensor]]:
    """Plain attention in which a layer sees, of all columns up to the last that is listed, only the listed ones.
    Yields the weights of each layer that ran, (batch, heads, queries, columns)."""
    noted = []

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        columns, new = key.shape[2], query.shape[2]
        visible = torch.ones(new, columns, dtype=torch.bool).tril(columns - new)
        visible = visible.expand(len(query), 1, -1, -1).clone()
        if attention_mask is not None and new == columns:  # Molmo 2's images look at themselves both ways
            visible = attention_mask.expand_as(visible).clone()
        for row, listed in enumerate(kept[module.layer_idx]):
            hidden = sorted(set(range(columns)) - set(listed) - set(range(max(listed) + 1, columns)))
            visible[row, ..., hidden] = False
        visible[..., -new:] |= torch.eye(new, dtype=torch.bool)  # pads and dropped tokens: no NaN
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        noted.append(weights)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    AttentionInterface.register("hidden_from", attention)
    AttentionMaskInterface.register("hidden_from", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = "hidden_from"
    try:
        yield noted
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


@pytest.mark.parametrize(("family", "ratio"), paired([*VLM_FAMILIES, *MORE_FAMILIES.keys() & {"molmo2"}], [0.05, 0.5]))
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
    whole, shorter = (cos.expand(*cos.shape[:-3], len(LENGTHS), -1, -1) for cos in cosines[1:3])
    for row, columns in enumerate(kept_columns(session.cache)[2]):
        assert torch.equal(shorter[..., row, -left[row] :, :], whole[..., row, columns[: left[row]], :])


@pytest.mark.parametrize(("method", "family"), CASES)
def test_a_text_only_prompt_and_ratio_one_run_as_the_full_model_bit_for_bit(method, family):
    model, inputs = batch(family)
    tokens, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, method, 1.0):
        ours, logits = generate(model, inputs, NEW)
    assert torch.equal(ours, tokens)
    assert torch.equal(logits, expected)
    model, inputs = batch(family, [17, 30], [0, 0])
    _, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, method, 0.1) as session:
        _, logits = generate(model, inputs, NEW)
    assert torch.equal(logits, expected)
    assert session.cache.realised_ratios() == [[1.0, 1.0]] * 4


@pytest.mark.parametrize(("case", "ratio"), paired(CASES, [0.1, 0.3, 0.6]))
def test_a_row_alone_keeps_the_same_tokens_and_has_the_same_logits(case, ratio):
    method, family = case
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


def test_hidden_states_may_reach_a_layer_by_name():
    def by_keyword(layer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (), {"hidden_states": args[0], **kwargs}

    model, inputs = batch("llava-onevision")
    runs = []
    for by_name in (False, True):
        hooks = [
            layer.register_forward_pre_hook(by_keyword, prepend=True, with_kwargs=True)
            for layer in (kvcompress.hooks.model.text_decoder(model).layers if by_name else ())
        ]
        with kvcompress.compress(model, "fastv", 0.3):
            runs.append(generate(model, inputs, NEW)[1])
        for hook in hooks:
            hook.remove()
    assert torch.equal(*runs)


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


@pytest.mark.parametrize(("lengths", "images"), [([40], [1]), (LENGTHS, IMAGES)])
@pytest.mark.parametrize("method", ["fastv", "sparsevlm"])
def test_flash_attention_and_sdpa_agree(method, lengths, images, fake_flash_attn):
    model, inputs = batch("qwen2-vl", lengths, images)
    with kvcompress.compress(model, method, 0.3):
        tokens, expected = generate(model, inputs, NEW)
    model.set_attn_implementation({"text_config": "flash_attention_2"})
    try:
        with kvcompress.compress(model, method, 0.3):
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
        generate(model, inputs, 1)
        between = state()
    assert state() == before
    changed = {a[0] for a, b in zip(before, between, strict=True) if a != b}
    assert not any(name.startswith("model.language_model") for name in changed)  # a decode step pays nothing
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


@pytest.mark.parametrize("given", [lambda vision: None, lambda vision: vision[:, 1:], lambda vision: vision[..., None]])
def test_scores_of_another_shape_or_kind_are_one_line(given):
    method, vision = kvcompress.list_methods()["fastv"].cls(), torch.ones(2, 9, dtype=torch.bool)
    tokens = Tokens(vision, None, [3, 3], vision[..., None].float())
    with pytest.raises(kvcompress.KVCompressError, match=r"^FastV.score returned .*: it must be a tensor .* \(2, 9\)$"):
        method.choose(given(vision), tokens)


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
    error = kvcompress.KVCompressError
    with kvcompress.compress(model, "fastv", 0.5, layer=7), pytest.raises(error, match=r"layer=7 is not below .* 3 "):
        model.generate(**inputs, max_new_tokens=1)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with kvcompress.compress(model, "fastv", 0.5), pytest.raises(error, match="need input_ids"):
        model.generate(inputs_embeds=embeds, max_new_tokens=1)
    with pytest.raises(error, match="no access to the vision tower's attention of a qwen2_vl model"):
        kvcompress.compress(model, "visionzip", 0.5)
    model, inputs = batch("llava-onevision", [40], [1])
    with pytest.raises(error, match="tower_layer=-3: the vision tower has 2 layers"):
        kvcompress.compress(model, "visionzip", 0.5, tower_layer=-3)
    cache = kvcompress.CompressedCache(model.config, "visionzip", 0.5)
    with kvcompress.attach(model), pytest.raises(error, match=r"works inside kvcompress\.compress"):
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1)


def test_options_say_what_the_ratio_counts():
    info = kvcompress.list_methods()["fastv"]
    assert issubclass(info.cls, kvcompress.TokenMethod)
    assert all_options(info)["ratio_of"] == "vision"
    assert make_policy("fastv", 0.5).options["ratio_of"] == "vision"
    with pytest.raises(kvcompress.KVCompressError, match="so it has no cluster"):
        kvcompress.make_cluster("fastv")


def test_a_preset_brings_its_budget_unless_one_is_given():
    assert make_policy("fastv", preset="k2-r75").budget(1000) == 250
    assert make_policy("sparsevlm", preset="64").budget(576) == 64
    assert make_policy("sparsevlm", budget=100, preset="64").budget(576) == 100
    assert make_policy("fastv", 0.4, preset="k2-r75").budget(1000) == 400
    assert "budget" not in make_policy("sparsevlm", preset="64").options
    assert make_policy("dycoke", preset="code").budget(32 * 196 + 1) == 9 * 196 + 23 * 58 + 1


def test_the_tower_s_layers_are_those_of_the_released_code():
    methods = kvcompress.list_methods()
    layers = {name: info.options["tower_layer"] for name, info in methods.items() if "tower_layer" in info.options}
    assert layers == {"visionzip": -2, "prumerge+": -1, "vispruner": -2, "fastvid": -1, "holitom": -1}


# -- what the vision tower looks at


def patches_of(images: int) -> list[tuple[int, int] | None]:
    """(tile, patch) of each token of an image of the tiny LLaVA-OneVision, in a row of so many; None for a newline."""
    base = [(0, patch) for patch in range(4)]
    if images > 1:
        return [*base, None]
    lines = [[(tile, 2 * line + patch) for tile in (1, 2) for patch in (0, 1)] for line in (0, 1)]
    return [*base, *lines[0], None, *lines[1], None]


def tower_reference(model: torch.nn.Module, inputs: dict, layer: int, whole: bool = False) -> tuple[torch.Tensor, ...]:
    """In float64: the attention that each column's patch receives (-inf without patch), in the mean over heads or with
    one softmax over `whole` states; its keys; and its features as the tower gives them."""
    tower, ids = model.model.vision_tower, inputs["input_ids"]
    received = torch.full(ids.shape, -math.inf, dtype=torch.float64)
    keys = torch.zeros(*ids.shape, 2, 16, dtype=torch.float64)
    features = torch.zeros(*ids.shape, 32, dtype=torch.float64)
    image = 0
    for row, images in enumerate(inputs["batch_num_images"].tolist()):
        columns = (ids[row] == 1).nonzero()[:, 0].split(len(patches_of(images)))
        for place in columns if images else []:
            output = tower(inputs["pixel_values"][image], output_hidden_states=True)
            encoder = [module for module in tower.modules() if hasattr(module, "self_attn")][layer]
            states = encoder.layer_norm1(output.hidden_states[:-1][layer])
            attention = encoder.self_attn
            queries, of_tiles = (
                project(states).double().unflatten(-1, (2, 16)) for project in (attention.q_proj, attention.k_proj)
            )
            if whole:
                weights = (queries.flatten(2) @ of_tiles.flatten(2).mT * 32**-0.5).softmax(-1).mean(1)
            else:
                products = torch.einsum("tqhd,tkhd->thqk", queries, of_tiles) / 4
                weights = products.softmax(-1).mean((1, 2))  # (tiles, patches)
            for column, patch in zip(place.tolist(), patches_of(images), strict=True):
                if patch is not None:
                    received[row, column], keys[row, column] = weights[patch], of_tiles[patch]
                    features[row, column] = output.hidden_states[model.config.vision_feature_layer][patch]
            image += 1
    return received, keys, features


def projected(model: torch.nn.Module, features: torch.Tensor) -> torch.Tensor:
    return model.model.multi_modal_projector(features.float()).double()


@contextmanager
def entering(model: torch.nn.Module, index: int) -> Iterator[list[torch.Tensor]]:
    """The hidden states that decoder layer `index` really runs on, at each pass."""
    states = []
    norm = model.get_decoder().layers[index].input_layernorm
    handle = norm.register_forward_pre_hook(lambda _, args: states.append(args[0].clone()))
    try:
        yield states
    finally:
        handle.remove()


def run(method: str, ratio: float, **options: object) -> tuple:
    """LLaVA-OneVision: the model, its inputs, kept columns of the rows, embeddings, embeddings that reach layer 0."""
    model, inputs = batch("llava-onevision")
    with entering(model, 0) as states:
        generate(model, inputs, 1)
        with kvcompress.compress(model, method, ratio, **options) as session:
            generate(model, inputs, 1)
    return model, inputs, kept_columns(session.cache)[0], states[0], states[1]


UNMERGED = {"neighbours": 0, "extra_token": False}


@pytest.mark.parametrize(
    ("method", "options"), [("visionzip", {"contextual": 0.0}), ("prumerge+", UNMERGED), ("vispruner", {})]
)
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_without_merging_they_equal_the_full_model_in_which_dropped_tokens_are_hidden(method, options, ratio):
    model, inputs = batch("llava-onevision")
    with kvcompress.compress(model, method, ratio, **options) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    vision = vision_of(inputs)
    for row, columns in enumerate(kept[0]):
        assert sum(vision[row, c].item() for c in columns if c < 61) == budget(ratio, int(vision[row].sum()))


@pytest.mark.parametrize("layer", [-1, -2])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_visionzip_keeps_dominant_tokens_and_merges_the_others_into_contextual_ones(ratio, layer):
    share = 0.4
    model, inputs, kept, embeddings, reached = run("visionzip", ratio, contextual=share, tower_layer=layer)
    received, keys, features = tower_reference(model, inputs, layer)
    vision, real = vision_of(inputs), inputs["attention_mask"].bool()
    for row in range(len(LENGTHS)):
        columns, patches = vision[row].nonzero()[:, 0], (received[row] > -math.inf).nonzero()[:, 0]
        expected, n = embeddings[row].double(), budget(ratio, len(columns))
        contextual = math.floor(share * n + 0.5) if n < len(patches) else 0
        # Among equals, as newlines are, the later one stays.
        order = sorted(columns.tolist(), key=lambda c, row=row: (received[row, c], c), reverse=True)
        dominant = order[: n - contextual]
        rest = [c for c in patches.tolist() if c not in dominant]
        targets = [rest[i * (len(rest) // contextual)] for i in range(contextual)]
        mean_keys = keys[row].mean(1)
        assigned = {target: [] for target in targets}
        for other in set(rest) - set(targets) if targets else []:
            similarity = [torch.cosine_similarity(mean_keys[other], mean_keys[t], dim=0) for t in targets]
            assigned[targets[similarity.index(max(similarity))]].append(other)
        stays = sorted([*dominant, *targets, *(real[row] & ~vision[row]).nonzero()[:, 0].tolist()])
        assert kept[row] == stays
        expected = expected.clone()
        for target, others in assigned.items():
            merged = features[row, others].mean(0) if others else 0.0
            expected[target] = projected(model, features[row, target] + merged)
        torch.testing.assert_close(reached[row, -len(stays) :].double(), expected[stays], atol=1e-5, rtol=0)


@pytest.mark.parametrize("important", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_vispruner_keeps_what_the_tower_looks_at_and_what_has_no_duplicate(ratio, important):
    model, inputs, kept, embeddings, reached = run("vispruner", ratio, important=important)
    received, _, features = tower_reference(model, inputs, -2)
    real = inputs["attention_mask"].bool()
    for row, vision in enumerate(vision_of(inputs)):
        columns, patches = vision.nonzero()[:, 0].tolist(), (received[row] > -math.inf).nonzero()[:, 0].tolist()
        n = budget(ratio, len(columns))
        order = sorted(patches, key=lambda c, row=row: received[row, c], reverse=True)
        first = int(n * important)
        stays, rest = set(order[:first]), order[first:]
        while first < n < first + len(rest):
            some, others = rest[::2], rest[1::2]
            likeness = {c: torch.cosine_similarity(features[row, [c]], features[row, others]).max() for c in some}
            some = sorted(some, key=likeness.get, reverse=True)[min(8, first + len(rest) - n) :]
            rest = [*some, *others]
        if first < n:
            stays |= set(rest)
        newlines = [c for c in columns if c not in patches]
        stays |= set(newlines[len(newlines) - max(n - len(patches), 0) :])
        everything = sorted([*stays, *(real[row] & ~vision).nonzero()[:, 0].tolist()])
        assert kept[row] == everything
        assert torch.equal(reached[row, -len(everything) :], embeddings[row, everything])


@pytest.mark.parametrize("variant", ["code", "heads"])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_prumerge_keeps_outliers_and_an_even_sample_and_adds_their_neighbours(ratio, variant):
    model, inputs, kept, embeddings, reached = run("prumerge+", ratio, neighbours=3, variant=variant)
    received, keys, features = tower_reference(model, inputs, -1, whole=variant == "code")
    vision, real = vision_of(inputs), inputs["attention_mask"].bool()
    outliers_seen = 0
    for row in range(len(LENGTHS)):
        columns, patches = vision[row].nonzero()[:, 0], (received[row] > -math.inf).nonzero()[:, 0].tolist()
        n, extra = budget(ratio, len(columns)), False
        if n < len(patches):
            extra = n > 1
            n -= extra
            weights = received[row, patches]
            low, high = weights.quantile(0.25), weights.quantile(0.75)
            outliers = [c for c in patches if received[row, c] > high + 1.5 * (high - low)]
            outliers = sorted(outliers, key=lambda c, row=row: received[row, c], reverse=True)[:n]
            others, wanted = [c for c in patches if c not in outliers], n - len(outliers)
            for step in range(len(patches) // max(wanted, 1), 0, -1):
                even = [c for c in patches[: len(patches) - 1 : step] if c not in outliers]
                if len(even) >= wanted:
                    others = even
                    break
            chosen = [*outliers, *(others[i * len(others) // wanted] for i in range(wanted))]
            outliers_seen += len(outliers)
        else:
            newlines = [c for c in columns.tolist() if c not in patches]
            chosen = [*patches, *newlines[len(newlines) - (n - len(patches)) :]]
        expected = embeddings[row].double().clone()
        flat = keys[row].flatten(1)
        for column in set(chosen) & set(patches):
            others = [c for c in patches if c != column]
            nearest = torch.cosine_similarity(flat[column][None], flat[others]).topk(3).indices.tolist()
            near = [others[i] for i in nearest]
            weighted = (received[row, near, None] * features[row, near]).sum(0)
            expected[column] = projected(model, features[row, column] + weighted)
        if extra:
            dropped = [c for c in patches if c not in chosen]
            weighted = (received[row, dropped, None] * features[row, dropped]).sum(0)
            expected[dropped[-1]] = projected(model, weighted)
            chosen.append(dropped[-1])
        stays = sorted([*chosen, *(real[row] & ~vision[row]).nonzero()[:, 0].tolist()])
        assert kept[row] == stays
        torch.testing.assert_close(reached[row, -len(stays) :].double(), expected[stays], atol=1e-5, rtol=0)
    assert outliers_seen or ratio == 0.9 or variant == "code"


def test_prumerge_may_let_the_outliers_set_the_number_and_pads_the_shorter_row():
    model, inputs = batch("llava-onevision")
    with kvcompress.compress(model, "prumerge+", preset="adaptive", neighbours=0, extra_token=False) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    received, _, _ = tower_reference(model, inputs, -1, whole=True)
    for row, vision in enumerate(vision_of(inputs)):
        patches = (received[row] > -math.inf).nonzero()[:, 0].tolist()
        weights = received[row, patches]
        low, high = (weights.quantile(q) if patches else None for q in (0.25, 0.75))
        outliers = [c for c in patches if received[row, c] > high + 1.5 * (high - low)]
        step = max(len(patches) // max(len(outliers), 1) // 3, 1)
        stays = sorted({*outliers, *patches[: max(len(patches) - 1, 0) : step]})
        assert [c for c in kept[0][row] if c < len(vision) and vision[c]] == stays
    with kvcompress.compress(model, "prumerge+", budget=2, count="outliers") as session:
        generate(model, inputs, 1)
    assert [int(v[k].sum()) for v, k in zip(vision_of(inputs), kept_columns(session.cache)[0], strict=True)][:3] == [
        2
    ] * 3


# -- SparseVLM


@pytest.mark.parametrize(("family", "ratio"), paired(list(VLM_FAMILIES), [0.1, 0.4, 0.8]))
def test_sparsevlm_keeps_what_the_raters_attend_to_step_by_step(family, ratio):
    model, inputs = batch(family, layers=12)
    with entering(model, 0) as states:
        generate(model, inputs, 1)
    with kvcompress.compress(model, "sparsevlm", ratio, recycle=0.0) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept) as weights:
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    method = kvcompress.list_methods()["sparsevlm"].cls(recycle=0.0)
    assert method.layers(12) == [1, 3, 6]
    for row, vision in enumerate(vision_of(inputs)):
        columns = vision.nonzero()[:, 0]
        if not len(columns):
            continue
        embeddings = states[0][row].double()
        text = torch.arange(int(columns[-1]) + 1, len(vision))
        affinity = (embeddings[columns] @ embeddings[text].T).softmax(1).mean(0)
        raters = text[affinity >= affinity.mean()]
        left = columns
        counts = method.budgets(budget(ratio, len(columns)), len(columns), 12)
        for layer, count in zip([1, 3, 6], counts, strict=True):
            rated = weights[layer - 1][row].double().mean(0)[raters][:, left].mean(0)
            left = left[rated.topk(count).indices.sort().values]
            assert [c for c in kept[layer][row] if c < len(vision) and vision[c]] == left.tolist()


@pytest.mark.parametrize(("asked", "counts"), [(192, (300, 200, 110)), (128, (303, 110, 36)), (64, (66, 30, 17))])
def test_sparsevlm_has_the_published_counts_and_their_clusters_where_their_mean_is_asked_for(asked, counts):
    method = kvcompress.list_methods()["sparsevlm"].cls(counts=counts)
    assert method.layers(32) == [3, 7, 16]
    totals, left = [], 576
    for count in counts:
        clusters = (int(0.3 * (left - count)) + 1) // 10 + 1
        left = count + clusters
        totals.append(left)
    assert method.budgets(asked, 576, 32) == totals
    # What comes out of a layer, those before the first step included: as the released code counts.
    assert int((2 * 576 + 4 * totals[0] + 9 * totals[1] + 17 * totals[2]) / 32) == asked


def test_sparsevlm_keeps_in_the_mean_over_all_layers_what_was_asked_for():
    method, full, spans = kvcompress.list_methods()["sparsevlm"].cls(), 576, (4, 9, 17)
    for kept in (38, 64, 100, 193, 400, 570, 576):
        counts = method.budgets(kept, full, 32)
        assert counts == sorted(counts, reverse=True)
        mean = (2 * full + sum(span * count for span, count in zip(spans, counts, strict=True))) / 32
        assert abs(mean - kept) <= 1
    assert method.budgets(0, 0, 32) == [0, 0, 0]
    with pytest.raises(kvcompress.KVCompressError, match=r"20 of 576 vision tokens.*2 layers hold all"):
        method.budgets(20, full, 32)


def test_sparsevlm_recycles_the_best_of_what_it_drops_into_clusters():
    generator = torch.Generator().manual_seed(0)
    vision = torch.zeros(2, 70, dtype=torch.bool)
    vision[0, 5:65] = vision[1, 20:60] = True
    hidden, scores = torch.randn(2, 70, 8, generator=generator), torch.rand(2, 70, generator=generator)
    method = kvcompress.list_methods()["sparsevlm"].cls(recycle=0.5, tokens_per_cluster=5)
    tokens = Tokens(vision, None, [10, 1], hidden)
    chosen, merged = method.choose(scores, tokens)
    assert chosen.sum(1).tolist() == [10, 1]
    recycled = 28  # 55 // 2 + 1 of the 55 that are not among the best 5, in as many clusters as there are best
    order = scores[0].masked_fill(~vision[0], -1).argsort(descending=True).tolist()
    dominant, second = order[:5], order[5 : 5 + recycled]
    states = hidden[0, second].double()
    distances = (states[:, None] - states[None]).square().mean(-1).sqrt()
    density = (-distances.sort(1).values[:, :5].square().mean(1)).exp()
    apart = [
        min(
            (distances[i, j].item() for j in range(recycled) if density[j] > density[i]), default=distances.max().item()
        )
        for i in range(recycled)
    ]
    peaks = (torch.tensor(apart) * density).topk(5).indices.tolist()
    assert sorted(dominant + [second[i] for i in peaks]) == chosen[0].nonzero()[:, 0].tolist()
    cluster = [peaks.index(i) if i in peaks else int(distances[i, peaks].argmin()) for i in range(recycled)]
    expected = hidden.double().clone()
    for number, peak in enumerate(peaks):
        expected[0, second[peak]] = states[[i for i in range(recycled) if cluster[i] == number]].mean(0)
    torch.testing.assert_close(merged.double(), expected, atol=1e-6, rtol=0)


# -- DyCoke, EVS and FrameFusion: videos

VIDEO_FAMILIES = {"llava-onevision": 1, "qwen2-vl": 12, "qwen2.5-vl": 12, "qwen3-vl": 12, "internvl": 9}  # per frame


def video_batch(family: str, frames: list[int]) -> tuple[torch.nn.Module, dict, list[list[list[int]]]]:
    """A model, left-padded prompts with one video of so many frames each, and the columns of each row's frames."""
    size, (image, video, start, end) = VIDEO_FAMILIES[family], range(1, 5)
    model, generator = FAMILIES[family].build(4), torch.Generator().manual_seed(3)
    rows = []
    for number, count in enumerate(frames):
        text = torch.arange(20 + 10 * number, 29 + 10 * number).tolist()
        if family in ("qwen3-vl", "internvl"):  # each frame on its own
            token = image if family == "internvl" else video
            shown = [t for frame in range(count) for t in (9 + frame, start, *[token] * size, end)]
        else:
            shown = [start, *[video] * (count * size + (family == "llava-onevision")), end]
        rows.append([*text[:3], *shown, *text[3:]])
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    pixels = {"generator": generator}
    if family == "llava-onevision":
        inputs["pixel_values_videos"] = torch.randn(len(frames), frames[0], 3, 8, 8, **pixels)
    elif family == "internvl":
        inputs["pixel_values"] = torch.randn(sum(frames), 3, 24, 24, **pixels)
    else:
        patch = 3 * 2 * (16 if family == "qwen3-vl" else 14) ** 2
        inputs["pixel_values_videos"] = torch.randn(sum(frames) * 48, patch, **pixels)
        inputs["video_grid_thw"] = torch.tensor([[count, 6, 8] for count in frames])
        inputs["mm_token_type_ids"] = 2 * (ids == video).int()
    columns = [((row == video) | (row == image)).nonzero()[:, 0].tolist() for row in ids]
    of_frames = [[c[i * size : (i + 1) * size] for i in range(n)] for c, n in zip(columns, frames, strict=True)]
    return model, inputs, of_frames


def of_video(method: str, family: str, ratio: float, **options: object) -> tuple[list, torch.Tensor, list]:
    """Generate from two videos; logits must be those of the full model in which what was dropped is hidden, at ratio 1
    bit for bit. Returns each row's kept columns, the states that enter the language model, and the frames' columns."""
    model, inputs, of_frames = video_batch(family, [8, 8] if family == "llava-onevision" else [7, 5])
    with entering(model, 0) as states:
        _, full_logits = generate(model, inputs, NEW)
    with kvcompress.compress(model, method, ratio, **options) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    if ratio == 1:
        assert torch.equal(logits, full_logits)
    return kept[0], states[0], of_frames


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.5, 0.7, 1.0]))
def test_dycoke_keeps_every_fourth_frame_and_what_is_new_in_the_others(family, ratio):
    kept, states, of_frames = of_video("dycoke", family, ratio, decode_drop=0.0)
    for row, columns in enumerate(of_frames if ratio < 1 else []):
        newline = int(family == "llava-onevision")
        n = budget(ratio, sum(map(len, columns)) + newline)
        # The third frame of the last four, or fewer, stays whole, as in the released code.
        whole = [f for f in range(len(columns)) if f % 4 == 0 or (f % 4 == 2 and f + 2 > len(columns) - 1)]
        later = [f for f in range(len(columns)) if f not in whole]
        share, more = divmod(n - newline - sum(len(columns[f]) for f in whole), len(later))
        stays = [c for f in whole for c in columns[f]]
        for number, f in enumerate(later):
            then = columns[f - 2] if f % 4 == 2 else columns[f - 1]
            likeness = torch.cosine_similarity(states[row, columns[f]].double(), states[row, then].double())
            new = likeness.argsort()[: share + (number < more)].tolist()
            stays += [columns[f][i] for i in new]
        shown = {c for frame in columns for c in frame}
        assert [c for c in kept[row] if c in shown] == sorted(stays)


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.3, 0.7, 1.0]))
def test_evs_keeps_the_first_frame_and_what_has_changed_since_the_frame_before(family, ratio):
    kept, states, of_frames = of_video("evs", family, ratio)
    for row, columns in enumerate(of_frames if ratio < 1 else []):
        newline = int(family == "llava-onevision")
        n = budget(ratio, sum(map(len, columns)) + newline) - newline
        likeness = {
            now: torch.cosine_similarity(states[row, now].double(), states[row, then].double(), dim=0).item()
            for before, frame in pairwise(columns)
            for then, now in zip(before, frame, strict=True)
        }
        stays = [*columns[0], *sorted(likeness, key=likeness.get)[: n - len(columns[0])]]
        shown = {c for frame in columns for c in frame}
        assert [c for c in kept[row] if c in shown] == sorted(stays)


def test_evs_decodes_rows_of_different_length_as_each_alone():
    model, inputs, _ = video_batch("qwen2.5-vl", [7, 5])
    with kvcompress.compress(model, "evs", preset="q70"):
        tokens, logits = generate(model, inputs, NEW)
    model, solo, _ = video_batch("qwen2.5-vl", [7])
    with kvcompress.compress(model, "evs", preset="q70"):
        _, alone = generate(model, solo, NEW, forced=tokens[:1])
    torch.testing.assert_close(logits[0], alone[0], atol=TOLERANCE, rtol=0)


def test_evs_cannot_keep_less_than_the_first_frame_and_says_so():
    model, inputs, _ = video_batch("qwen2-vl", [4])
    with kvcompress.compress(model, "evs", 0.25) as session:
        generate(model, inputs, 1)
    vision = inputs["mm_token_type_ids"][0].bool()
    assert [c for c in kept_columns(session.cache)[0][0] if vision[c]] == vision.nonzero()[:12, 0].tolist()
    error = kvcompress.KVCompressError
    with kvcompress.compress(model, "evs", 0.2), pytest.raises(error, match=r"cannot keep 10 of .* stay, 12 tok"):
        generate(model, inputs, 1)
    model, inputs = batch("qwen2-vl", [40], [1])
    with kvcompress.compress(model, "evs", 0.5), pytest.raises(error, match="cannot keep 6 of its 12 vision tokens"):
        generate(model, inputs, 1)


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.4, 0.6, 1.0]))
def test_framefusion_prunes_by_the_attention_of_the_layer_before_where_nothing_is_alike(family, ratio):
    frames = [8, 8] if family == "llava-onevision" else [7, 5]
    model, inputs, _ = video_batch(family, frames)
    plain, full_logits = generate(model, inputs, NEW)
    with kvcompress.compress(model, "framefusion", ratio, similarity=1.0) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    if ratio == 1:
        assert torch.equal(tokens, plain)
        assert torch.equal(logits, full_logits)
        return
    weights = full_attention(model, inputs)[0].double().mean(1)[:, -1]
    for row, vision in enumerate(vision_token_mask(model.config, inputs["input_ids"])):
        columns = vision.nonzero()[:, 0].tolist()
        # The first layer holds all, the three others what makes the mean right.
        left = math.floor((4 * budget(ratio, len(columns)) - len(columns)) / 3 + 0.5)
        best = weights[row].masked_fill(~vision, -1).topk(left).indices.tolist()
        stays = [[c for c in layer[row] if c < len(vision) and vision[c]] for layer in kept]
        assert stays == [columns, sorted(best), sorted(best), sorted(best)]


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.3, 0.8]))
def test_framefusion_merges_runs_of_like_tokens_at_a_place_into_their_mean(family, ratio):
    frames = [8, 8] if family == "llava-onevision" else [7, 5]
    model, inputs, of_frames = video_batch(family, frames)
    with entering(model, 0) as states:
        generate(model, inputs, 1)
        with kvcompress.compress(model, "framefusion", ratio, similarity=0.0) as session:
            generate(model, inputs, 1)
    kept = kept_columns(session.cache)
    vision = vision_token_mask(model.config, inputs["input_ids"])
    for row, columns in enumerate(of_frames):
        embeddings, size = states[0][row].double(), len(columns[0])
        n = int(vision[row].sum())
        alike = {
            now: torch.cosine_similarity(embeddings[now], embeddings[then], dim=0).item()
            for before, frame in pairwise(columns)
            for then, now in zip(before, frame, strict=True)
        }
        goes = sorted((c for c in alike if alike[c] >= 0), key=alike.get, reverse=True)[: n - budget(ratio, n)]
        expected = embeddings.clone()
        for place in range(size):
            run = []
            for column in [frame[place] for frame in columns]:
                run = [*run, column] if column in goes else [column]
                expected[run[0]] = embeddings[run].mean(0)
        stays = [c for c in range(len(embeddings)) if inputs["attention_mask"][row, c] and c not in goes]
        assert kept[0][row] == stays
        torch.testing.assert_close(states[1][row, -len(stays) :].double(), expected[stays], atol=1e-5, rtol=0)
        left = [sum(vision[row, c].item() for c in layer[row] if c < len(embeddings)) for layer in kept]
        assert abs(sum(left) / 4 - budget(ratio, n)) <= 0.5
        assert left == sorted(left, reverse=True)


def test_framefusion_decodes_rows_of_different_length_as_each_alone():
    model, inputs, _ = video_batch("qwen2.5-vl", [7, 5])
    with kvcompress.compress(model, "framefusion", 0.4, similarity=0.0):
        tokens, logits = generate(model, inputs, NEW)
    model, solo, _ = video_batch("qwen2.5-vl", [7])
    with kvcompress.compress(model, "framefusion", 0.4, similarity=0.0):
        _, alone = generate(model, solo, NEW, forced=tokens[:1])
    torch.testing.assert_close(logits[0], alone[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": "static", "max_new_tokens": NEW}, {"cache_implementation": "offloaded"}],
    ids=["static", "offloaded"],
)
def test_framefusion_decodes_from_every_storage_the_same(options):
    model, inputs, _ = video_batch("qwen2.5-vl", [7, 5])
    settings = {"similarity": 0.0, "least_merged": 0.3}
    with kvcompress.compress(model, "framefusion", 0.5, **settings) as session:
        tokens, expected = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    with kvcompress.compress(model, "framefusion", 0.5, **settings, **options) as session:
        _, logits = generate(model, inputs, NEW, forced=tokens)
    assert kept_columns(session.cache) == kept
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_framefusion_says_where_the_layers_before_have_held_too_much():
    model, inputs, _ = video_batch("qwen2-vl", [4])
    with (
        kvcompress.compress(model, "framefusion", 0.25),
        pytest.raises(
            kvcompress.KVCompressError, match=r"12 of 48 vision tokens.* in row 0 the first 1 layers hold 48"
        ),
    ):
        generate(model, inputs, 1)


@contextmanager
def hiding_while_decoding(model: torch.nn.Module, first: int, drop: float, vision: torch.Tensor) -> Iterator[list[int]]:
    """Plain attention in which at decode steps the layers from `first` on see the best of the vision tokens (batch,
    columns) only, by the layer before; all of them where that one attends as at the step before. Yields how many rows
    were shown all at each step."""
    before, hidden, whole = None, None, []

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        nonlocal before, hidden
        groups, columns, is_step = query.shape[1] // key.shape[1], key.shape[2], query.shape[2] == 1
        logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        if attention_mask is None:
            visible = torch.ones(query.shape[2], columns, dtype=torch.bool).tril(columns - query.shape[2])
        else:
            itself = torch.eye(query.shape[2], columns, dtype=torch.bool)  # pads: no NaN
            visible = attention_mask | itself if query.shape[2] > 1 else attention_mask
        if is_step and module.layer_idx >= first:
            visible = visible.expand(len(query), 1, 1, columns) & ~hidden[:, None, None]
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
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
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    config = model.config.get_text_config(decoder=True)
    before_entering = config._attn_implementation
    AttentionInterface.register("hiding_while_decoding", attention)
    AttentionMaskInterface.register("hiding_while_decoding", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = "hiding_while_decoding"
    try:
        yield whole
    finally:
        config._attn_implementation = before_entering


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


def test_dycoke_decodes_rows_of_different_length_as_each_alone_and_reuses_a_prompt():
    model, inputs, _ = video_batch("qwen2-vl", [7, 5])
    with kvcompress.compress(model, "dycoke", 0.6, layer=2) as session:
        tokens, logits = generate(model, inputs, 5)
    solo_model, solo, _ = video_batch("qwen2-vl", [7])
    with kvcompress.compress(solo_model, "dycoke", 0.6, layer=2) as session:
        _, alone = generate(solo_model, solo, 5, forced=tokens[:1])
        first = [layer.memory.attended is not None for layer in session.cache.compressed_layers]
    assert first == [False, True, False, False]
    torch.testing.assert_close(logits[0], alone[0], atol=TOLERANCE, rtol=0)


def test_dycoke_s_layer_must_be_in_the_model():
    model, inputs, _ = video_batch("qwen2-vl", [4])
    error = kvcompress.KVCompressError
    with kvcompress.compress(model, "dycoke", 0.5, layer=4), pytest.raises(error, match=r"layer=4 is not below .* 4 "):
        generate(model, inputs, 1)


def test_the_frames_of_two_videos_in_a_row_leave_out_the_newlines_between_them():
    recorder = FrameRecorder(FAMILIES["llava-onevision"].build())
    recorder.videos = [(2, 3, 1), (2, 3, 1)]  # frames, tokens of each, a newline after the last
    video = recorder.model.config.video_token_id
    ids = torch.tensor([[9, *[video] * 7, 9, 9, *[video] * 7, 9]])
    (videos,) = recorder.take(ids)["frames"]
    assert [frames.tolist() for frames in videos] == [[[1, 2, 3], [4, 5, 6]], [[10, 11, 12], [13, 14, 15]]]


def test_dycoke_cannot_keep_less_than_every_fourth_frame_and_says_so():
    model, inputs, _ = video_batch("qwen2-vl", [4])
    for variant, least in (("code", 0.5), ("paper", 0.25)):
        with kvcompress.compress(model, "dycoke", least, variant=variant) as session:
            generate(model, inputs, 1)
        assert len(kept_columns(session.cache)[0][0]) == inputs["input_ids"].shape[1] - 48 * (1 - least)
    error = kvcompress.KVCompressError
    with (
        kvcompress.compress(model, "dycoke", 0.2),
        pytest.raises(error, match="cannot keep 10 of its 48 vision tokens"),
    ):
        generate(model, inputs, 1)
    model, inputs = batch("qwen2-vl", [40], [1])
    with kvcompress.compress(model, "dycoke", 0.5), pytest.raises(error, match="cannot keep 6 of its 12 vision tokens"):
        generate(model, inputs, 1)


def test_the_tower_s_methods_are_for_images():
    model, inputs, _ = video_batch("llava-onevision", [8])
    with kvcompress.compress(model, "visionzip", 0.5), pytest.raises(kvcompress.KVCompressError, match="no video"):
        generate(model, inputs, 1)


@pytest.mark.parametrize("method", ["fastv", "visionzip"])
def test_beam_search_compresses_as_greedy_search_does(method):
    model, inputs = batch("llava-onevision", [40, 26, 9], [1, 1, 0])
    with kvcompress.compress(model, method, 0.4) as session:
        generate(model, inputs, 1)
        greedy = kept_columns(session.cache)[-1]
        model.generate(**inputs, num_beams=2, do_sample=False, max_new_tokens=1)
    assert kept_columns(session.cache)[-1][::2] == greedy


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen3-vl"])
def test_frames_are_known_also_where_generate_encodes_the_video_before_the_model_runs(family):
    model, inputs, _ = video_batch(family, [7, 5])
    kept = []
    with kvcompress.compress(model, "infinipot-v", 0.3) as session:
        model(**inputs)
        kept.append(session.cache.kept_indices(1))
        generate(model, inputs, 1)
        kept.append(session.cache.kept_indices(1))
        model.generate(**inputs, num_beams=2, do_sample=False, max_new_tokens=1)
        kept.append(session.cache.kept_indices(1)[::2])
    kept = [[[head.tolist() for head in row] for row in rows] for rows in kept]
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("method", ["visionzip", "prumerge+", "vispruner"])
def test_what_the_tower_saw_of_an_earlier_image_is_not_taken_for_the_present_one(method):
    model, inputs = batch("llava-onevision", [40], [1])
    without = {name: inputs[name] for name in ("input_ids", "attention_mask")}  # the image's tokens, no pixels
    with kvcompress.compress(model, method, 0.5):
        model(**inputs)
        with pytest.raises(kvcompress.KVCompressError, match="the vision tower encoded images for 0"):
            model(**without)


@pytest.mark.parametrize("next_too", [False, True], ids=["llava", "llava-next"])
@pytest.mark.parametrize("method", ["visionzip", "prumerge+"])
def test_a_tower_with_a_class_token_is_asked_through_it(method, next_too):
    tower = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    text = {"model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 32}
    config = (LlavaNextConfig if next_too else LlavaConfig)(
        text_config={**text, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0},
        vision_config={**tower, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        image_token_index=1,
        vision_feature_layer=-2,
        **({"image_grid_pinpoints": [[16, 16]]} if next_too else {"image_seq_length": 16}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    patches = 16 + 20 if next_too else 16  # base tile; one tile with a newline after each line
    ids = torch.tensor([[0] * 3 + [9, *[1] * patches, 10, 11], [20, 21, 22, 9, *[1] * patches, 10, 12]])
    pixels = torch.randn(2, *((2,) if next_too else ()), 3, 16, 16, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values": pixels}
    if next_too:
        inputs["image_sizes"] = torch.tensor([[16, 16]] * 2)
    model.model.vision_tower.set_attn_implementation("eager")
    weights = model.model.vision_tower(pixels.flatten(0, -4), output_attentions=True).attentions[-2]
    model.model.vision_tower.set_attn_implementation("sdpa")
    received = weights.double().mean(1)[:, 0, 1:]  # (tiles, patches)
    options = {"contextual": 0.0, "tower_layer": -2} if method == "visionzip" else UNMERGED
    with entering(model, 0) as states, kvcompress.compress(model, method, 0.25, **options) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)
    if method == "prumerge+":
        with hidden_from(model, kept):
            _, expected = generate(model, inputs, NEW, forced=tokens)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        return
    classes = model.model.vision_tower(pixels.flatten(0, -4), output_hidden_states=True).hidden_states[-2][:, :1]
    for row in range(2):
        of_row, tiles = received[row], [row]
        if next_too:
            tiles = [2 * row, 2 * row + 1]
            lines = torch.nn.functional.pad(received[2 * row + 1].view(4, 4), (0, 1), value=-1.0)
            of_row = torch.cat([received[2 * row], lines.flatten()])
        # The first dominant tokens are the tiles' class tokens, in the places of the first dropped patches.
        best = of_row.topk(budget(0.25, patches) - len(tiles)).indices.tolist()
        places = [i for i in range(patches) if i not in best and of_row[i] >= 0][: len(tiles)]
        stays = sorted([*best, *places])
        assert [c - 4 for c in kept[0][row] if 4 <= c < 4 + patches] == stays
        ours = states[0][row, -len(stays) - 2 : -2][[stays.index(i) for i in places]]
        torch.testing.assert_close(ours, model.model.multi_modal_projector(classes[tiles])[:, 0], atol=1e-5, rtol=0)
