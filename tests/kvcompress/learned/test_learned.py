"""Methods whose scores are predicted from hidden states: the promises that hold for every method, for each of them on
tiny random checkpoints; and their scores against loops over the layers' real inputs."""

import math
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import kvcompress
from kvcompress.check.command import failure
from kvcompress.check.promises import PROMISES, NotAsked
from kvcompress.check.reference import generate
from kvcompress.learned import checkpoints
from kvcompress.policy.conflicts import PAGES, TENSOR_PARALLEL, check_conflicts
from kvcompress.policy.make import make_policy
from tests import fuzz
from tests.support.calibrations import checked
from tests.support.families import FAMILIES
from tests.support.kept import kept_of
from tests.support.learned_checkpoints import checkpoint_for, write_kvzap
from tests.support.strategies import LEARNED, Case

NEW = 3
each_method = pytest.mark.parametrize("method", LEARNED)
EVEN = {"layer_budget": "uniform", "head_budget": "uniform"}
SMALL = {"kvzap": {"recent": 4}, "fastkvzip": {}}


def case_of(method: str, family: str, lengths=(33, 21), heads=(4, 2), ratio=0.3, seed=0, **options: object) -> Case:
    images = (1, *[0] * (len(lengths) - 1)) if FAMILIES[family].is_vlm and lengths[0] > 20 else None
    model = FAMILIES[family].build(3, *heads)
    options = {**SMALL[method], "checkpoint": checkpoint_for(method, model), **options}
    return Case(FAMILIES[family], heads, lengths, images, method, tuple(options.items()), ratio, seed)


@each_method
@pytest.mark.parametrize("promise", PROMISES)
def test_the_promises_of_kvcompress_check(method, promise):
    with suppress(NotAsked):
        assert failure(PROMISES[promise], checked(method, **SMALL[method])) == ""


def inputs_of_layers(model, inputs) -> list[torch.Tensor]:
    """What each attention layer is given in a forward pass, (columns, hidden)."""
    seen, hooks = [], []

    def note(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"])[0].double())

    for module in model.modules():
        if hasattr(module, "o_proj"):
            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def plain_kvzap(weights: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    weights = {name: part.double() for name, part in weights.items()}
    if "weight" in weights:
        return (hidden @ weights["weight"].T + weights["bias"]).T
    inner = hidden @ weights["0.weight"].T + weights["0.bias"]
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    return (inner @ weights["2.weight"].T + weights["2.bias"]).T


@each_method
def test_under_autocast_scores_are_predicted_in_dtypes_of_their_own(method, monkeypatch):
    case, is_autocast = case_of(method, "qwen2"), []
    cls = kvcompress.list_methods()[method].cls
    predict = cls.hidden_features

    def noting(*args):
        is_autocast.append(torch.is_autocast_enabled("cpu"))
        return predict(*args)

    monkeypatch.setattr(cls, "hidden_features", noting)
    with torch.autocast("cpu", torch.bfloat16), case.compress():
        generate(case.model, case.inputs, NEW)
    assert is_autocast
    assert not any(is_autocast)


FREE = {"kvzap": {"recent": 0}, "fastkvzip": {"sinks": 0, "window_ratio": 0.0}}  # nothing is protected but a last token


def held_after(scores: list[float], prompt: int, case: Case, options: dict) -> list[int]:
    """The columns that last, of one head: the best of each chunk and what was held, then the same at each eviction."""

    def best(columns: list[int], room: int) -> list[int]:
        return sorted(sorted(columns, key=lambda column: scores[column], reverse=True)[:room])

    held, size = [], options.get("prefill_chunk", prompt)
    stops = range(prompt, 0, -size)[::-1]
    for start, stop in zip([0, *stops], stops, strict=False):
        held = best([*held, *range(start, stop)], math.floor(case.ratio * stop + 0.5))
    for step, column in enumerate(range(prompt, len(scores)), 1):
        held.append(column)
        if "decode_budget" in options and step % options["decode_interval"] == 0:
            held = best(held, options["decode_budget"])
    return held


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk": 9}, {"decode_budget": 11, "decode_interval": 3}],
    ids=["prompt", "chunks", "steps"],
)
@pytest.mark.parametrize("family", ["qwen2", "llava-onevision"])
def test_the_highest_scores_last_in_a_prompt_chunk_by_chunk_and_while_decoding(family, options):
    """In the first layer, whose inputs are the tokens' own, whatever was dropped before. What fastkvzip's gates give:
    tests/oracle/authors/test_learned.py."""
    case = case_of("kvzap", family, (40,), **FREE["kvzap"], **EVEN)
    model, inputs = case.model, case.inputs
    with case.compress(**options) as session:
        tokens, _ = generate(model, inputs, 8)
    ids = torch.cat([inputs["input_ids"], tokens[:, :-1]], 1)
    hidden = inputs_of_layers(model, {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)})[0]
    weights = checkpoints.kvzap(dict(case.options)["checkpoint"]).layers[0]
    for scores, kept in zip(plain_kvzap(weights, hidden), session.cache.kept_indices(0)[0], strict=True):
        assert kept.tolist() == held_after(scores.tolist(), 40, case, options)


