"""Static shapes: the same answers, one graph, no recompilation."""

import pytest
import torch
from transformers import CompileConfig

import kvcompress
from kvcompress.check.reference import generate
from tests.support.calibrations import calibration_of
from tests.support.examples import some
from tests.support.families import FAMILIES
from tests.support.storages import beside_dynamic

STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize(
    ("method", "family"), [("full", "qwen2"), ("snapkv", "qwen2-vl"), ("adakv", "llava-onevision")]
)
def test_static_equals_dynamic_where_entries_lie(method, family, as_on_cuda):
    logits, expected, _ = beside_dynamic(family, method, 0.3, max_new_tokens=8, **STATIC)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", some(["snapkv", "pyramidkv", "full"], ["pyramidkv"]))
def test_24_decode_steps_are_one_graph_with_the_tokens_of_eager(method):
    model = FAMILIES["qwen2"].build(2)
    inputs = FAMILIES["qwen2"].inputs(model, [40])
    ratio = None if method == "full" else 0.3
    with kvcompress.compress(model, method, ratio, **calibration_of(method, model)):
        expected, _ = generate(model, inputs, 25)
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(error_on_recompile=True),
        kvcompress.compress(
            model, method, ratio, max_new_tokens=25, **STATIC, **calibration_of(method, model)
        ) as session,
    ):
        logits = model(**inputs).logits
        cache = session.cache

        @torch.compile(fullgraph=True, backend="eager")
        def decode(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return model(input_ids=token, position_ids=position, past_key_values=cache).logits

        tokens = [logits[:, -1:].argmax(-1)]
        for step in range(24):
            tokens.append(decode(tokens[-1], torch.tensor([[40 + step]]))[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(tokens, 1), expected)


@pytest.mark.slow
def test_generate_compiles_the_decode_step_itself():
    """transformers' own compile path, which it takes by itself on a GPU, made to run on the CPU."""
    model = FAMILIES["qwen2"].build(2)
    inputs = FAMILIES["qwen2"].inputs(model, [40, 31])
    with kvcompress.compress(model, "snapkv", 0.3):
        expected, _ = generate(model, inputs, 20)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(fullgraph=True, dynamic=False, backend="inductor", mode="default")
    config._compile_all_devices = True
    cache = kvcompress.CompressedCache(model.config, "snapkv", 0.3, max_new_tokens=20, **STATIC)
    with kvcompress.attach(model):
        tokens, _ = generate(model, inputs, 20, past_key_values=cache, compile_config=config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert torch.equal(tokens, expected)
    del model._compiled_call


@pytest.mark.parametrize(("kind", "is_compiled"), [("static", False), ("static", True), ("offloaded_static", False)])
@pytest.mark.parametrize(
    ("options", "lengths"), [({}, [40]), ({"first_token": "compressed"}, [40, 31])], ids=["", "compressed"]
)
def test_generate_ends_with_one_line_before_a_step_without_room(options, lengths, kind, is_compiled):
    """A compiled step writes into the buffers without looking; on a GPU, behind a head's own."""
    model = FAMILIES["qwen2"].build(1)
    inputs = FAMILIES["qwen2"].inputs(model, lengths)  # `generate` drops a mask without pads
    config = CompileConfig(fullgraph=True, backend="eager", mode="default")
    config._compile_all_devices = is_compiled
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options |= {"max_new_tokens": 6, "cache_implementation": kind}
    caches = [kvcompress.CompressedCache(model.config, "snapkv", 0.3, **options) for _ in range(2)]
    most = 7 - ("first_token" in options)  # the last is not fed; the prompt's last may be fed again
    with kvcompress.attach(model):
        tokens, _ = generate(model, inputs, most, past_key_values=caches[0], compile_config=config)
        assert tokens.shape[1] == most
        with pytest.raises(kvcompress.KVCompressError, match="room for max_new_tokens=6"):
            generate(model, inputs, most + 1, past_key_values=caches[1], compile_config=config)
    assert not caches[1].is_broken
    assert [int(cache.compressed_layers[0].storage.appended) for cache in caches] == [6, 6]
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == is_compiled
    vars(model).pop("_compiled_call", None)


def test_a_second_prompt_may_be_longer_than_the_room():
    """It moves, with what was stored, into buffers that have as much room again."""
    model = FAMILIES["qwen2"].build(1)
    inputs = FAMILIES["qwen2"].inputs(model, [60, 51])
    with kvcompress.compress(model, "snapkv", 0.3, max_new_tokens=6, **STATIC) as session:
        model(**{name: part[:, :40] for name, part in inputs.items()})
        with session.reuse() as cache:
            tokens, _ = generate(model, inputs, 7, past_key_values=cache)
    assert tokens.shape == (2, 7)


@pytest.mark.slow
def test_prompts_of_other_lengths_compile_once_more_and_then_never():
    model = FAMILIES["qwen2"].build(1)
    config = CompileConfig(fullgraph=True, backend="eager", mode="default")  # `dynamic` as transformers leaves it
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in (30, 41, 52, 37, 63):
        inputs = FAMILIES["qwen2"].inputs(model, [length])
        with kvcompress.compress(model, "snapkv", 0.3):
            expected, _ = generate(model, inputs, 6)
        cache = kvcompress.CompressedCache(model.config, "snapkv", 0.3, max_new_tokens=6, **STATIC)
        with kvcompress.attach(model):
            tokens, _ = generate(model, inputs, 6, past_key_values=cache, compile_config=config)
        assert torch.equal(tokens, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    del model._compiled_call


@pytest.mark.parametrize("family", ["qwen2", "qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_steps_and_prompts_without_a_mask_are_as_on_a_dynamic_cache(family):
    """A model with M-RoPE then asks the cache itself for the next position."""
    model, token, more = FAMILIES[family].build(), torch.tensor([[20]]), torch.arange(30, 36)[None]
    inputs = FAMILIES[family].inputs(model, [50], [1] if FAMILIES[family].is_vlm else None)
    outcomes = []
    for options in ({}, STATIC):
        with kvcompress.compress(model, "snapkv", 0.3, max_new_tokens=9, **options) as session, torch.no_grad():
            model(**inputs)
            parts = [model(ids, past_key_values=session.cache).logits[:, -1] for ids in (token, token, more, token)]
        outcomes.append(torch.cat(parts))
    torch.testing.assert_close(*outcomes, atol=1e-4, rtol=0)


def test_static_buffers_hold_the_kept_entries_and_the_room():
    model = FAMILIES["qwen2"].build()
    with kvcompress.compress(model, "snapkv", 0.2, max_new_tokens=9, **STATIC) as session:
        generate(model, FAMILIES["qwen2"].inputs(model, [50]), 9)
    assert session.cache.layers[0].storage.keys.shape == (1, 2, 10 + 9, 16)


@pytest.mark.parametrize(("kind", "unused"), [("static", 1), ("offloaded_static", 0)])
def test_what_is_stored_again_has_room_once(kind, unused):
    """A prompt's last token is forgotten and fed again; in fixed shapes its slot stays."""
    model = FAMILIES["qwen2"].build()
    options = {"max_new_tokens": 9, "cache_implementation": kind, "first_token": "compressed"}

    def capacity() -> int:
        storage = session.cache.layers[0].storage
        return getattr(storage, "inner", storage).keys.shape[2]

    with kvcompress.compress(model, "snapkv", 0.2, **options) as session:
        generate(model, FAMILIES["qwen2"].inputs(model, [50]), 4)
        assert capacity() == 9 + unused + 9
        with torch.no_grad():
            model(torch.arange(60, 70)[None], past_key_values=session.cache)
        assert capacity() == 9 + 4 + 1 + 2 * unused + 9


def test_all_layers_count_with_one_tensor_which_a_fork_and_a_later_prompt_have_of_their_own():
    model = FAMILIES["qwen2"].build()

    def counts() -> list[torch.Tensor]:
        return [layer.storage.appended for layer in session.cache.layers]

    with kvcompress.compress(model, "pyramidkv", 0.3, max_new_tokens=9, **STATIC) as session:
        generate(model, FAMILIES["qwen2"].inputs(model, [50]), 4)
        first = counts()
        assert all(count is first[0] for count in first)
        assert first[0].tolist() == [3]
        with session.reuse() as cache:
            model(torch.tensor([[5]]), past_key_values=cache)
            forked = counts()
        assert all(count is forked[0] for count in forked)
        assert (forked[0].tolist(), first[0].tolist()) == ([4], [3])
        assert session.cache.seen_tokens == 53
        model(torch.arange(60, 70)[None], past_key_values=session.cache)
        assert all(count is counts()[0] for count in counts())
        assert (counts()[0].tolist(), session.cache.seen_tokens) == ([0], 63)
