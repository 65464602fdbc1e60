"""Inside a session a generation is compressed; whatever is not, and would pass for it, is one line of an error."""

import copy
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    GenerationConfig,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import kvcompress
from kvcompress import CompressedCache, KVCompressError
from kvcompress.cache_name import CACHE, NAMES
from kvcompress.check.reference import generate, only_attending_to
from kvcompress.hooks import attention
from tests.support.answers import attending_by
from tests.support.families import FAMILIES, MORE_FAMILIES
from tests.support.kept import kept_lists, kept_of

FAMILY = FAMILIES["qwen2"]
MODEL = FAMILY.build()
INPUTS = FAMILY.inputs(MODEL, [40, 31])
TOKEN = torch.tensor([[20], [21]])
TOLERANCE = 1e-4  # fp32, logits of order 1
STATIC = {"cache_implementation": "static", "max_new_tokens": 8}


def compress(model: PreTrainedModel = MODEL, method: str = "adakv", **options) -> kvcompress.Session:
    return kvcompress.compress(model, method, 0.3, window_size=4, **options)


def new_cache(**options) -> CompressedCache:
    return CompressedCache(MODEL.config, "adakv", 0.3, window_size=4, **options)


def step(call: Callable, cache: CompressedCache, count: int = 0) -> torch.Tensor:
    """Logits (batch, vocabulary) of TOKEN as the `count`-th after INPUTS."""
    positions = torch.tensor([[40 + count], [31 + count]])
    return call(input_ids=TOKEN, past_key_values=cache, position_ids=positions).logits[:, -1]


@torch.no_grad()
def answer(model: torch.nn.Module, steps: int = 3, **options) -> torch.Tensor:
    """Logits (steps + 1, batch, vocabulary) of INPUTS followed by TOKEN, repeatedly."""
    with compress(model, **options) as session:
        logits = [model(**INPUTS).logits[:, -1]]
        return torch.stack([*logits, *(step(model, session.cache, count) for count in range(steps))])


