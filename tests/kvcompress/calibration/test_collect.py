"""What is gathered over prompts, and how methods score with it."""

import copy
import dataclasses
import math

import pytest
import torch

import kvcompress
from kvcompress.cache.scope import States
from kvcompress.calibration import files
from kvcompress.clusters import make_cluster
from kvcompress.clusters.calibrated import CalibratedKVCluster
from kvcompress.hooks.rotary import watch_rotary
from tests.kvcompress.test_invariants import snapshot
from tests.support.calibrations import calibration_file, text_prompts
from tests.support.families import FAMILIES
from tests.support.kept import kept_of

LENGTHS = (17, 40)


def prompts(family: str) -> list[dict[str, torch.Tensor]]:
    """One with an image and one without, where the family sees."""
    chosen = FAMILIES[family]
    model, images = chosen.build(), ([[1], [0]] if chosen.is_vlm else [None, None])
    return [chosen.inputs(model, [n], of, seed=n) for n, of in zip(LENGTHS, images, strict=True)]


def states_of(model: torch.nn.Module, prompt: dict[str, torch.Tensor]) -> list[tuple[States, kvcompress.LayerView]]:
    """What each layer's attention is handed, with its rotation, and what a cluster is shown of it."""
    cache, found = kvcompress.CompressedCache(model.config), []
    for layer in cache.compressed_layers:

        def note(states, store, layer=layer):
            found.append((states, layer.choice.view(cache.announced, cache.announced.lengths, states, layer.memory)))
            store()

        layer.listen(note)
    with kvcompress.attach(model), torch.no_grad():
        handles = watch_rotary(model.get_decoder(), cache.rotate)
        model(**prompt, past_key_values=cache)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("method", ["triattention", "expected-attention"])
def test_statistics_are_of_all_tokens_of_all_prompts(method):
    """Not of means of prompts: a long one counts more."""
    model, cluster = FAMILIES["qwen2-vl"].build(), make_cluster(method)
    both = kvcompress.calibrate(model, method, prompts("qwen2-vl"))
    assert (both.prompts, both.tokens) == (2, sum(prompt["input_ids"].shape[1] for prompt in prompts("qwen2-vl")))
    skipped = getattr(cluster, "sinks", 0)
    by_prompt = [states_of(model, prompt) for prompt in prompts("qwen2-vl")]
    for layer, mean in enumerate(both.tensors["mean"]):
        parts = [states[layer][0] for states in by_prompt]
        before = torch.cat([part.rotary.unrotated(part.queries)[0, :, skipped:] for part in parts], 1)
        torch.testing.assert_close(mean, before.mean(1), atol=1e-5, rtol=1e-4)
        if method == "triattention":
            norms = torch.complex(*before.chunk(2, -1)).abs().mean(1)
            torch.testing.assert_close(both.tensors["norms"][layer], norms, atol=1e-5, rtol=1e-4)
        else:
            covariance = torch.stack([torch.cov(head.T) for head in before])
            torch.testing.assert_close(both.tensors["covariance"][layer], covariance, atol=1e-5, rtol=1e-4)


def test_the_trigonometric_score_under_m_rope_is_that_of_each_keys_own_angles():
    """Equations of section 4 in a loop over pairs of channels: keys as they were before RoPE, with what they were
    turned by; an image's three positions are in it."""
    model = FAMILIES["qwen2-vl"].build()
    path = calibration_file("triattention", model)
    known = files.load(path).tensors
    states, view = states_of(model, prompts("qwen2-vl")[0])[1]
    ours = make_cluster("triattention", calibration=path, farthest=4).score(
        states.queries, states.keys, states.values, view
    )
    rotary, keys = states.rotary, states.rotary.unrotated(states.keys)[0].double()
    assert rotary.least is not None
    assert (rotary.positions != rotary.least).any()
    turned = torch.atan2(rotary.sin, rotary.cos)[0].double()  # (columns, head_dim)
    last, pairs = int(rotary.positions.max()), keys.shape[2] // 2
    for kv_head in range(2):
        standardised = []
        for head in (2 * kv_head, 2 * kv_head + 1):
            mean, norm = known["mean"][1, head].double(), known["norms"][1, head].double()
            score = torch.zeros(keys.shape[1], dtype=torch.float64)
            for f in range(pairs):
                q = complex(mean[f], mean[f + pairs])
                k = torch.complex(keys[kv_head, :, f], keys[kv_head, :, f + pairs])
                phase = (q * k.conj()).angle() - turned[:, f]
                frequency = float(rotary.inv_freq[f])
                series = sum(torch.cos(frequency * (last + 1 + ahead) + phase) for ahead in (1, 2, 4)) / 3
                score += abs(q) * k.abs() * series + (norm[f] - abs(q)) * k.abs()
            standardised.append((score - score.mean()) / score.std(unbiased=False))
        expected = torch.stack(standardised).amax(0).float()
        torch.testing.assert_close(ours[0, kv_head], expected, atol=1e-3, rtol=1e-3)