def test_every_layer_has_its_own_weights_and_inputs():
    case = case_of("kvzap", "qwen2", (40,), **FREE["kvzap"], **EVEN)
    with case.compress() as session:
        generate(case.model, case.inputs, 1)
    layers = checkpoints.kvzap(dict(case.options)["checkpoint"]).layers
    for layer, hidden in enumerate(inputs_of_layers(case.model, case.inputs)):
        heads = plain_kvzap(layers[layer], hidden)
        for scores, kept in zip(heads, session.cache.kept_indices(layer)[0], strict=True):
            assert kept.tolist() == held_after(scores.tolist(), 40, case, {})


@each_method
@pytest.mark.parametrize("how", ["trained again", "another folder"])
def test_a_checkpoint_that_changed_under_its_name_is_read_again(method, how, tmp_path, monkeypatch):
    case = case_of(method, "qwen2")
    first = Path(checkpoint_for(method, case.model))
    save = checkpoints.save_kvzap if method == "kvzap" else checkpoints.save_fastkvzip
    load = checkpoints.kvzap if method == "kvzap" else checkpoints.fastkvzip
    layers = load(str(first)).layers
    for name, factor in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        save([{key: factor * part for key, part in each.items()} for each in layers], tmp_path / name / first.name)
    monkeypatch.chdir(tmp_path / "one")
    weights = load(first.name).layers[0]
    if how == "another folder":
        monkeypatch.chdir(tmp_path / "other")
    else:
        (tmp_path / "one" / first.name).rename(tmp_path / "before")
        (tmp_path / "other" / first.name).rename(tmp_path / "one" / first.name)
    for key, part in load(first.name).layers[0].items():
        assert torch.equal(part, 2 * weights[key])
    assert load(first.name) is load(first.name)


def test_fast_kvzip_keeps_sinks_and_a_part_of_the_tokens_at_the_end():
    case = case_of("fastkvzip", "qwen2", (40, 27), sinks=3, window_ratio=0.15, **EVEN)
    with case.compress() as session:
        generate(case.model, case.inputs, 1)
    for layer in kept_of(session.cache):
        for heads, first, window in zip(layer, (0, 13), (6, 4), strict=True):
            for kept in heads:
                assert {*range(first, first + 3), *range(40 - window, 40)} <= set(kept.tolist())