def on_the_full_cache(kept: list) -> torch.Tensor:
    """What `step` should return where `kept` is attended to."""
    cache = DynamicCache(config=MODEL.config)
    mask = torch.cat([INPUTS["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    with torch.no_grad(), only_attending_to(MODEL, kept):
        MODEL(**INPUTS, past_key_values=cache)
        positions = torch.tensor([[40], [31]])
        return MODEL(TOKEN, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "quantized", "kv_backend": "turboquant"}],
    ids=["ragged", "turboquant"],
)
def test_a_decode_step_whose_gradient_is_asked_for_has_it(options):
    """Kernels that attend to entries where they lie have none."""
    model = copy.deepcopy(MODEL).requires_grad_(True)
    with compress(model, **options) as session:
        with torch.no_grad():
            model(**INPUTS)
        logits = step(model, session.cache)
        (gradient,) = torch.autograd.grad(logits.sum(), model.model.layers[0].self_attn.q_proj.weight)
    assert gradient.abs().max() > 0
    torch.testing.assert_close(logits.detach(), answer(model, 1, **options)[1], atol=1e-4, rtol=1e-4)


# -- a cache, and the context that it belongs to


@pytest.mark.parametrize("options", [{}, {"method": "snapkv"}, STATIC], ids=["ragged", "dense", "static"])
def test_a_cache_is_not_decoded_outside_of_the_context(options):
    with torch.no_grad():
        with compress(**options) as session:
            MODEL(**INPUTS)
            inside = step(MODEL, session.cache)
        for tokens in (TOKEN, TOKEN.repeat(1, 3)):
            with pytest.raises(KVCompressError, match=r"only where the model itself is called inside"):
                MODEL(tokens, past_key_values=session.cache)
        assert session.cache.seen_tokens == 41
        with kvcompress.attach(MODEL):  # nothing was stored: it goes on where it was
            assert not torch.equal(step(MODEL, session.cache, 1), inside)
        assert session.cache.seen_tokens == 42


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_forward_pass_whose_context_another_thread_leaves_raises(layer):
    arrived, left, errors = threading.Event(), threading.Event(), []

    def wait(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        arrived.set()
        left.wait(10)

    def decode() -> None:
        try:
            with torch.no_grad():
                step(MODEL, session.cache)
        except KVCompressError as error:
            errors.append(str(error))

    with torch.no_grad(), compress() as session:
        MODEL(**INPUTS)
        handle = MODEL.model.layers[layer].self_attn.register_forward_pre_hook(wait, with_kwargs=True)
        thread = threading.Thread(target=decode)
        thread.start()
        arrived.wait(10)
    left.set()
    thread.join()
    handle.remove()
    assert len(errors) == 1
    assert "in the middle of a forward pass" in errors[0]


@pytest.mark.parametrize("when", ["before the prompt", "before a step"])
def test_an_attention_implementation_set_inside_is_used_and_stays(when):
    model = copy.deepcopy(MODEL)
    with torch.no_grad(), compress(model) as session:
        if when == "before the prompt":
            model.set_attn_implementation("eager")
        model(**INPUTS)
        kept = kept_of(session.cache)
        model.set_attn_implementation("eager")
        output = model(TOKEN, past_key_values=session.cache, position_ids=torch.tensor([[40], [31]]))
        with pytest.raises(KVCompressError, match="already being compressed"), compress(model):
            pass
        weights = model(TOKEN, past_key_values=session.cache, output_attentions=True).attentions
    torch.testing.assert_close(output.logits[:, -1], on_the_full_cache(kept), atol=TOLERANCE, rtol=0)
    assert len(weights) == 3  # as only eager returns them
    assert model.config._attn_implementation == "eager"


def test_the_attention_of_a_tower_whose_config_is_inside_the_decoders_is_left_as_it_is():
    size = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = {**size, "embed_dim": 32, "image_size": 16, "patch_size": 8}
    text = {**size, "vocab_size": 128, "additional_vocab_size": 0, "hidden_size": 32, "cross_layer_interval": 2}
    model = IdeficsForVisionText2Text(IdeficsConfig(**text, use_resampler=False, vision_config=tower)).eval()
    model.set_attn_implementation({"": "sdpa", "vision_config": "eager"})
    ids = torch.arange(10, 40)[None]
    seen = {"pixel_values": torch.rand(1, 1, 3, 16, 16), "image_attention_mask": torch.ones(1, 30, 1)}
    with torch.no_grad():
        expected = model(ids, **seen).logits
        with kvcompress.compress(model):
            assert model.config.vision_config._attn_implementation == "eager"
            assert torch.equal(model(ids, **seen).logits, expected)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_pass_that_goes_around_the_hooks_is_no_silent_full_cache(family):
    model = (FAMILIES | MORE_FAMILIES)[family].build()
    inputs = (FAMILIES | MORE_FAMILIES)[family].inputs(model, [20])
    with torch.no_grad(), kvcompress.compress(model, "snapkv", 0.3) as session:
        with pytest.raises(KVCompressError, match="bypassed kvcompress"):
            model.forward(**inputs)
        with pytest.raises(KVCompressError, match="bypassed kvcompress"):
            kvcompress.hooks.model.text_decoder(model)(input_ids=inputs["input_ids"])
        model(**inputs)
        with pytest.raises(KVCompressError, match="only where the model itself is called"):
            kvcompress.hooks.model.text_decoder(model)(torch.tensor([[20, 21]]), past_key_values=session.cache)
    assert not attention.connected


def test_a_model_from_a_config_that_was_copied_in_the_context_is_no_half_compressed_one():
    with compress():
        other = type(MODEL)(copy.deepcopy(MODEL.config)).eval()
    other.load_state_dict(MODEL.state_dict())
    with pytest.raises(KVCompressError, match="config was copied inside"):
        other(**INPUTS)
    other.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(other(**INPUTS).logits, MODEL(**INPUTS).logits)


def test_continuous_batching_is_refused_with_what_to_use():
    with compress(), pytest.raises(KVCompressError, match=r"use kvcompress\.paged\.compress"):
        MODEL.generate_batch([[8, 9, 10]], generation_config=GenerationConfig(max_new_tokens=1))


def test_a_model_that_attends_twice_with_the_same_keys_is_an_error():
    config = DiffLlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = DiffLlamaForCausalLM(config).eval()
    with pytest.raises(KVCompressError, match=r"attends twice|attention interface"), compress(model):
        model(**INPUTS)


def test_a_pass_that_makes_no_use_of_the_cache_is_an_error():
    model = copy.deepcopy(MODEL).requires_grad_(True).train()
    model.gradient_checkpointing_enable()
    with compress(model), pytest.raises(KVCompressError, match="made no use of its KV cache"):
        model(**INPUTS)


def test_a_trainer_that_turned_the_cache_off_is_named(tmp_path):
    model = copy.deepcopy(MODEL)
    Trainer(model, TrainingArguments(tmp_path, report_to=[], use_cpu=True))
    with compress(model), pytest.raises(KVCompressError, match=r"TrainingArguments\(use_cache=True\)"):
        model(**INPUTS)


@pytest.mark.parametrize("options", [{}, STATIC], ids=["ragged", "static"])
def test_dropout_in_train_mode_is_also_one_while_decoding(options):
    model = copy.deepcopy(MODEL)
    with torch.no_grad(), compress(model, **options) as session:
        model(**INPUTS)
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.9
        logits = []
        for _ in range(2):
            with session.reuse() as cache:
                logits.append(step(model, cache))
    assert not torch.allclose(*logits, atol=1e-2)


# -- a cache that does not fit


@pytest.mark.parametrize("tokens", [torch.tensor([[20]]), torch.arange(20, 25)[None], torch.arange(20, 26).view(3, 2)])
@pytest.mark.parametrize("method", ["adakv", "snapkv"])
def test_another_batch_size_in_the_second_call_is_an_error(method, tokens):
    with torch.no_grad(), compress(method=method) as session:
        MODEL(**FAMILY.inputs(MODEL, [40, 40]))
        with pytest.raises(KVCompressError, match=f"holds 2 rows, the input has {len(tokens)}"):
            MODEL(tokens, past_key_values=session.cache)


@pytest.mark.parametrize("layers", [2, 4])
def test_a_cache_that_was_made_for_another_model_is_an_error(layers):
    cache = CompressedCache(FAMILY.build(layers).config, "pyramidkv", 0.3)
    with kvcompress.attach(MODEL), pytest.raises(KVCompressError, match="made for another model"):
        MODEL(**INPUTS, past_key_values=cache)
    equal = CompressedCache(copy.deepcopy(MODEL.config), "pyramidkv", 0.3)
    with kvcompress.attach(MODEL):
        MODEL(**INPUTS, past_key_values=equal)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_filled_cache_is_not_continued_in_another_model(tokens):
    with torch.no_grad(), compress() as session:
        MODEL(**INPUTS)
    more = torch.arange(20, 20 + 2 * tokens).view(2, tokens)
    for other, what in ((copy.deepcopy(MODEL), "filled by another model"), (FAMILY.build(2), "made for another model")):
        with torch.no_grad(), kvcompress.attach(other), pytest.raises(KVCompressError, match=what):
            other(more, past_key_values=session.cache)
    with torch.no_grad(), kvcompress.attach(MODEL):
        MODEL(more, past_key_values=session.cache)  # it is as it was


def test_a_loop_over_a_cache_of_transformers_goes_on_with_the_outputs_cache():
    expected = answer(MODEL, 1)[1]
    with torch.no_grad(), compress() as session:
        given = DynamicCache(config=MODEL.config)
        output = MODEL(**INPUTS, past_key_values=given)
        with pytest.raises(KVCompressError, match=r"has stayed empty.*the output's past_key_values"):
            MODEL(TOKEN, past_key_values=given)
        assert output[CACHE] is session.cache
        assert torch.equal(step(MODEL, output[CACHE]), expected)
        MODEL(**INPUTS, past_key_values=DynamicCache(config=MODEL.config))


def test_an_offloaded_cache_of_transformers_is_not_silently_one_in_gpu_memory():
    given = DynamicCache(config=MODEL.config)
    given.offloading = True  # which its own constructor allows only beside an accelerator
    with compress(), pytest.raises(KVCompressError, match=r"is an offloaded cache.*cache_implementation="):
        MODEL(**INPUTS, past_key_values=given)


def test_a_cache_for_the_text_model_alone_knows_no_images_and_is_an_error():
    model = FAMILIES["llava-onevision"].build()
    cache = CompressedCache(model.config.text_config, "look-m", 0.3)
    with kvcompress.attach(model), pytest.raises(KVCompressError, match="made for another model"):
        model(**FAMILIES["llava-onevision"].inputs(model, [40], [1]), past_key_values=cache)


def test_a_later_prompts_mask_may_not_hide_what_is_in_the_cache():
    more = torch.arange(20, 30).view(2, 5)
    mask = torch.cat([INPUTS["attention_mask"], torch.ones(2, 6, dtype=torch.long)], 1)
    logits = []
    with torch.no_grad(), compress() as session:
        MODEL(**INPUTS)
        step(MODEL, session.cache)
        positions = torch.arange(5) + torch.tensor([[41], [32]])
        for given in (mask, mask[:, -5:], None):
            with session.reuse() as cache:
                logits.append(MODEL(more, attention_mask=given, position_ids=positions, past_key_values=cache).logits)
        for hidden in (0, 12, 40):  # in the prompt, of a row without pads, and the answer
            hole = mask.clone()
            hole[0, hidden] = 0
            with pytest.raises(KVCompressError, match="hides tokens that are in the cache"):
                MODEL(more, attention_mask=hole, past_key_values=session.cache)
        with pytest.raises(KVCompressError, match=r"has 44 columns: a prompt of 5 .* takes 46 of them, or 5"):
            MODEL(more, attention_mask=mask[:, 2:], past_key_values=session.cache)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_nor_may_a_mask_of_each_token_hide_it_or_a_new_token_before():
    inputs, more = FAMILY.inputs(MODEL, [40, 40]), torch.arange(20, 30).view(2, 5)
    mask = torch.ones(2, 1, 5, 45, dtype=torch.bool).tril(40)
    logits = []
    with torch.no_grad(), compress() as session:
        MODEL(**inputs)
        for given in (None, mask, torch.zeros(mask.shape).masked_fill(~mask, -1e9)):
            with session.reuse() as cache:
                logits.append(MODEL(more, attention_mask=given, past_key_values=cache).logits)
        for token, hidden in ((0, 12), (4, 0), (3, 41)):
            hole = mask.clone()
            hole[0, :, token, hidden] = False
            with pytest.raises(KVCompressError, match="hides tokens"):
                MODEL(more, attention_mask=hole, past_key_values=session.cache)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_a_prompt_that_generate_would_split_is_an_error(monkeypatch):
    """Each piece would be compressed as a prompt of its own."""
    splits = GenerationConfig(max_new_tokens=2, prefill_chunk_size=8)
    refused = pytest.raises(KVCompressError, match=r"give compress\(\.\.\.\) prefill_chunk=")
    with compress():
        for given in ({"max_new_tokens": 2, "prefill_chunk_size": 8}, {"generation_config": splits}):
            with refused:
                MODEL.generate(**INPUTS, **given)
        with refused:
            MODEL.generate(INPUTS["input_ids"], splits)
        monkeypatch.setattr(MODEL, "generation_config", splits)
        with refused:  # transformers takes from the model's what a config leaves open
            MODEL.generate(**INPUTS, generation_config=GenerationConfig(max_new_tokens=2))
        MODEL.generate(**INPUTS, max_new_tokens=2, prefill_chunk_size=None)


def test_an_empty_prompt_is_an_error():
    with compress(), pytest.raises(KVCompressError, match=r"no token to process.*\(1, 0\)"):
        MODEL(torch.zeros(1, 0, dtype=torch.long))


def test_a_row_of_pads_only_changes_nothing_for_the_others():
    empty = {name: torch.cat([tensor, torch.zeros_like(tensor[:1])]) for name, tensor in INPUTS.items()}
    with compress() as session:
        tokens, logits = generate(MODEL, INPUTS, 3)
    with compress() as session:
        _, ours = generate(MODEL, empty, 3, forced=torch.cat([tokens, tokens[:1]]))
    torch.testing.assert_close(ours[:2], logits, atol=TOLERANCE, rtol=0)
    assert all(ratios[:2] == pytest.approx([0.3, 9 / 31]) for ratios in session.cache.realised_ratios())
    assert all(math.isnan(ratios[2]) for ratios in session.cache.realised_ratios())


# -- a cache after an error, copied, reset


def break_off(*args) -> None:
    raise ZeroDivisionError


def test_a_cache_whose_forward_pass_broke_off_is_not_gone_on_with():
    cache = new_cache()
    with torch.no_grad(), kvcompress.attach(MODEL):
        handle = MODEL.model.layers[1].register_forward_pre_hook(break_off)
        with pytest.raises(ZeroDivisionError):
            MODEL(**INPUTS, past_key_values=cache)
        handle.remove()
        with pytest.raises(KVCompressError, match=r"broke off.*reset\(\)"):
            MODEL(**INPUTS, past_key_values=cache)
        cache.reset()
        logits = [MODEL(**INPUTS, past_key_values=cache).logits[:, -1], step(MODEL, cache)]
    assert torch.equal(torch.stack(logits), answer(MODEL, 1))


def test_a_forward_pass_that_broke_off_before_the_first_layer_left_no_trace():
    cache, expected, logits = new_cache(), answer(MODEL, 1), []
    with torch.no_grad(), kvcompress.attach(MODEL):
        for tokens in (INPUTS["input_ids"], TOKEN.repeat(1, 3)):
            handle = MODEL.model.layers[0].register_forward_pre_hook(break_off)
            with pytest.raises(ZeroDivisionError):
                MODEL(tokens, past_key_values=cache)
            handle.remove()
            good = {"position_ids": torch.tensor([[40], [31]]), "input_ids": TOKEN} if logits else INPUTS
            logits.append(MODEL(**good, past_key_values=cache).logits[:, -1])
    assert torch.equal(torch.stack(logits), expected)


def test_a_cache_is_not_taken_for_a_list_of_keys_and_values():
    with torch.no_grad(), compress() as session:
        MODEL(**INPUTS)
    with pytest.raises(KVCompressError, match="does not list"):
        DynamicCache(list(session.cache))


# -- room


@pytest.mark.parametrize("value", [-5, "a", "3", True, 2.5, math.nan, math.inf, [4]])
def test_max_new_tokens_is_a_number_of_tokens(value):
    for make in (lambda: compress(max_new_tokens=value), lambda: new_cache(max_new_tokens=value)):
        with pytest.raises(KVCompressError, match=r"max_new_tokens=.* is not an integer of at least 0") as error:
            make()
        assert "\n" not in str(error.value)


def test_a_prefix_cache_is_not_its_size():
    with pytest.raises(KVCompressError, match=r"prefix_cache=4 is not a PrefixCache"):
        compress(prefix_cache=4)


@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
def test_a_static_cache_that_is_full_says_so(kind):
    with torch.no_grad(), compress(cache_implementation=kind, max_new_tokens=3) as session:
        MODEL(**INPUTS)
        for _ in range(2):
            with session.reuse() as cache:
                for count in range(3):
                    step(MODEL, cache, count)
                with pytest.raises(KVCompressError, match="full: it has room for max_new_tokens=3 tokens"):
                    step(MODEL, cache, 3)


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"method": "snapkv"}, STATIC], ids=["ragged", "dense", "static"])
def test_what_inference_mode_stored_can_be_decoded_outside_of_it(options, with_grad):
    model = copy.deepcopy(MODEL).requires_grad_(with_grad)
    with compress(model, **options) as session:
        with torch.inference_mode():
            model(**INPUTS)
            session.cache.reorder_cache(torch.tensor([0, 1]))
        with session.reuse() as cache:
            logits = torch.stack([step(model, cache, count) for count in range(3)])
    assert logits.requires_grad == with_grad
    torch.testing.assert_close(logits.detach(), answer(MODEL, **options)[1:], atol=TOLERANCE, rtol=0)