def test_a_gate_is_the_attention_that_leaves_sinks_and_window():
    model, sinks, recent = FAMILIES["qwen2"].build(), 2, 5
    given = prompts("qwen2")
    gates = kvcompress.calibrate(model, "duoattention", given, sinks=sinks, recent=recent).tensors["gates"]
    spent, asked = torch.zeros(3, 4), 0
    for prompt in given:
        length = prompt["input_ids"].shape[1]
        for layer, (states, _) in enumerate(states_of(model, prompt)):
            keys = states.keys[0].repeat_interleave(2, 0)
            for query in range(sinks + recent, length):
                logits = states.queries[0, :, query, None] @ keys[:, : query + 1].mT / math.sqrt(keys.shape[2])
                spent[layer] += logits.softmax(-1)[:, 0, sinks : query + 1 - recent].sum(-1)
        asked += max(length - sinks - recent, 0)
    torch.testing.assert_close(gates, (spent / asked).unflatten(1, (2, 2)).amax(2), atol=1e-5, rtol=1e-4)


def test_a_visual_score_is_how_often_a_query_behind_the_image_attends_to_it_most():
    model, given = FAMILIES["qwen2-vl"].build(), prompts("qwen2-vl")
    scores = kvcompress.calibrate(model, "sparsemm", given).tensors["scores"]
    hits = torch.zeros(3, 4)
    for layer, (states, view) in enumerate(states_of(model, given[0])):  # the other has no image
        vision, keys = view.vision[0], states.keys[0].repeat_interleave(2, 0)
        for query in range(int(vision.nonzero().max()) + 1, len(vision)):
            most = (states.queries[0, :, query, None] @ keys[:, : query + 1].mT)[:, 0].argmax(-1)
            hits[layer] += vision[most]
    assert 0 < hits.sum() < hits.numel() * len(vision)
    torch.testing.assert_close(scores, hits / hits.sum())
    with pytest.raises(kvcompress.KVCompressError, match="use prompts with images"):
        kvcompress.calibrate(model, "sparsemm", given[1:])


def test_heads_keep_what_their_visual_scores_say_beyond_their_windows(tmp_path):
    model = FAMILIES["qwen2"].build()
    identity = files.ModelIdentity.of(model.config, 3)
    scores = torch.tensor([[1.0, 2, 0, 1], [3, 3, 1, 1], [0, 0, 4, 4]])  # of query heads; two have a KV head
    path = tmp_path / "scores.safetensors"
    files.save(files.Calibration("sparsemm", identity, {"scores": scores}), path)
    options = {"calibration": str(path), "window_size": 4, "even": 0.1}
    with kvcompress.compress(model, "sparsemm", budget=4 + 20, **options) as session:
        model(**FAMILIES["qwen2"].inputs(model, [90]))
    kept = torch.tensor([[len(head) for head in session.cache.kept_indices(layer)[0]] for layer in range(3)])
    assert kept.sum() == 3 * 2 * 24
    # 2 of 20 are even; 6 x 18 are shared by 20 points of score
    expected = 4 + 2 + 6 * 18 * torch.tensor([[3, 1], [6, 2], [0, 8]]) / 20
    assert ((kept - expected).abs() <= 2).all(), kept


