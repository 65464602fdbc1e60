"""`CompressedCache.save` and `load`: a loaded cache continues like the saved one, and wrong files are rejected."""

import copy
import functools
import json
import pickle
import random
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import given, reject
from hypothesis import strategies as st
from safetensors import safe_open

import kvcompress
from kvcompress import CompressedCache, KVCompressError, methods
from kvcompress.cache import saved as saved_module
from kvcompress.check.reference import generate
from kvcompress.errors import shown
from kvcompress.hooks.model import unwrapped
from tests.support.examples import examples, some
from tests.support.families import FAMILIES, FIRST_TEXT, MORE_FAMILIES, VOCAB_SIZE
from tests.support.storages import STORAGES
from tests.support.strategies import cases
from tests.support.wrong_contents import wrong_tensors

VERSION = transformers.__version__
STORED = [
    {},
    *STORAGES.values(),
    {"decode_budget": 9, "decode_interval": 2},
    {"decode_ratio": 0.3, "decode_interval": 1, "cache_implementation": "offloaded"},
    {"prefill_chunk": 13},
    {"prefill_chunk": 13, "decode_budget": 9, "decode_interval": 3},
    {"positions": "cache", "decode_budget": 9, "decode_interval": 2},
    {"first_token": "compressed"},
    {"scope": "context", "context_tokens": -3, "decode_budget": 9, "decode_interval": 2},
]
QWEN2 = FAMILIES["qwen2"]
MODEL = QWEN2.build()


def filled(model=MODEL, method="h2o", ratio=0.3, **options):
    """Return a cache after a prompt, and the prompt."""
    inputs = QWEN2.inputs(MODEL, [40])
    with kvcompress.compress(model, method, ratio, **options) as session:
        generate(model, inputs, 1)
    return session.cache, inputs


def saved(cache, path):
    """Return the bytes of a file with the cache in it."""
    cache.save(path)
    return path.read_bytes()


def text(batch, tokens, seed=0):
    return torch.randint(FIRST_TEXT, VOCAB_SIZE, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def behind(inputs, new):
    """Return a prompt and what follows it."""
    ids = torch.cat([inputs["input_ids"], new], 1)
    return {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(new)], 1)}


def forget_positions(model):
    """Reset positions as if the model had just been loaded, with a wrong number where it would be guessed."""
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = torch.full((1, 1), 13)


def assert_goes_on_alike(session, loaded, prompts):
    """Assert that both answer prompts with the same tokens and logits, and keep the same entries."""
    kept_one = session.cache
    for prompt in prompts:
        answers = []
        for cache in (loaded, kept_one):
            forget_positions(session.model)
            with session.reuse(cache):
                tokens, logits = generate(session.model, prompt, 4, past_key_values=cache)
                kept = [cache.kept_indices(layer.layer_idx) for layer in cache.compressed_layers]
            answers.append((tokens, logits, kept))
        ours, theirs = answers
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        for one, other in zip(ours[2], theirs[2], strict=True):
            assert all(
                torch.equal(*heads) for rows in zip(one, other, strict=True) for heads in zip(*rows, strict=True)
            )


@pytest.mark.parametrize("family", FAMILIES)
@examples(4)
@given(data=st.data())
def test_a_loaded_cache_goes_on_as_the_one_that_was_saved(family, data, tmp_path_factory):
    """For any method, storage and batch, after a prompt, a second one, and decoded tokens."""
    case, storage = data.draw(cases(family)), data.draw(st.sampled_from(STORED))
    model, inputs, folder = case.model, case.inputs, tmp_path_factory.mktemp("saved")
    try:
        session = case.compress(**storage)
        CompressedCache(session.model.config, **session._new_cache)
    except KVCompressError:  # the two do not go together
        reject()
    with session, torch.no_grad():
        first, _ = generate(model, inputs, data.draw(st.integers(1, 7)))
        inputs = behind(inputs, first[:, :-1])  # the last token has not been fed yet
        may_follow = "positions" not in storage  # such a cache takes no second prompt
        if may_follow and data.draw(st.booleans()):
            inputs = behind(inputs, text(len(first), data.draw(st.integers(1, 9))))
            generate(model, inputs, 1, past_key_values=session.cache)
        content = saved(session.cache, folder / "a")
        forget_positions(model)
        loaded = CompressedCache.load(folder / "a", model)
        assert saved(loaded, folder / "b") == content
        assert loaded.seen_tokens == inputs["input_ids"].shape[1]
        questions = [text(len(first), 1, seed=1), *([text(len(first), 10, seed=2)] if may_follow else [])]
        assert_goes_on_alike(session, loaded, [behind(inputs, question) for question in questions])
        assert saved(loaded, folder / "c") == content  # the questions have changed nothing