# -- wrappers


class Wrapper(torch.nn.Module):
    """As PEFT's: calls the model inside."""

    def __init__(self, model: PreTrainedModel, **adapter: object):
        super().__init__()
        self.module, self.peft_config = model, {"default": SimpleNamespace(**adapter)}

    def get_base_model(self) -> PreTrainedModel:
        return self.module

    def forward(self, **kwargs: object):
        return self.module(**kwargs)


LORA = {"is_prompt_learning": False, "is_adaption_prompt": False}


def test_torch_compiles_wrapper_is_unwrapped():
    compiled = torch.compile(copy.deepcopy(MODEL), backend="eager")
    with compress(compiled):
        tokens, logits = generate(compiled, INPUTS, 3)
    with compress():
        assert torch.equal(generate(MODEL, INPUTS, 3, forced=tokens)[1], logits)


@pytest.mark.slow
def test_what_was_compiled_before_the_context_is_compressed_in_it():
    model = FAMILY.build(1)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    with torch.no_grad():
        plain = compiled(**INPUTS).logits  # compiled before the context, without it
        for method in ("adakv", "snapkv", "adakv"):
            torch.testing.assert_close(answer(compiled, 1, method=method), answer(model, 1, method=method))
        assert torch.equal(compiled(**INPUTS).logits, plain)
    torch._dynamo.reset()


