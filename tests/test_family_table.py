"""Every model family, and the table in docs/families.md that says what was checked on which."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    DynamicCache,
    Ernie4_5_VLMoeConfig,
    FalconH1Config,
    GPTNeoConfig,
    GraniteConfig,
    LlavaConfig,
    MistralConfig,
    MptConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    VipLlavaConfig,
    cache_utils,
)

import kvcompress
from kvcompress.check.reference import generate, hidden_from
from kvcompress.check.token_promises import kept_columns
from kvcompress.scoring.vision import frame_tokens
from tests import family_table
from tests.family_table import (
    ALL_FAMILIES,
    HYBRID,
    METHODS,
    OTHER_METHODS,
    check,
    check_chunks,
    check_extra,
    check_other,
    chunked_kinds_of,
    extras_of,
    kept_of,
    kinds_of,
)
from tests.support import families
from tests.support.examples import every_third
from tests.support.families import FIRST_TEXT, IMAGE, MORE_FAMILIES, VIDEO, Family

# The seven of FAMILIES have the property tests; here one method each for the others, all of it in the slow test. Where
# there are videos, these are rows without pads, and images are in the batches.
SOME = [
    (name, kind, METHODS[(row + column) % len(METHODS)])
    for row, (name, family) in enumerate(MORE_FAMILIES.items())
    for column, kind in enumerate(kinds_of(family))
    if kind not in (("text", "two images", "image") if family.video else ("text", "two images"))
]
EVERY = [
    (name, kind, method) for name, family in ALL_FAMILIES.items() for kind in kinds_of(family) for method in METHODS
]


def unless(few: list[tuple], cases: list[tuple]) -> list:
    """For `parametrize`: all cases; those that are not among the few are slow."""
    return [pytest.param(*case, marks=() if case in few else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("family", "kind", "method"), unless(SOME[::3], EVERY))
def test_identity_budget_bytes_and_masked_reference(family, kind, method):
    check(ALL_FAMILIES[family], kind, method)


OTHERS = [(name, method) for name in ALL_FAMILIES for method in OTHER_METHODS]
# Each method on one family, each family with one method or more.
FEW = [(list(ALL_FAMILIES)[row % len(ALL_FAMILIES)], method) for row, method in enumerate(OTHER_METHODS)]


@pytest.mark.parametrize(("family", "method"), unless(FEW, OTHERS))
def test_every_other_method_is_lossless_at_one_and_keeps_its_budget(family, method):
    check_other(ALL_FAMILIES[family], method)


EXTRAS = [(name, extra) for name, family in ALL_FAMILIES.items() for extra in extras_of(family)]


@pytest.mark.parametrize(("family", "extra"), every_third(EXTRAS))
def test_what_needs_full_attention_works_or_is_refused_in_one_line(family, extra):
    check_extra(ALL_FAMILIES[family], extra)


# The last kind is the one with most in it: video, else images.
FULLEST = [(name, chunked_kinds_of(ALL_FAMILIES[name])[-1]) for name in list(ALL_FAMILIES)[::3]]
CHUNKED = [(name, kind) for name, family in ALL_FAMILIES.items() for kind in chunked_kinds_of(family)]


@pytest.mark.parametrize(("family", "kind"), unless(FULLEST, CHUNKED))
def test_prompts_in_chunks_are_those_in_one_piece_and_keep_their_budget_or_are_refused(family, kind):
    check_chunks(ALL_FAMILIES[family], kind)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_a_gemma_without_images_takes_chunks_through_its_sliding_windows(name, monkeypatch):
    text_only = Family(f"{name}-text", lambda text: MORE_FAMILIES[name].make_config(text).text_config, layers=4)
    monkeypatch.setitem(families.MORE_FAMILIES, text_only.name, text_only)
    check_chunks(text_only, "text, batch of 3")
    check_extra(text_only, "kvzip")


def test_the_table_names_the_checks():
    assert family_table.PAGE.read_text() == family_table.page_with(family_table.render())


def test_every_family_has_a_row():
    assert set(family_table.TITLES) == set(family_table.ROWS)


def vip_llava(text: dict) -> VipLlavaConfig:
    return VipLlavaConfig(
        text_config={"model_type": "llama", **text},
        vision_config=MORE_FAMILIES["llava-1.5"].make_config(text).vision_config,
        image_token_index=IMAGE,
        image_seq_length=families.SMALL_TOKENS,
        vision_feature_layers=[-1, -2],
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (Family("granite", lambda text: GraniteConfig(**text)), "text, batch of 3"),
        (Family("olmo2", lambda text: Olmo2Config(**text)), "text, batch of 3"),
        (Family("vip-llava", vip_llava, "small"), "images, batch of 3"),
    ],
    ids=lambda given: getattr(given, "name", None),
)
def test_a_family_that_is_not_listed_works_if_its_attention_goes_through_the_interface(family, kind, monkeypatch):
    monkeypatch.setitem(families.MORE_FAMILIES, family.name, family)
    check(family, kind, "snapkv")


def ernie_vl(text: dict) -> Ernie4_5_VLMoeConfig:
    """Vision tokens have experts of their own."""
    return Ernie4_5_VLMoeConfig(
        text_config={
            **text,
            **families.EXPERTS,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [32, 32],
            "moe_num_shared_experts": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
        vision_config={**families.QWEN_TOWER, "patch_size": 14},
        image_token_id=IMAGE,
    )


def ministral_3(text: dict) -> LlavaConfig:
    """Queries are scaled by their position."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8}
    return LlavaConfig(
        text_config={
            **text,
            "model_type": "ministral3",
            "head_dim": families.HEAD_DIM,
            "rope_parameters": {**rope, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        vision_config=MORE_FAMILIES["llava-1.5"].make_config(text).vision_config,
        image_token_index=IMAGE,
    )


@pytest.mark.parametrize("make", [ernie_vl, ministral_3])
def test_a_token_method_shortens_everything_that_a_layer_gets_for_each_token(make, monkeypatch):
    """Which tokens are an image's, and their positions."""
    family = Family(make.__name__, make, "small")
    monkeypatch.setitem(families.MORE_FAMILIES, family.name, family)
    model = family.build()
    inputs = family.inputs(model, [30, 22])
    ids = inputs["input_ids"]
    ids[:, 11:19] = IMAGE
    if make is ernie_vl:
        inputs["moe_mm_token_type_ids"] = (ids == IMAGE).int()
    with kvcompress.compress(model, "fastv", 0.5, layer=1) as session:
        tokens, logits = generate(model, inputs, 3)
    with hidden_from(model, kept_columns(session.cache)):
        _, expected = generate(model, inputs, 3, tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert session.cache.realised_ratios()[1][0] < 1


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]),
        MptConfig(vocab_size=50, d_model=16, n_heads=2, n_layers=1),
    ],
    ids=lambda config: config.model_type,
)
def test_a_family_that_bypasses_the_interface_is_an_error_before_anything_runs(config):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        kvcompress.KVCompressError,
        match=f"{type(model).__name__} is not supported: its decoder's attention does not go through transformers' "
        "attention interface",
    ):
        kvcompress.compress(model, "snapkv", 0.5)