def test_a_linear_surrogate_is_read_as_well(tmp_path):
    model = FAMILIES["qwen2"].build()
    write_kvzap(tmp_path / "linear", 3, model.config.hidden_size, 2, None)
    case = case_of("kvzap", "qwen2", (40,), checkpoint=str(tmp_path / "linear"), recent=0)
    with case.compress() as session:
        generate(model, case.inputs, 1)
    weights, hidden = checkpoints.kvzap(str(tmp_path / "linear")).layers[2], inputs_of_layers(model, case.inputs)[2]
    for scores, kept in zip(plain_kvzap(weights, hidden), session.cache.kept_indices(2)[0], strict=True):
        assert kept.tolist() == held_after(scores.tolist(), 40, case, {})


@each_method
@pytest.mark.parametrize(
    "options",
    [
        {"scope": "context", "context_tokens": 25},
        {"first_token": "compressed"},
        {"first_token": "compressed", "decode_budget": 9, "decode_interval": 2},
        {"decode_budget": 7, "decode_interval": 2},
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded", "decode_budget": 9},
        {"merge": "average"},
    ],
    ids=str,
)
def test_a_row_is_as_alone_with_the_options_of_the_engine_and_in_flight(method, options):
    options = {"ratio": 0.3, "checkpoint": checkpoint_for(method, FAMILIES["qwen2"].build()), **FREE[method], **options}
    slots = 0 if options.get("cache_implementation") == "offloaded" else 2
    fuzz.check({**fuzz.of_rows("qwen2", [40, 33], method, **options), "slots": slots})


# -- what is refused


def refusal(*args: object, **kwargs: object) -> str:
    with pytest.raises(kvcompress.KVCompressError) as caught:
        kvcompress.compress(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@each_method
def test_without_a_checkpoint_that_fits_there_is_one_line(method, tmp_path):
    model = FAMILIES["qwen2"].build()
    assert "needs checkpoint=, a local path or a hub id" in refusal(model, method, 0.3)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    broken = tmp_path if method == "kvzap" else tmp_path / "model.safetensors"
    assert "is not a" in refusal(model, method, 0.3, checkpoint=str(broken))
    assert "there is no file" in refusal(model, method, 0.3, checkpoint=str(tmp_path / "nowhere"))
    for other, heads, what in ((FAMILIES["qwen2"].build(2), None, "layers: 2"), (None, (6, 2), "hidden size: ")):
        other = other or FAMILIES["qwen2"].build(3, *heads)
        theirs = checkpoint_for(method, other)
        assert what in refusal(model, method, 0.3, checkpoint=theirs)
    checkpoint = checkpoint_for(method, model)
    with pytest.raises(kvcompress.KVCompressError, match="trained for another model"):
        kvcompress.CompressedCache(FAMILIES["qwen2"].build(2).config, method, 0.3, checkpoint=checkpoint)


@each_method
def test_what_looks_at_queries_and_pages_are_refused(method):
    options = {"checkpoint": checkpoint_for(method, FAMILIES["qwen2"].build())}
    for rule in ("cake", "sparsity", "variance"):
        with pytest.raises(kvcompress.KVCompressError, match="it looks at queries"):
            make_policy(method, 0.3, layer_budget=rule, **options)
    with pytest.raises(kvcompress.KVCompressError, match="chooses for all heads together"):
        check_conflicts(make_policy(method, 0.3, **options), TENSOR_PARALLEL)
    with pytest.raises(kvcompress.KVCompressError, match="it reads hidden states"):
        check_conflicts(make_policy(method, 0.3, **options, **EVEN), PAGES)


def test_a_cache_outside_a_session_does_not_know_hidden_states():
    model = FAMILIES["qwen2"].build()
    cache = kvcompress.CompressedCache(model.config, "kvzap", 0.3, checkpoint=checkpoint_for("kvzap", model))
    states = torch.randn(1, 2, 9, 8)
    cache.start(1, 9, None, None)
    cache.update(states, states, 0)
    with pytest.raises(kvcompress.KVCompressError, match="does not know its hidden states"):
        cache.layers[0].after_attention(torch.randn(1, 4, 9, 8), 0.3, torch.nn.Module())