def test_a_file_has_no_room_for_tokens_to_come(tmp_path):
    """Nor that memory's previous contents."""
    sizes = []
    for room in (0, 4000):
        cache, _ = filled(max_new_tokens=room)
        sizes.append(len(saved(cache, tmp_path / "x")))
    assert abs(sizes[1] - sizes[0]) < 100 < cache.room_nbytes


def assert_saved_and_loaded_goes_on(session, inputs, folder):
    content = saved(session.cache, folder / "a")
    forget_positions(session.model)
    loaded = CompressedCache.load(folder / "a", session.model)
    assert saved(loaded, folder / "b") == content
    batch = len(inputs["input_ids"])
    assert_goes_on_alike(session, loaded, [behind(inputs, text(batch, 1, 1)), behind(inputs, text(batch, 9, 2))])


@pytest.mark.parametrize("family", some(MORE_FAMILIES, ["gemma3", "gemma4-e2b", "mllama", "qwen3.5"]))
def test_families_with_layers_of_transformers_own_and_others_go_on_from_a_file(family, tmp_path):
    """Sliding windows, cross-attention, linear attention, layers without keys of their own."""
    family = MORE_FAMILIES[family]
    model = unwrapped(family.build())
    inputs = family.inputs(model, [44, 29], [1, 1] if family.is_vlm else None)
    with kvcompress.compress(model, "adakv", 0.3, decode_budget=12, decode_interval=2) as session, torch.no_grad():
        first, _ = generate(model, inputs, 4)
        assert_saved_and_loaded_goes_on(session, behind(inputs, first[:, :-1]), tmp_path)


@pytest.mark.parametrize("method", ["fastv", "divprune", "sparsevlm", "dycoke"])
def test_token_methods_go_on_from_a_file(method, tmp_path):
    family = FAMILIES["qwen2-vl"]
    model, inputs = family.build(num_hidden_layers=4), family.video_inputs()
    options = {"layer": 2, "decode_drop": 0.6} if method == "dycoke" else {}
    with kvcompress.compress(model, method, 0.6, **options) as session, torch.no_grad():
        first, _ = generate(model, inputs, 3)
        assert_saved_and_loaded_goes_on(session, behind(inputs, first[:, :-1]), tmp_path)


def test_what_was_loaded_in_inference_mode_goes_on_outside_of_it(tmp_path):
    cache, inputs = filled()
    cache.save(tmp_path / "x")
    with torch.inference_mode():
        loaded = CompressedCache.load(tmp_path / "x", MODEL)
    with kvcompress.attach(MODEL), torch.no_grad():
        generate(MODEL, behind(inputs, text(1, 1)), 3, past_key_values=loaded)