def test_budgets_are_filled_by_sinks_and_recent_tokens_then_by_the_highest_gates(tmp_path):
    model = FAMILIES["qwen2"].build()
    made = kvcompress.calibrate(model, "duoattention", text_prompts(model), sinks=2, recent=4)
    made.tensors["gates"] = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.4]])
    files.save(made, path := tmp_path / "duo.safetensors")
    inputs = FAMILIES["qwen2"].inputs(model, [36])
    # 6 heads: 6 entries each, and 30 more for each of the two highest gates
    with kvcompress.compress(model, "duoattention", budget=16, sinks=2, recent=4, calibration=str(path)) as session:
        model(**inputs)
    streaming, all_ = [0, 1, 32, 33, 34, 35], list(range(36))
    kept = [[head.tolist() for head in session.cache.kept_indices(layer)[0]] for layer in range(3)]
    assert kept == [[streaming, all_], [all_, streaming], [streaming, streaming]]


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_a_weight_of_diversity_is_the_mean_cosine_of_two_keys_the_mean_over_prompts(variant):
    model, given = FAMILIES["qwen2-vl"].build(), prompts("qwen2-vl")
    made = kvcompress.calibrate(model, "mixkv", given, variant=variant, window_size=5)
    expected = torch.zeros(3, 2)
    for prompt in given:
        for layer, (states, _) in enumerate(states_of(model, prompt)):
            keys = states.keys[0][:, : None if variant == "code" else -5]
            cosines = torch.nn.functional.cosine_similarity(keys[:, :, None], keys[:, None], dim=-1)
            rows, columns = torch.tril_indices(*cosines.shape[1:], -1)
            expected[layer] += cosines[:, rows, columns].mean(1) / 2
    torch.testing.assert_close(made.tensors["weights"], expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(kvcompress.KVCompressError, match="every prompt is too short to compare two keys"):
        kvcompress.calibrate(model, "mixkv", given, variant="paper", window_size=39)


def kept_columns(model: torch.nn.Module, inputs: dict, method: str, ratio: float, **options) -> list:
    with kvcompress.compress(model, method, ratio, **options) as session:
        model(**inputs)
    return [head.tolist() for layer in kept_of(session.cache) for head in layer[0]]


@pytest.mark.parametrize("method", ["mixkv", "prefixkv"])
def test_what_was_gathered_over_a_prompt_keeps_of_it_what_the_prompt_itself_says(method, tmp_path):
    model = FAMILIES["qwen2"].build()
    (prompt,) = text_prompts(model, 1, 100)
    made = kvcompress.calibrate(model, method, [prompt])
    files.save(made, path := tmp_path / "prompt.safetensors")
    for ratio in (0.03, 0.5, 0.75, 1.0):
        known = kept_columns(model, prompt, method, ratio, calibration=str(path))
        assert known == kept_columns(model, prompt, method, ratio)
    files.save(dataclasses.replace(made, tensors={name: 1 - part for name, part in made.tensors.items()}), path)
    known = kept_columns(model, prompt, method, 0.5, calibration=str(path))
    assert known != kept_columns(model, prompt, method, 0.5)


def test_layer_sizes_are_means_over_prompts_in_between_they_are_interpolated(tmp_path):
    model, sizes = FAMILIES["qwen2"].build(), []
    for prompt in text_prompts(model, 2, 50):
        made = kvcompress.calibrate(model, "prefixkv", [prompt])
        assert made.tensors["sizes"].shape == (3, 100)
        torch.testing.assert_close(made.tensors["sizes"].mean(0), torch.arange(1, 101) / 100, atol=1 / 290, rtol=0)
        sizes.append(made.tensors["sizes"])
    both = kvcompress.calibrate(model, "prefixkv", text_prompts(model, 2, 50))
    torch.testing.assert_close(both.tensors["sizes"], sum(sizes) / 2)
    both.tensors["sizes"] = torch.tensor([[0.2, 1.0], [0.6, 1.0], [0.7, 1.0]])  # at ratios 1/2 and 1
    files.save(both, path := tmp_path / "sizes.safetensors")
    inputs = FAMILIES["qwen2"].inputs(model, [100])
    for ratio, expected in ((0.5, [20, 60, 70]), (0.75, [60, 80, 85]), (0.1, [4, 12, 14])):
        with kvcompress.compress(model, "prefixkv", ratio, calibration=str(path)) as session:
            model(**inputs)
            assert not session.cache.policy.layer_budget.is_measured  # no layer waits for the others
        assert [len(session.cache.kept_indices(layer)[0][0]) for layer in range(3)] == expected


def test_known_layer_sizes_go_with_no_other_layer_budget():
    model = FAMILIES["qwen2"].build()
    file = {"calibration": calibration_file("prefixkv", model)}
    message = "layer_budget='{}' does not go with calibration=: the file says what each layer keeps"
    with pytest.raises(kvcompress.KVCompressError, match=message.format("uniform")):
        kvcompress.compress(model, "prefixkv", 0.3, layer_budget="uniform", **file)
    with pytest.raises(kvcompress.KVCompressError, match=message.format("pyramid")):
        kvcompress.compress(model, "pyramidkv", 0.3, scorer="prefixkv", **file)


def test_a_model_is_untouched_by_a_calibration_also_after_an_exception():
    model = FAMILIES["qwen2"].build()
    given = text_prompts(model)
    model(**given[0])
    before = snapshot(model)
    kvcompress.calibrate(model, "triattention", given)
    assert snapshot(model) == before
    with pytest.raises(KeyError):
        kvcompress.calibrate(model, "triattention", [*given, {}])
    assert snapshot(model) == before


def test_a_model_that_is_being_trained_is_measured_without_dropout_and_goes_on():
    model = copy.deepcopy(FAMILIES["qwen2"].build())  # tests share it
    given = text_prompts(model)
    expected = kvcompress.calibrate(model, "q-filters", given).tensors["filters"]
    model.train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(kvcompress.calibrate(model, "q-filters", given).tensors["filters"], expected)
    with pytest.raises(KeyError):
        kvcompress.calibrate(model, "q-filters", [{}])
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    ("method", "options", "count", "message"),
    [
        ("snapkv", {}, 1, "method 'snapkv' is not calibrated; calibrated methods: adamixkv, duoattention, "),
        ("q-filters", {"sinks": 1}, 1, "method 'q-filters' has no option 'sinks'"),
        ("q-filters", {"calibration": "x"}, 1, "calibration= is the result of calibrating"),
        ("q-filters", {}, 0, "there is no prompt to calibrate on"),
        ("duoattention", {}, 1, r"no prompt has more than sinks \+ recent = 320 tokens"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(method, options, count, message):
    model = FAMILIES["qwen2"].build()
    with pytest.raises(kvcompress.KVCompressError, match=message):
        kvcompress.calibrate(model, method, text_prompts(model)[:count], **options)


def test_a_batch_is_no_prompt():
    model = FAMILIES["qwen2"].build()
    with pytest.raises(kvcompress.KVCompressError, match="a batch of one, not of 2"):
        kvcompress.calibrate(model, "q-filters", [FAMILIES["qwen2"].inputs(model, [9, 9])])


def test_a_method_that_gathers_nothing_cannot_be_calibrated(registry):
    @kvcompress.register_method("test-gathers-nothing")
    @dataclasses.dataclass(frozen=True)
    class IdleKVCluster(CalibratedKVCluster):
        def score(self, queries, keys, values, view):
            return keys.norm(dim=-1)

    model = FAMILIES["qwen2"].build()
    with pytest.raises(TypeError, match="IdleKVCluster does not define gather"):
        kvcompress.calibrate(model, "test-gathers-nothing", text_prompts(model))


@pytest.mark.parametrize(
    ("gathered", "said"),
    [
        (lambda keys: None, "Wrong.gather returned None: it must be a dict of tensors"),
        (lambda keys: [keys], r"Wrong.gather returned \[tensor\(.*: it must be a dict of tensors"),
        (lambda keys: {"mean": 3.0}, "Wrong.gather returned {'mean': 3.0}: it must be a dict of tensors"),
        (lambda keys: {"mean": keys.mul_(0.5)}, "Wrong.gather changes what it is given in place: use copies"),
    ],
)
def test_what_is_gathered_wrongly_is_one_line(gathered, said, registry):
    gather = {"gather": lambda self, queries, keys, values, view: gathered(keys)}
    kvcompress.register_method("wrong-gather")(type("Wrong", (CalibratedKVCluster,), gather))
    model = FAMILIES["llama"].build()
    with pytest.raises(kvcompress.KVCompressError, match=f"^{said}$") as caught:
        kvcompress.calibrate(model, "wrong-gather", text_prompts(model, 1))
    assert "\n" not in str(caught.value)


def test_a_tensor_that_a_calibration_lacks_is_named():
    model = FAMILIES["llama"].build()
    cluster = make_cluster("q-filters", calibration=calibration_file("q-filters", model))
    with pytest.raises(
        kvcompress.KVCompressError, match=r"^QFiltersKVCluster: calibrated has no tensor 'filter' \(did"
    ):
        cluster.known_whole("filter")