def test_an_encoder_decoder_model_is_an_error_before_anything_runs():
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(kvcompress.KVCompressError, match="an encoder-decoder model, whose prompt is not in"):
        kvcompress.compress(T5ForConditionalGeneration(config), "snapkv", 0.5)


def test_a_model_whose_layers_have_other_states_beside_full_attention_is_an_error_that_says_so():
    config = FalconH1Config(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(kvcompress.KVCompressError, match=r"alone \(LinearAttentionAndFullAttentionLayer"):
        kvcompress.CompressedCache(config, "snapkv", 0.5)


@pytest.mark.skipif(not hasattr(cache_utils, "DynamicIndexedLayer"), reason="not in this transformers")
@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_a_model_in_which_some_layers_choose_their_keys_is_an_error(method):
    """Such a layer hides the other keys only under transformers' own attention, so that all would be seen."""
    config = Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "indexed_attention"])
    with pytest.raises(kvcompress.KVCompressError, match="some of its layers choose the keys that they attend to"):
        kvcompress.CompressedCache(config, method, 1.0)


def test_a_model_that_masks_each_head_differently_is_an_error():
    """While it decodes, its mask was ignored."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = DogeForCausalLM(DogeConfig(**sizes, intermediate_size=32, keep_window_size=8)).eval()
    with (
        kvcompress.compress(model),
        pytest.raises(kvcompress.KVCompressError, match="DogeAttention masks each head differently"),
    ):
        model.generate(torch.arange(5, 30)[None], max_new_tokens=2)


def test_a_mistral_with_a_sliding_window_in_every_layer_is_an_error():
    config = MistralConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, sliding_window=8)
    with pytest.raises(kvcompress.KVCompressError, match="mistral model has no layer with full attention"):
        kvcompress.CompressedCache(config, "snapkv", 0.5)


@pytest.mark.parametrize(
    ("method", "options", "what"),
    [("snapkv", {"ratio_of": "vision"}, "ratio_of='vision'"), ("fastv", {}, "method 'fastv'")],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen2-audio"])
def test_what_chooses_among_vision_tokens_is_refused_where_there_are_none(name, method, options, what):
    """Not kept whole without a word. Recordings are no vision tokens."""
    family = MORE_FAMILIES[name]
    model = family.build()
    with (
        kvcompress.compress(model, method, 0.3, **options),
        pytest.raises(
            kvcompress.KVCompressError,
            match=rf"{what} chooses among image and video tokens: the config of a qwen.* model names none",
        ),
    ):
        generate(model, family.inputs(model, [20]), 2)


@pytest.mark.parametrize("storage", ["static", "offloaded"])
@pytest.mark.parametrize("name", HYBRID)
def test_other_storages_give_the_same_logits_beside_layers_that_are_not_compressed(name, storage):
    family = MORE_FAMILIES[name]
    model, inputs = family.build(), family.inputs(family.build(), [40, 20], [1, 1])
    with kvcompress.compress(model, "snapkv", 0.3):
        tokens, expected = generate(model, inputs, 3)
    with kvcompress.compress(model, "snapkv", 0.3, cache_implementation=storage, max_new_tokens=3):
        _, logits = generate(model, inputs, 3, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_llama_3_2_vision_compresses_its_self_attention_only():
    """The keys of an image, in layer 1, stay as they are: nothing of them is dropped, nor counted as text."""
    family = MORE_FAMILIES["mllama"]
    model, inputs = family.build(), family.inputs(family.build(), [40, 20], [2, 1])
    with kvcompress.compress(model, "snapkv", 0.2) as session:
        generate(model, inputs, 3)
    cache = session.cache
    assert [layer is None for layer in kept_of(cache)] == [False, True, False, False]
    full = DynamicCache(config=model.config)
    generate(model, inputs, 3, past_key_values=full)
    assert torch.equal(cache.layers[1].keys, full.layers[1].keys)
    assert len(cache.kept_indices(0)[0][0]) == 8 + 2
    with kvcompress.compress(model, "snapkv", 0.2) as session:  # text only: layer 1 never runs
        generate(model, family.inputs(model, [20]), 3)
    assert session.cache.layers[1].get_seq_length() == 0


@pytest.mark.parametrize("name", HYBRID)
def test_reuse_restores_layers_that_are_not_compressed_too(name):
    """Two questions about one prompt get the answers that each gets alone."""
    family = ALL_FAMILIES[name]
    model = family.build()
    context = family.inputs(model, [30], [1])
    words = torch.arange(FIRST_TEXT, FIRST_TEXT + 10)
    with kvcompress.compress(model, "snapkv", 0.5) as session:
        model(**context)
        seen = context["input_ids"].shape[1]
        answers = []
        for question in (words, words.flip(0), words):
            ids = torch.cat([context["input_ids"], question[None]], 1)
            with session.reuse() as cache:
                answers.append(generate_after(model, ids, cache))
                assert cache.seen_tokens > seen
            assert session.cache.seen_tokens == seen
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])


def generate_after(model: torch.nn.Module, ids: torch.Tensor, cache: kvcompress.CompressedCache) -> torch.Tensor:
    """Logits of the tokens that follow `ids`, of which the cache has seen the first."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return generate(model, inputs, 4, past_key_values=cache)[1]


