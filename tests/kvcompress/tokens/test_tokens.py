"""Token methods: vision tokens dropped before or inside the language model, so that the prefill gets shorter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.hooks.video_frames import FrameRecorder
from kvcompress.policy.make import make_policy
from kvcompress.policy.options import all_options
from kvcompress.tokens import Tokens
from tests.support.answers import attending_by
from tests.support.examples import paired
from tests.support.families import FAMILIES, MORE_FAMILIES, VLM_FAMILIES
from tests.support.token_methods import (
    IMAGES,
    LENGTHS,
    NEW,
    TOLERANCE,
    VIDEO_FAMILIES,
    as_hidden,
    assert_rows_as_alone,
    batch,
    budget,
    full_attention,
    hidden_from,
    kept_columns,
    of_video,
    video_batch,
    vision_of,
)

METHODS = sorted(
    name
    for name, info in kvcompress.list_methods().items()
    if issubclass(info.cls, kvcompress.TokenMethod) and info.cls.sees not in ("frames", "video")
)
CASES = [(method, family) for family in VLM_FAMILIES for method in ("fastv", "sparsevlm")]
CASES += [(method, "llava-onevision") for method in ("visionzip", "prumerge+", "vispruner")]
CASES += [(method, family) for family in ("qwen2.5-vl", "internvl") for method in ("divprune", "cdpruner")]


@pytest.mark.parametrize(("family", "ratio"), paired([*VLM_FAMILIES, *MORE_FAMILIES.keys() & {"molmo2"}], [0.05, 0.5]))
def test_fastv_equals_the_full_model_in_which_dropped_tokens_are_hidden_from_layer_k_on(family, ratio):
    model, inputs = batch(family)
    kept = as_hidden(model, inputs, "fastv", ratio).kept
    assert len(kept[1][0]) > len(kept[2][0])


@pytest.mark.parametrize(("family", "ratio"), paired(list(VLM_FAMILIES), [0.4, 0.8]))
@pytest.mark.parametrize(
    ("method", "options"),
    [("dart", {"layer": 1}), ("pyramiddrop", {}), ("random-tokens", {}), ("sparsevlm", {"recycle": 0.0})],
)
def test_what_is_dropped_is_hidden_text_stays_and_a_row_alone_keeps_the_same(method, options, family, ratio):
    """Which tokens stay: tests/oracle/authors/test_token_methods.py."""
    model, inputs = batch(family, layers=12)
    kept = as_hidden(model, inputs, method, ratio, **options).kept
    assert_rows_as_alone(model, family, inputs, method, ratio, **options)
    text = inputs["attention_mask"].bool() & ~vision_of(inputs)
    for columns, of_row in zip(kept[-1], text, strict=True):
        assert set(of_row.nonzero()[:, 0].tolist()) <= set(columns)


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.5, 0.7, 1.0]))
@pytest.mark.parametrize(("method", "options"), [("dycoke", {"decode_drop": 0.0}), ("vidcom2", {})])
def test_what_is_dropped_of_a_video_is_hidden_and_the_budget_is_exact(method, options, family, ratio):
    kept, _, of_frames = of_video(method, family, ratio, **options)
    newline = int(family == "llava-onevision")
    for row, columns in enumerate(of_frames):
        shown = {column for frame in columns for column in frame}
        assert len(shown & set(kept[row])) == budget(ratio, len(shown) + newline) - newline


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


@pytest.mark.parametrize(
    ("method", "family", "ratio"), [(*case, ratio) for case, ratio in paired(CASES, [0.1, 0.3, 0.6])]
)
def test_a_row_alone_keeps_the_same_tokens_and_has_the_same_logits(method, family, ratio):
    model, inputs = batch(family)
    assert_rows_as_alone(model, family, inputs, method, ratio)


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
    as_hidden(model, inputs, "fastv", 0.3, **options)


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


@pytest.mark.parametrize("family", ["internvl", *MORE_FAMILIES.keys() & {"molmo2"}])
def test_of_an_image_in_a_later_prompt_too_what_is_dropped_is_hidden(family):
    model, inputs = batch(family, [30], [1])
    with kvcompress.compress(model, "fastv", 0.5) as session:
        generate(model, {"input_ids": inputs["input_ids"][:, :3]}, 1)
        tokens, logits = generate(model, inputs, NEW, past_key_values=session.cache)
    kept = kept_columns(session.cache)
    with hidden_from(model, kept):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert len(kept[1][0]) > len(kept[2][0])


@pytest.mark.parametrize(("lengths", "images"), [([40], [1]), (LENGTHS, IMAGES)], ids=["one row", "padded"])
@pytest.mark.parametrize("implementation", ["eager", "flash_attention_2"])
@pytest.mark.parametrize("method", ["fastv", "sparsevlm"])
def test_other_attention_implementations_and_sdpa_agree(method, implementation, lengths, images, fake_flash_attn):
    model, inputs = batch("qwen2-vl", lengths, images)
    with kvcompress.compress(model, method, 0.3):
        tokens, expected = generate(model, inputs, NEW)
    with attending_by(model, {"text_config": implementation}), kvcompress.compress(model, method, 0.3):
        _, logits = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_no_hook_is_left_in_the_language_model_behind_the_prompt(method):
    """A decode step pays nothing."""
    model, inputs = batch("llava-onevision", [40], [1])
    parts = list(model.get_decoder().modules())
    before = [(len(part._forward_pre_hooks), len(part._forward_hooks)) for part in parts]
    with kvcompress.compress(model, method, 0.5):
        generate(model, inputs, 1)
        assert [(len(part._forward_pre_hooks), len(part._forward_hooks)) for part in parts] == before


def test_the_last_token_stays_also_where_it_is_a_vision_token():
    model, inputs = batch("qwen2-vl", [40], [1])
    end = int(vision_of(inputs)[0].nonzero().max()) + 1
    cut = {name: tensor[:, :end] if tensor.shape[:2] == (1, 40) else tensor for name, tensor in inputs.items()}
    with kvcompress.compress(model, "fastv", 0.1) as session:
        generate(model, cut, 2)
    assert kept_columns(session.cache)[3][0][-2:] == [end - 1, end]  # the only vision token, and the decoded one
    assert int(vision_of(inputs)[0, kept_columns(session.cache)[3][0][:-1]].sum()) == 1


def test_the_last_token_stays_where_it_is_of_a_frame_that_loses_tokens():
    model, inputs, ((*_, last),) = video_batch("qwen2-vl", [4])
    end = int(last[-1]) + 1
    shape = inputs["input_ids"].shape
    cut = {name: part[:, :end] if part.shape == shape else part for name, part in inputs.items()}
    for seed in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model.get_input_embeddings().weight.data.normal_()
            cut["pixel_values_videos"] = torch.randn_like(cut["pixel_values_videos"])
        with kvcompress.compress(model, "dycoke", 0.6, decode_drop=0) as session:
            generate(model, cut, 1)
        assert end - 1 in kept_columns(session.cache)[0][0]


def test_a_row_whose_whole_budget_fits_is_left_as_it_is():
    model, inputs = batch("llava-onevision")  # 14, 14, 10 and 0 vision tokens
    assert_rows_as_alone(model, "llava-onevision", inputs, "prumerge+", None, budget=12)


@dataclass(frozen=True)
class Counts(kvcompress.list_methods()["divprune"].cls):
    """Notes the budgets that it is told."""

    def prepare(self, tokens):
        self.seen.append(tokens.budgets)

    def score(self, tokens):
        self.seen.append(tokens.budgets)
        return torch.zeros(tokens.vision.shape)


@pytest.mark.parametrize("sees", ["embeddings", "attention"])
def test_a_method_is_told_how_many_tokens_stay(sees, registry):
    more = {"seen": [], "sees": sees, "layers": lambda self, num_layers: [int(sees == "attention")]}
    kvcompress.register_method("counts")(cls := dataclass(frozen=True)(type("Own", (Counts,), more)))
    model, inputs = batch("llava-onevision", [60, 41], [1, 2])
    with kvcompress.compress(model, "counts", 0.3):
        generate(model, inputs, 1)
    assert cls.seen == [[4, 3]] * 2


@pytest.mark.parametrize("given", [lambda vision: None, lambda vision: vision[:, 1:], lambda vision: vision[..., None]])
def test_scores_of_another_shape_or_kind_are_one_line(given):
    method, vision = kvcompress.list_methods()["fastv"].cls(), torch.ones(2, 9, dtype=torch.bool)
    tokens = Tokens(vision, None, [3, 3], vision[..., None].float())
    with pytest.raises(kvcompress.KVCompressError, match=r"^FastV.score returned .*: it must be a tensor .* \(2, 9\)$"):
        method.choose(given(vision), tokens)


def test_nan_scores_are_one_line_unless_they_are_of_text():
    method, vision = kvcompress.list_methods()["fastv"].cls(), torch.tensor([[False, True, True, True, False]])
    tokens = Tokens(vision, None, [1], vision[..., None].float())
    scores = torch.tensor([[torch.nan, 1, 3, 2, torch.nan]])
    assert method.choose(scores, tokens)[0].nonzero().tolist() == [[0, 2]]
    with pytest.raises(
        kvcompress.KVCompressError, match=r"^FastV.score returned NaN, 1 of 5 numbers: NaN has no rank$"
    ):
        method.choose(scores.roll(1, 1), tokens)


class Chooses(kvcompress.TokenMethod):
    """Chooses before layer 1, by `given`."""

    def layers(self, num_layers):
        return [1]

    def score(self, tokens):
        return tokens.last_attention()

    def choose(self, scores, tokens):
        return type(self).given(scores, tokens)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda scores, tokens: tokens.best(scores), r"\(2, 60\)"),
        (lambda scores, tokens: (tokens.best(scores), None), r"\(\(2, 60\), 'NoneType'\)"),
        (lambda scores, tokens: (tokens.best(scores)[:, 1:], tokens.hidden), r"\(\(2, 59\), \(2, 60, \d+\)\)"),
        (lambda scores, tokens: (tokens.best(scores).float(), tokens.hidden), r"\(\(2, 60\), \(2, 60, \d+\)\)"),
    ],
)
def test_a_choice_of_another_shape_or_kind_is_one_line(given, said, registry):
    kvcompress.register_method("chooses")(dataclass(frozen=True)(type("Chooses", (Chooses,), {"given": given})))
    model, inputs = batch("llava-onevision", [60, 41], [1, 2])
    with (
        kvcompress.compress(model, "chooses", 0.3),
        pytest.raises(
            kvcompress.KVCompressError,
            match=rf"^Chooses.choose returned {said}: it must be a tensor of bool and the hidden states, \(\(2, 60\), ",
        ),
    ):
        generate(model, inputs, 1)


def test_text_stays_whether_a_choice_names_it_or_not(registry):
    """Also the numbers of tokens that stay are right."""
    best = {
        "vision": lambda scores, tokens: (tokens.best(scores), tokens.hidden),
        "both": lambda scores, tokens: (tokens.best(scores) | ~tokens.vision, tokens.hidden),
    }
    model, inputs = batch("llava-onevision", [60, 41], [1, 2])
    logits = []
    for name, given in best.items():
        kvcompress.register_method(name)(dataclass(frozen=True)(type(name, (Chooses,), {"given": given})))
        with kvcompress.compress(model, name, 0.3):
            logits.append(generate(model, inputs, 1)[1])
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("method", "option"), [("fastv", "layer"), ("dart", "layer"), ("dycoke", "layer"), ("holitom", "inner_layer")]
)
def test_a_layer_that_the_model_lacks_is_one_clear_line(method, option):
    model, inputs, _ = video_batch("llava-onevision", [8])
    error = pytest.raises(kvcompress.KVCompressError, match=f"{option}=4 is not below the model's 4 layers")
    with kvcompress.compress(model, method, 0.5, **{option: 4}), error:
        generate(model, inputs, 1)


@pytest.mark.parametrize(
    ("method", "ratio", "said"),
    [
        ("dycoke", 0.2, "cannot keep 10 of its 48 vision tokens"),
        ("evs", 0.2, "cannot keep 10 of .* stay, 12 tok"),
        ("framefusion", 0.25, r"12 of 48 vision tokens.* in row 0 the first 1 layers hold 48"),
        ("pyramiddrop", 0.2, r"mean of 10 of 48 .* 4 layers .*: 1 layers hold all of"),
    ],
)
def test_less_than_must_stay_of_a_video_is_one_line(method, ratio, said):
    model, inputs, _ = video_batch("qwen2-vl", [4])
    with kvcompress.compress(model, method, ratio), pytest.raises(kvcompress.KVCompressError, match=said):
        generate(model, inputs, 1)


@pytest.mark.parametrize("method", ["dycoke", "evs", "fastvid", "holitom", "vidcom2"])
def test_of_an_image_a_method_for_videos_keeps_all_or_says_that_it_does_not_fit(method):
    model, inputs = batch("llava-onevision", [40], [1])
    error = pytest.raises(kvcompress.KVCompressError, match=f"{method}: row 0 cannot keep 7 of its 14 vision tokens")
    with kvcompress.compress(model, method, 0.5), error:
        generate(model, inputs, 1)


def test_what_only_the_model_can_tell_is_an_error_too():
    model, inputs = batch("qwen2-vl", [40], [1])
    error = kvcompress.KVCompressError
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


def test_the_frames_of_two_videos_in_a_row_leave_out_the_newlines_between_them():
    recorder = FrameRecorder(FAMILIES["llava-onevision"].build())
    recorder.videos = [(2, 3, 1), (2, 3, 1)]  # frames, tokens of each, a newline after the last
    video = recorder.model.config.video_token_id
    ids = torch.tensor([[9, *[video] * 7, 9, 9, *[video] * 7, 9]])
    (videos,) = recorder.take(ids)["frames"]
    assert [frames.tolist() for frames in videos] == [[[1, 2, 3], [4, 5, 6]], [[10, 11, 12], [13, 14, 15]]]


@pytest.mark.parametrize("method", ["fastv", "visionzip"])
def test_beam_search_compresses_as_greedy_search_does(method):
    model, inputs = batch("llava-onevision", [40, 26, 9], [1, 1, 0])
    with kvcompress.compress(model, method, 0.4) as session:
        generate(model, inputs, 1)
        greedy = kept_columns(session.cache)[-1]
        model.generate(**inputs, num_beams=2, do_sample=False, max_new_tokens=1)
    assert kept_columns(session.cache)[-1][::2] == greedy


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dycoke", {"ratio": 0.6, "layer": 2}),
        ("evs", {"preset": "q70"}),
        ("framefusion", {"ratio": 0.4, "similarity": 0.0}),
        ("vidcom2", {"preset": "r25"}),
    ],
)
def test_videos_of_different_length_in_a_batch_decode_as_each_alone(method, options):
    model, inputs, _ = video_batch("qwen2.5-vl", [7, 5])
    with kvcompress.compress(model, method, **options):
        tokens, logits = generate(model, inputs, NEW)
    model, solo, _ = video_batch("qwen2.5-vl", [7])
    with kvcompress.compress(model, method, **options):
        _, alone = generate(model, solo, NEW, forced=tokens[:1])
    torch.testing.assert_close(logits[0], alone[0], atol=TOLERANCE, rtol=0)