def test_pefts_wrapper_is_unwrapped():
    wrapped = Wrapper(MODEL, **LORA)
    assert torch.equal(answer(wrapped), answer(MODEL))
    assert compress(wrapped).model is MODEL


def test_a_lora_model_is_compressed_as_the_model_inside_it():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        wrapped = peft.get_peft_model(copy.deepcopy(MODEL), config).eval()
    inner = wrapped.get_base_model()
    for options in ({}, {"first_token": "compressed"}):
        logits = answer(wrapped, 1, **options)
        assert torch.equal(logits, answer(inner, 1, **options))
        assert not torch.allclose(logits, answer(MODEL, 1, **options), atol=1e-2)
    with compress(wrapped):
        tokens, logits = generate(wrapped, INPUTS, 3)
    with compress(inner):
        assert torch.equal(generate(inner, INPUTS, 3, forced=tokens)[1], logits)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Wrapper(MODEL, **{**LORA, "is_prompt_learning": True}, peft_type="P_TUNING"),
            "P_TUNING is not supported.*LoRA",
        ),
        (Wrapper(MODEL, **{**LORA, "is_adaption_prompt": True}, peft_type="X"), "X is not supported"),
        (torch.nn.DataParallel(MODEL), "a DataParallel is not a transformers model: pass .* its .module"),
        (torch.nn.Linear(2, 2), "a Linear is not a transformers model$"),
        ("Qwen/Qwen2-0.5B", "a str is not a transformers model$"),
    ],
    ids=["prompt learning", "adaption prompt", "DataParallel", "Linear", "name"],
)
def test_another_wrapper_is_an_error_that_says_what_to_give(model, message):
    for connect in (compress, kvcompress.attach, kvcompress.SharedPrompt):
        with pytest.raises(KVCompressError, match=message):
            connect(model)