def test_the_frames_of_a_llava_next_video_are_known():
    family = MORE_FAMILIES["llava-next-video"]
    ids = family.video_inputs()["input_ids"]
    assert int((ids == VIDEO).sum()) == families.FRAMES
    assert frame_tokens(family.build().config, ids, None) == (1,)


@pytest.mark.parametrize(
    ("name", "tokens"), [("qwen3.5", 4), ("glm4v", 4), ("gemma4", 4), ("qwen3-omni", 4), ("molmo2", 0)]
)
def test_the_frames_of_a_video_are_known_or_known_to_be_unknown(name, tokens):
    if name not in ALL_FAMILIES:
        pytest.skip("not in this transformers")
    inputs = ALL_FAMILIES[name].video_inputs()
    config = ALL_FAMILIES[name].build().config
    assert frame_tokens(config, inputs["input_ids"], inputs.get("video_grid_thw")) == (tokens,)


@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
def test_the_lines_of_an_image_are_no_frames(name):
    model = ALL_FAMILIES[name].build()
    inputs = ALL_FAMILIES[name].inputs(model, [40], [2])
    assert frame_tokens(model.config, inputs["input_ids"], None) == (0,)


@pytest.mark.parametrize("method", ["dycoke", "evs", "framefusion", "vidcom2"])
@pytest.mark.parametrize("name", ["pixtral", "glm4v", "molmo2", "llava-1.5", "smolvlm", "llava-next-video"])
def test_dropping_frames_is_refused_where_a_prompt_does_not_tell_them(name, method):
    if name not in ALL_FAMILIES:
        pytest.skip("not in this transformers")
    family = ALL_FAMILIES[name]
    inputs = family.video_inputs() if family.video else family.inputs(family.build(), [40], [2])
    with (
        kvcompress.compress(family.build(), method, 0.5, **({"layer": 1} if method == "dycoke" else {})),
        pytest.raises(kvcompress.KVCompressError, match=r"the frames of a video are unknown in a \w+ model"),
    ):
        generate(family.build(), inputs, 2)