def test_contexts_of_one_model_are_reused_in_any_order(tmp_path):
    """Also if the model itself stores the position offset of its latest prompt."""
    family = FAMILIES["qwen2-vl"]
    model, question = family.build(), text(1, 7)
    contexts = [family.inputs(model, [length], [images]) for length, images in ((60, 2), (40, 0), (50, 1))]
    types = [torch.nn.functional.pad(context["mm_token_type_ids"], (0, 7)) for context in contexts]
    wholes = [
        context | behind(context, question) | {"mm_token_type_ids": of_tokens}
        for context, of_tokens in zip(contexts, types, strict=True)
    ]
    expected = [generate(model, whole, 4)[1] for whole in wholes]
    with kvcompress.compress(model) as session, torch.no_grad():
        caches = []
        for i, context in enumerate(contexts):
            generate(model, context, 1)
            caches.append(session.cache)
            session.cache.save(tmp_path / f"{i}")
        caches += [CompressedCache.load(tmp_path / f"{i}", model) for i in range(3)]
        for i in (0, 1, 2, 0, 3, 4, 5, 3):
            with session.reuse(caches[i]) as cache:
                answer = generate(model, behind(contexts[i % 3], question), 4, past_key_values=cache)[1]
            torch.testing.assert_close(answer, expected[i % 3], atol=1e-4, rtol=0)
        # One token at a time, whose position the model computes in its forward pass.
        for i in (0, 1, 2, 3, 4, 5):
            with session.reuse(caches[i]) as cache:
                for token in question.split(1, dim=1):
                    logits = model(input_ids=token, past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(logits, expected[i % 3][:, 0], atol=1e-4, rtol=0)


# -- wrong files


@functools.cache
def right():
    """Return the content of a correct file for MODEL."""
    cache, _ = filled()
    with tempfile.TemporaryDirectory() as folder:
        return saved(cache, Path(folder) / "x")


def refused(path, content=None, model=MODEL):
    """Return the one line of the error."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KVCompressError) as error:
        CompressedCache.load(path, model)
    line = str(error.value)
    assert "\n" not in line
    assert shown(str(path)) in line
    return line


@examples(60)
@given(data=st.data())
def test_a_file_that_was_cut_or_changed_is_refused(data, tmp_path_factory):
    path, content = tmp_path_factory.mktemp("damaged") / "x", right()
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        refused(path, content[:place])
    else:
        changed = bytearray(content)
        changed[place] ^= data.draw(st.integers(1, 255))
        refused(path, bytes(changed))


@examples(60)
@given(seed=st.integers(0, 10**6))
def test_no_wrong_tensor_or_header_is_taken_for_a_cache(seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    _, wrong = wrong_tensors(random.Random(seed), right())
    if parts(folder / "wrong", wrong) == parts(folder / "right", right()):  # the drawn change has no effect
        CompressedCache.load(folder / "wrong", MODEL)
    else:
        refused(folder / "wrong")


def parts(path, content):
    """Return everything that safetensors finds in the file; None if that is nothing."""
    path.write_bytes(content)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            described = {name: (part.dtype, part.shape, part.numpy().tobytes()) for name, part in found.items()}
            return file.metadata(), described
    except Exception:  # in its own words
        return None


def with_document(content, **changes):
    """Return the file with other metadata, as another version would write it."""
    tensors = safetensors.torch.load(content)
    length = int.from_bytes(content[:8], "little")
    document = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["kvcompress_cache"])
    document.update(changes)
    return safetensors.torch.save(tensors, {"kvcompress_cache": json.dumps(document)})


def test_files_of_other_kinds_are_named(tmp_path):
    assert "No such file" in refused(tmp_path / "nothing")
    assert "cannot be read" in refused(tmp_path)
    assert "cannot be read" in refused(tmp_path / "x", b"PK\x03\x04 a pickle of torch.save, say")
    foreign = safetensors.torch.save({"weight": torch.ones(3)})
    assert "was not written by CompressedCache.save" in refused(tmp_path / "x", foreign)
    newer = refused(tmp_path / "x", with_document(right(), format=3, kvcompress="9.0"))
    assert "its format is 3, written by kvcompress '9.0'" in newer
    assert "checksum" in refused(tmp_path / "x", with_document(right(), sha256="0"))


def test_a_file_of_another_transformers_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(right())
    monkeypatch.setattr(saved_module.transformers, "__version__", "9.9.9")
    assert f"with transformers {VERSION}; this is 9.9.9" in refused(path)


def changed(name):
    model = copy.deepcopy(MODEL)
    weight = model.get_parameter(name)
    weight.data += 0.01
    return model


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: FAMILIES["llama"].build(), "architecture='Qwen2ForCausalLM', not 'LlamaForCausalLM'"),
        (lambda: QWEN2.build(num_hidden_layers=2), "config="),
        (lambda: copy.deepcopy(MODEL).bfloat16(), "dtype='torch.float32', not 'torch.bfloat16'"),
        (lambda: QWEN2.build(seed=1), "weights="),
        (lambda: changed("model.layers.1.mlp.down_proj.weight"), "weights="),
        (lambda: changed("lm_head.weight"), "weights="),
    ],
    ids=["family", "layers", "dtype", "seed", "mlp", "head"],
)
def test_a_file_of_another_model_is_refused(other, what, tmp_path):
    line = refused(tmp_path / "x", right(), other())
    assert "it was saved from another model than this" in line
    assert what in line


def test_the_same_model_loaded_again_is_the_same(tmp_path):
    MODEL.save_pretrained(tmp_path / "model")
    again = type(MODEL).from_pretrained(tmp_path / "model")
    (tmp_path / "x").write_bytes(right())
    CompressedCache.load(tmp_path / "x", again)


def test_another_adapter_is_another_model(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(MODEL), peft.LoraConfig(init_lora_weights=False))
    cache, _ = filled(model)
    cache.save(tmp_path / "x")
    CompressedCache.load(tmp_path / "x", model)
    with model.disable_adapter():
        assert "adapters=" in refused(tmp_path / "x", model=model)


def test_a_method_that_is_not_here_is_named(tmp_path, monkeypatch):
    method = kvcompress.list_methods()["h2o"].cls
    with monkeypatch.context() as patch:
        patch.setattr("kvcompress.methods._METHODS", dict(methods._METHODS))
        kvcompress.register_method("mine")(type("Mine", (method,), {}))
        cache, _ = filled(method="mine")
        cache.save(tmp_path / "x")
    assert "'mine'" in refused(tmp_path / "x")


def test_an_option_that_means_something_else_by_now_is_named(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(right())
    monkeypatch.setattr(kvcompress.list_methods()["h2o"].cls, "head_budget", "adaptive")
    assert "head_budget='uniform', not 'adaptive'" in refused(tmp_path / "x")


def test_what_cannot_be_saved_is_one_line(tmp_path):
    cache = CompressedCache(MODEL.config, "h2o", 0.3)
    with pytest.raises(KVCompressError, match="has not seen a prompt yet"):
        cache.save(tmp_path / "x")
    cache, _ = filled()
    (tmp_path / "folder" / "x").mkdir(parents=True)
    with pytest.raises(KVCompressError, match="cannot be written: Is a directory"):
        cache.save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    without_model = pickle.loads(pickle.dumps(cache))
    with pytest.raises(KVCompressError, match="does not know its model"):
        without_model.save(tmp_path / "x")
    copy.deepcopy(cache).save(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == saved(cache, tmp_path / "y")


def test_a_cache_is_reused_in_its_own_session_alone(tmp_path):
    cache, _ = filled(method="knorm", ratio=0.3)

    def error(session, cache):
        with session, pytest.raises(KVCompressError) as caught, session.reuse(cache):
            pass
        return str(caught.value)

    assert "ratio=0.3, not 0.5" in error(kvcompress.compress(MODEL, "knorm", 0.5), cache)
    assert "method='knorm', not 'keydiff'" in error(kvcompress.compress(MODEL, "keydiff", 0.3), cache)
    assert "filled by another model" in error(kvcompress.attach(copy.deepcopy(MODEL)), cache)
    assert "made for another model" in error(kvcompress.attach(FAMILIES["llama"].build()), cache)
    assert "not seen a prompt" in error(kvcompress.attach(MODEL), CompressedCache(MODEL.config, "knorm", 0.3))
    assert "DynamicCache" in error(kvcompress.attach(MODEL), transformers.DynamicCache())
    for session in (kvcompress.compress(MODEL, "knorm", 0.3, max_new_tokens=9), kvcompress.attach(MODEL)):
        with session, session.reuse(cache) as reused:
            assert reused is cache