# -- threads


def test_threads_generate_side_by_side_where_no_pass_needs_hooks():
    expected, found = answer(MODEL), []

    def generate_with_a_cache_of_its_own() -> None:
        cache = new_cache()
        logits = [MODEL(**INPUTS, past_key_values=cache).logits[:, -1]]
        found.append(torch.stack([*logits, *(step(MODEL, cache, count) for count in range(3))]))

    with torch.no_grad(), kvcompress.attach(MODEL):
        threads = [threading.Thread(target=torch.no_grad()(generate_with_a_cache_of_its_own)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [torch.equal(logits, expected) for logits in found] == [True] * 3


@pytest.mark.parametrize(
    "alone", [{"method": "kvzip"}, {"method": "snapkv", "prefill_chunk": 8}, {"method": "expected-attention"}]
)
@pytest.mark.parametrize("first", ["alone", "other"])
def test_a_pass_that_needs_hooks_runs_in_no_other_threads_pass(alone, first):
    arrived, go_on = threading.Event(), threading.Event()
    caches = {
        "alone": CompressedCache(MODEL.config, ratio=0.3, **alone),
        "other": CompressedCache(MODEL.config, "snapkv", 0.3),
    }
    expected = {}
    with torch.no_grad(), kvcompress.attach(MODEL):
        for name, cache in caches.items():
            expected[name] = MODEL(**INPUTS, past_key_values=cache).logits, kept_lists(cache)
            cache.reset()

    def wait(*args) -> None:
        if threading.current_thread() is thread:
            arrived.set()
            go_on.wait(10)

    def run() -> None:
        with torch.no_grad():
            logits.append(MODEL(**INPUTS, past_key_values=caches[first]).logits)

    logits, second = [], next(name for name in caches if name != first)
    with torch.no_grad(), kvcompress.attach(MODEL):
        thread = threading.Thread(target=run)
        handle = MODEL.model.layers[1].register_forward_pre_hook(wait)
        thread.start()
        arrived.wait(10)
        with pytest.raises(KVCompressError, match="two threads are in a forward pass"):
            MODEL(**INPUTS, past_key_values=caches[second])
        go_on.set()
        thread.join()
        handle.remove()
        logits.append(MODEL(**INPUTS, past_key_values=caches[second]).logits)
    for name, ours in zip((first, second), logits, strict=True):
        assert torch.equal(ours, expected[name][0])
        assert kept_lists(caches[name]) == expected[name][1]


def test_a_pass_that_another_threads_has_to_wait_for_keeps_its_hooks():
    arrived, go_on, found = threading.Event(), threading.Event(), []
    family = FAMILIES["qwen2-vl"]
    model = family.build()
    inputs = family.inputs(model, [40], [1])

    def wait(*args) -> None:
        if threading.current_thread() is thread:
            arrived.set()
            go_on.wait(10)

    with torch.no_grad(), kvcompress.compress(model, "fastv", 0.3, layer=1):
        expected = model(**inputs).logits
        thread = threading.Thread(target=torch.no_grad()(lambda: found.append(model(**inputs).logits)))
        handle = model.model.language_model.layers[0].register_forward_pre_hook(wait)
        thread.start()
        arrived.wait(10)
        with pytest.raises(KVCompressError, match="two threads are in a forward pass"):
            model(**inputs)
        go_on.set()
        thread.join()
        handle.remove()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_direct_call_feeds_the_last_token_again_at_its_own_position(family):
    """`generate` computes positions before the forward pass; a direct call leaves that to the model."""
    chosen = FAMILIES[family]
    model, images = chosen.build(), [1] if chosen.is_vlm else None
    inputs = chosen.inputs(model, [40], images)
    with kvcompress.compress(model, "snapkv", 0.3, first_token="compressed"), torch.no_grad():
        logits = model(**inputs).logits[:, -1]
        expected = model.generate(
            **inputs, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
        ).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_the_last_token_that_is_fed_again_comes_with_all_outputs_that_were_asked_for():
    model = copy.deepcopy(MODEL)
    model.set_attn_implementation("eager")
    asked = {"output_hidden_states": True, "output_attentions": True}
    with compress(model, first_token="compressed") as session, torch.no_grad():
        output = model(**INPUTS, **asked)
    assert [states.shape[1] for states in output.hidden_states] == [1] * (model.config.num_hidden_layers + 1)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    kept = [session.cache.layers[layer].memory.stored for layer in range(model.config.num_hidden_layers)]
    assert [weights.shape[-1] for weights in output.attentions] == kept


@pytest.mark.parametrize(
    "options",
    [{"first_token": "compressed"}, {"scope": "context-first", "context_tokens": -31}, {"prefill_chunk": 39}],
    ids=lambda options: next(iter(options)),
)
def test_labels_are_refused_where_the_output_is_that_of_the_last_tokens_alone(options):
    for whole in ({}, {"prefill_chunk": 40}):
        with compress(**whole):
            assert MODEL(**INPUTS, labels=INPUTS["input_ids"]).loss > 0
    with compress(**options) as session:
        with pytest.raises(KVCompressError, match=f"labels= do not go with {next(iter(options))}="):
            MODEL(**INPUTS, labels=INPUTS["input_ids"])
        with pytest.raises(KVCompressError, match=f"logits_to_keep= do not go with {next(iter(options))}="):
            MODEL(**INPUTS, logits_to_keep=torch.tensor([3]))
        assert session.cache is None
        MODEL(**INPUTS)


@pytest.mark.parametrize("method", ["fastv", "divprune"])
def test_labels_that_dropped_tokens_would_predict_are_refused(method):
    family = FAMILIES["llava-onevision"]
    model = family.build()
    inputs = family.inputs(model, [60], [1])
    last = int((inputs["input_ids"] == model.config.image_token_id).nonzero()[-1, 1])
    labels = inputs["input_ids"].masked_fill(torch.arange(60) < last + 2, -100)
    labels_after = inputs["input_ids"].masked_fill(torch.arange(60) < last + 1, -100)
    with torch.no_grad(), kvcompress.compress(model, method, 0.3) as session:
        logits = model(**inputs).logits[0]
        expected = torch.nn.functional.cross_entropy(logits[last + 1 : -1], labels[0, last + 2 :])
        assert torch.allclose(model(**inputs, labels=labels).loss, expected)
        with pytest.raises(KVCompressError, match="after a vision token"):
            model(**inputs, labels=labels_after)
        assert torch.equal(model(**inputs).logits[0], logits)
        assert not session.cache.is_broken


def test_a_text_after_an_image_has_its_own_positions():
    """Qwen2-VL stores the position offset of its latest image, also for a prompt without one."""
    family = FAMILIES["qwen2-vl"]
    model, step = family.build(), torch.tensor([[9]])
    with torch.no_grad(), kvcompress.compress(model, "knorm", 0.5) as session:
        logits = []
        for generates in (False, True):
            if generates:
                model.generate(**family.inputs(model, [40], [2]), max_new_tokens=2, do_sample=False)
            model(**family.inputs(model, [30]))
            with session.reuse() as cache:
                logits.append(model(input_ids=step, past_key_values=cache).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["internvl", *sorted({"gemma3", "gemma4", "molmo2"} & MORE_FAMILIES.keys())])
def test_an_image_of_a_later_prompt_is_seen_as_that_of_a_first(name, implementation):
    """Where the tokens of an image attend to each other in both directions, too."""
    family = (FAMILIES | MORE_FAMILIES)[name]
    model = family.build()
    inputs = family.inputs(model, [24], [1])
    before = {"input_ids": inputs["input_ids"][:, :3]}
    if family.image_format == "gemma3":
        before["token_type_ids"] = torch.zeros_like(before["input_ids"])
    with attending_by(model, implementation):
        tokens, expected = generate(model, inputs, 3)
        with kvcompress.compress(model) as session:
            generate(model, before, 1)
            _, logits = generate(model, inputs, 3, tokens, past_key_values=session.cache)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_a_cache_may_be_given_by_each_of_its_names(name):
    with compress() as session:
        expected = MODEL.generate(**INPUTS, max_new_tokens=3, do_sample=False)
        cache = new_cache()
        assert MODEL.generate(**INPUTS, max_new_tokens=3, do_sample=False, **{name: cache}).equal(expected)
        assert session.cache is cache
        cache = new_cache()
        MODEL(**INPUTS, **{name: cache})
    assert session.cache is cache
    assert cache.seen_tokens == 40


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_ones_own_gets_its_cache_by_the_name_that_its_forward_has(name):
    """Such as remote code that was written for another transformers."""

    class Own(type(MODEL)):
        if name == "cache":

            def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **kwargs):
                return super().forward(input_ids, attention_mask, position_ids, **{CACHE: cache}, **kwargs)
        else:

            def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
                return super().forward(input_ids, attention_mask, position_ids, **{CACHE: past_key_values}, **kwargs)

    model = Own(MODEL.config)
    model.load_state_dict(MODEL.state_dict())
    with compress(model.eval()) as session:
        tokens = model.generate(**INPUTS, max_new_tokens=3, do_sample=False)
    with compress() as expected:
        assert MODEL.generate(**INPUTS, max_new_tokens=3, do_sample=False).equal(tokens)
    assert session.cache.realised_ratios() == expected.cache.realised_ratios()


def test_a_prompt_that_goes_on_with_nothing_new_says_how_long_it_must_be():
    ids = INPUTS["input_ids"][:, :20]  # of which transformers feeds the last -20
    with compress() as session, torch.no_grad():
        MODEL(**INPUTS)
        with pytest.raises(KVCompressError, match="longer than the 40 tokens before"), session.reuse() as cache:
            MODEL.generate(ids, past_key_values=cache, max_new_tokens=1)