def test_methods_that_look_at_the_tower_are_refused_where_it_rotates_its_queries():
    with pytest.raises(kvcompress.KVCompressError, match="no access to the vision tower's attention of a pixtral"):
        kvcompress.compress(MORE_FAMILIES["pixtral"].build(), "visionzip", 0.5)


def test_a_llava_onevision_from_the_original_layout_is_the_model_that_was_saved():
    saved, loaded = (ALL_FAMILIES[name].build() for name in ("llava-onevision", "llava-onevision-original"))
    assert saved is not loaded
    ours, theirs = loaded.state_dict(), saved.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("image_grid_pinpoints", "vision_aspect_ratio", "vision_feature_layer", "image_token_index"):
        assert getattr(loaded.config, name) == getattr(saved.config, name)


def test_compression_finds_the_thinker_in_a_whole_qwen3_omni():
    family = MORE_FAMILIES["qwen3-omni"]
    thinker, inputs = family.build(), family.inputs(family.build(), [40], [1])
    config = Qwen3OmniMoeConfig(thinker_config=copy.deepcopy(thinker.config), enable_audio_output=False)
    whole = Qwen3OmniMoeForConditionalGeneration(config).eval()
    whole.thinker.load_state_dict(thinker.state_dict())
    with kvcompress.compress(thinker, "snapkv", 0.3) as alone:
        generate(thinker, inputs, 3)
    with kvcompress.compress(whole, "snapkv", 0.3) as session:
        whole.generate(**inputs, thinker_max_new_tokens=3, thinker_eos_token_id=None, return_audio=False)
    kept, expected = kept_of(session.cache), kept_of(alone.cache)
    assert [[head.tolist() for head in layer[0]] for layer in kept] == [
        [head.tolist() for head in layer[0]] for layer in expected
    ]


@pytest.mark.parametrize("name", ["gemma3", "minicpm-v", "qwen3.5"])
def test_bytes_count_the_states_of_every_layer(name):
    family = ALL_FAMILIES[name]
    model = family.build()
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        generate(model, family.inputs(model, [30]), 3)
    cache = session.cache
    other = family_table.held_bytes(cache) - sum(layer.nbytes for layer in cache.compressed_layers)
    assert other > 0
    assert cache.nbytes == sum(layer.nbytes for layer in cache.compressed_layers) + other
