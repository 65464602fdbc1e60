"""Every way through the engine on a CUDA device: storages, graphs, flows, attention implementations."""

import random
import warnings

import pytest
import torch
from transformers import Cache, DynamicCache

import kvcompress
from kvcompress.cache.storage.fp8 import Fp8Storage
from kvcompress.cache.storage.ragged import RaggedStorage
from kvcompress.cache.storage.think import ThinKStorage
from kvcompress.check.reference import generate
from kvcompress.hooks.shared_prompt import SharedPrompt
from kvcompress.kernels.quantization import BITS
from kvcompress.scoring.layer_view import Kept
from tests.gpu.cases import DTYPES, NEW, STEPS, answered, check_as_on_the_cpu, entries_of, few, on
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES, MORE_FAMILIES
from tests.support.grouped_cases import check_hqq
from tests.support.in_flight import check_in_flight
from tests.support.ragged_cases import TOLERANCE

pytestmark = pytest.mark.gpu
EVICTING = {"decode_budget": 12, "decode_interval": 2}
WAYS = [
    ("snapkv", {"prefill_chunk": 16}),
    ("snapkv", {"first_token": "compressed"}),
    ("snapkv", {"scope": "context", "context_tokens": 25}),
    ("snapkv", {"head_budget": "adaptive", "prefill_chunk": 20}),
    ("snapkv", {"head_budget": "shared"}),
    ("snapkv", {"layer_budget": "pyramid"}),
    ("snapkv", {"layer_budget": "entropy"}),
    ("adakv", {"layer_budget": "global"}),
    *(("snapkv", {"merge": merge}) for merge in ("pivot", "d2o", "cam", "meda")),
    *((method, EVICTING) for method in ("snapkv", "adakv", "r-kv", "h2o", "tova", "expected-attention", "morphkv")),
    ("hindsight", {"answer_tokens": 3}),
]
TOKEN_METHODS = ["cdpruner", "dart", "divprune", "fastv", "framefusion", "prumerge+", "pyramiddrop"]
TOKEN_METHODS += ["random-tokens", "sparsevlm", "visionzip", "vispruner"]


def named(value: object) -> str | None:
    return "-".join(f"{name}={each}" for name, each in value.items()) or "plain" if isinstance(value, dict) else None


@pytest.mark.parametrize(("method", "options"), few(WAYS, 3), ids=named)
def test_every_way_through_the_engine_is_as_on_the_cpu(device, method, options):
    check_as_on_the_cpu(device, "qwen2-vl", method, 0.3, **options)


@pytest.mark.parametrize("method", few(TOKEN_METHODS, 3))
def test_token_methods_are_as_on_the_cpu(device, method):
    sees = kvcompress.list_methods()[method].cls.sees
    family = {"tower": "llava-1.5", "video": "llava-onevision"}.get(sees, "qwen2-vl")
    check_as_on_the_cpu(device, family, method, 1.0 if sees == "video" else 0.5)


@pytest.mark.parametrize("family", few(sorted(MORE_FAMILIES), 6))
def test_more_families_are_as_on_the_cpu(device, family):
    check_as_on_the_cpu(device, family, "snapkv", 0.3)


# Storages


@pytest.mark.parametrize("method", ["snapkv", "adakv", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static"])
def test_where_entries_lie_changes_no_answer(device, kind, dtype, method):
    model, inputs = on(device, "qwen2", dtype)
    ratio = None if method == "full" else 0.3
    tokens, expected, kept = answered(model, inputs, method, ratio, new=12)
    with kvcompress.compress(model, method, ratio, max_new_tokens=12, cache_implementation=kind) as session:
        _, logits = generate(model, inputs, 12, forced=tokens, disable_compile=True)
    tolerance = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}[dtype]
    torch.testing.assert_close(logits.float(), expected.float(), atol=tolerance, rtol=0)
    assert entries_of(session.cache) == kept
    for layer in session.cache.layers:
        inner = getattr(layer.storage, "inner", None)  # beside it an offloaded storage has a tail on the device
        assert kind == "static" or all(tensor.device.type == "cpu" for tensor in inner.tensors())


@pytest.mark.parametrize("method", ["snapkv", "adakv"])
def test_offloaded_entries_arrive_whole_beside_long_work(cuda, method):
    """Copies run beside what the device computes: an entry that is read too early is another number."""
    model, _ = on(cuda, "llama")
    long = {"input_ids": torch.randint(8, 128, (4, 6000), device=cuda)}
    tokens, expected, _ = answered(model, long, method, 0.5)
    ballast = torch.randn(4096, 4096, device=cuda)

    def work(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        torch.mm(ballast, ballast)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(work)
    _, logits, _ = answered(model, long, method, 0.5, tokens, cache_implementation="offloaded")
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


KINDS = [{"cache_implementation": kind} for kind in ("dynamic", "static", "offloaded", "offloaded_static", "think")]
KINDS += [{"cache_implementation": "quantized", "kv_backend": backend} for backend in ("hqq", "turboquant", "fp8")]


@pytest.mark.parametrize("options", KINDS, ids=named)
def test_a_cache_from_a_file_goes_on_as_the_one_that_was_saved(device, options, tmp_path):
    if options.get("kv_backend") == "hqq":
        pytest.importorskip("hqq")
    model, inputs = on(device, "qwen2-vl")
    with kvcompress.compress(model, "adakv", 0.3, max_new_tokens=40, **options) as session:
        tokens, _ = generate(model, inputs, 6, disable_compile=True)
        kept = session.cache
        kept.save(tmp_path / "x")
        loaded = kvcompress.CompressedCache.load(tmp_path / "x", model)
        loaded.save(tmp_path / "y")
        assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 6), value=1)
        more = {"input_ids": torch.cat([inputs["input_ids"], tokens], 1), "attention_mask": mask}
        answers = []
        for cache in (kept, loaded):
            with session.reuse(cache):
                answers.append(generate(model, more, 5, past_key_values=cache, disable_compile=True)[1])
    assert torch.equal(*answers)


@pytest.mark.parametrize("seed", range(6))
def test_ragged_entries_are_as_on_the_cpu_whatever_is_done_with_them(device, seed):
    """On CUDA a token is written by the kernel that attends to it: not if entries are read, forked, selected, saved or
    moved to more room before."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, heads, most, dim = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 40), 16
    counts = torch.randint(1, most + 1, (rows, heads), generator=generator)
    counts[0, 0] = most
    keys, values = torch.randn(2, rows, heads, most, dim, generator=generator)
    slots = torch.arange(most)
    indices = slots.masked_fill(slots < most - counts[..., None], -1)
    stored = []
    for where in ("cpu", device):
        kept = Kept(keys.to(where), values.to(where), indices.to(where), totals=counts.sum(1).tolist())
        stored.append(RaggedStorage(kept, counts.to(where), counts.flatten().tolist(), room=2))
    for change in draw.choices(["append", "append two", "fork", "select", "save", "read", "decode"], k=25):
        batch, length = stored[0].starts.shape[0], stored[0].length
        if change.startswith("append"):
            new = torch.randn(2, batch, heads, 2 if "two" in change else 1, dim, generator=generator)
            for each in stored:
                each.append(*new.to(each.keys.device))
        elif change == "decode":
            query = torch.randn(batch, 2 * heads, 1, dim, generator=generator)
            expected, output = (each.decode(query.to(each.keys.device), 0.3).cpu() for each in stored)
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        elif change == "fork":
            stored = [each.fork() for each in stored]
        elif change == "save":
            stored = [RaggedStorage.of_state(each.state(), each.keys.device) for each in stored]
        elif change == "select":
            order = torch.tensor(draw.choices(range(batch), k=batch))
            for each in stored:
                each.select(order.to(each.keys.device))
        else:
            visible = stored[0].visible()
            assert torch.equal(stored[1].visible().cpu(), visible)
            for expected, found in zip(stored[0].read(), stored[1].read(), strict=True):
                assert torch.equal(found.cpu()[visible], expected[visible])
        assert stored[1].length == stored[0].length >= length


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bit_floats_are_as_on_the_cpu_whatever_is_done_with_them(cuda, is_ragged, dtype):
    """The same bytes; a step attends to them where they lie as to those that are read."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 30, 16, generator=generator).to(dtype)
    indices = torch.arange(30).expand(2, 3, -1).clone()
    if is_ragged:
        indices[0, 1, :11] = indices[1, 0, :25] = -1
    totals = (indices >= 0).sum((1, 2)).tolist()
    stored = [
        Fp8Storage(*(part.to(where) for part in (keys, values, indices)), None, 2, totals) for where in ("cpu", cuda)
    ]
    assert [each.decodes_in_place for each in stored] == [False, True]
    for change in draw.choices(["append", "append two", "select", "decode", "decode"], k=40):
        if change.startswith("append"):
            shape = 2, 2, 3, 2 if "two" in change else 1
            new = (2 * torch.randn(*shape, 16, generator=generator)).to(dtype)
            for each in stored:
                each.append(*new.to(each.inner.keys.device))
        elif change == "select":
            order = torch.tensor(draw.choices(range(2), k=2))
            for each in stored:
                each.select(order.to(each.inner.keys.device))
        visible = stored[0].visible()
        read = [part if visible is None else part.masked_fill(~visible[..., None], 0) for part in stored[0].read()]
        for expected, found in zip(read, stored[1].read(), strict=True):
            found = found.cpu()
            assert torch.equal(found if visible is None else found.masked_fill(~visible[..., None], 0), expected)
        if change == "decode":
            query = torch.randn(2, 6, 1, 16, generator=generator).to(dtype)
            mask = None if visible is None else visible.repeat_interleave(2, 1)[:, :, None]
            whole = (part.float().repeat_interleave(2, 1) for part in read)
            expected = torch.nn.functional.scaled_dot_product_attention(query.float(), *whole, mask, scale=0.3)
            found = stored[1].decode(query.to(cuda), 0.3).cpu().float()
            torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("recent", [0, 4, 20])
@pytest.mark.parametrize("unused", [[[0, 0, 0], [0, 0, 0]], [[0, 11, 0], [28, 0, 0]], [[12, 25, 10], [18, 11, 29]]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_with_fewer_channels_are_as_on_the_cpu_whatever_is_done_with_them(cuda, unused, recent, dtype):
    """A step writes the new token, and attends to both parts where they lie as to the entries that are read."""
    draw, generator = random.Random(recent), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 30, 16, generator=generator).to(dtype)
    slots = torch.arange(30)
    indices = slots.masked_fill(slots < torch.tensor(unused)[..., None], -1)
    totals = (indices >= 0).sum((1, 2)).tolist()
    channels = torch.rand(2, 3, 16, generator=generator).argsort(-1)[..., :11].sort().values
    stored = []
    for where in ("cpu", cuda):
        parts = (part.to(where) for part in (keys, values, indices))
        stored.append(ThinKStorage(*parts, None, channels.to(where), recent, 2, totals))
    assert [each.decodes_in_place for each in stored] == [False, True]
    seen = 30
    for change in draw.choices(["append", "append two", "fork", "select", "save", "read", "decode", "decode"], k=40):
        if change.startswith("append") or change == "decode":
            new = 2 * torch.randn(2, 2, 3, 2 if "two" in change else 1, 16, generator=generator).to(dtype)
            seen += new.shape[3]
            for each in stored:
                each.append(*new.to(each.channels.device))
        elif change == "fork":
            stored = [each.fork() for each in stored]
        elif change == "save":
            stored = [ThinKStorage.of_state(each.state(), each.channels.device) for each in stored]
        elif change == "select":
            order = torch.tensor(draw.choices(range(2), k=2))
            for each in stored:
                each.select(order.to(each.channels.device))
        found = None
        if change == "decode":
            query = torch.randn(2, 6, 1, 16, generator=generator).to(dtype)
            found = stored[1].decode(query.to(cuda), 0.3).cpu().float()
        columns, length = stored[0].columns(seen), stored[0].length
        assert stored[1].length == length
        assert torch.equal(stored[1].columns(seen).cpu(), columns)
        used = columns >= 0
        read = [part.masked_fill(~used[..., None], 0) for part in stored[0].read()]
        if found is not None:
            mask = used.repeat_interleave(2, 1)[:, :, None]
            whole = (part.float().repeat_interleave(2, 1) for part in read)
            expected = torch.nn.functional.scaled_dot_product_attention(query.float(), *whole, mask, scale=0.3)
            torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for expected, part in zip(read, stored[1].read(), strict=True):
            assert torch.equal(part.cpu().masked_fill(~used[..., None], 0), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS["hqq"])
def test_hqqs_numbers_scales_and_zeros_are_those_of_its_own_quantizer(cuda, bits, dtype):
    pytest.importorskip("hqq")
    check_hqq(bits, dtype, cuda)


@pytest.mark.parametrize("method", ["snapkv", "adakv", "full"])
def test_think_is_as_on_the_cpu(device, method):
    ratio = None if method == "full" else 0.3
    check_as_on_the_cpu(device, "qwen2", method, ratio, cache_implementation="think", key_recent=5)


@pytest.mark.parametrize("bits", BITS["turboquant"])
@pytest.mark.parametrize("method", ["snapkv", "adakv", "full"])
def test_turboquant_is_as_on_the_cpu(device, method, bits):
    ratio = None if method == "full" else 0.3
    options = {"cache_implementation": "quantized", "kv_backend": "turboquant", "kv_bits": bits}
    check_as_on_the_cpu(device, "qwen2", method, ratio, **options)


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_quantized_entries_are_close_to_whole_ones(cuda, backend, package):
    pytest.importorskip(package)
    bits = max(BITS[backend])
    model, inputs = on(cuda, "qwen2")
    tokens, expected, kept = answered(model, inputs, "snapkv", 0.4)
    options = {"cache_implementation": "quantized", "kv_backend": backend, "kv_bits": bits, "kv_group_size": 16}
    _, logits, ours = answered(model, inputs, "snapkv", 0.4, tokens, kv_residual=3, **options)
    assert kept == ours
    assert (logits - expected).abs().mean() < (0.02 if bits == 8 else 0.5)


@pytest.mark.parametrize("method", ["snapkv", "pyramidkv", "full"])
def test_generate_compiles_static_decoding_by_itself_with_the_same_tokens(cuda, method):
    model, inputs = on(cuda, "qwen2")
    ratio = None if method == "full" else 0.3
    expected, _, _ = answered(model, inputs, method, ratio, new=40)
    cache = kvcompress.CompressedCache(model.config, method, ratio, max_new_tokens=40, cache_implementation="static")
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()
    with kvcompress.attach(model):
        tokens, _ = generate(model, inputs, 40, past_key_values=cache)
    assert torch.equal(tokens, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    del model._compiled_call


@pytest.mark.parametrize(
    ("method", "options"),
    STEPS,
    ids=named,
)
def test_a_decode_step_waits_no_more_than_with_transformers_cache(cuda, method, options):
    model, _ = on(cuda, "llama")
    ids = torch.randint(8, 128, (2, 60), device=cuda)
    positions = [torch.full((2, 1), 60 + step, device=cuda) for step in range(6)]
    ratio = None if method == "full" else 0.3

    def waits(cache: Cache) -> int:
        token, count = ids[:, -1:], 0
        model(ids, past_key_values=cache)
        for step, position in enumerate(positions):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                token = model(token, position_ids=position, past_key_values=cache).logits.argmax(-1)
                torch.cuda.set_sync_debug_mode("default")
            count += len(caught) if step > 2 else 0  # the first steps compile kernels
        return count

    with torch.no_grad():
        theirs = waits(DynamicCache(config=model.config))
        with kvcompress.attach(model):
            cache = kvcompress.CompressedCache(model.config, method, ratio, max_new_tokens=8, **options)
            assert waits(cache) <= theirs


# Flows


def test_a_shared_prompt_gives_what_one_of_its_own_gives(device):
    model, inputs = on(device, "qwen2-vl")
    known = None
    for method in ("full", "snapkv", "adakv", "knorm"):
        ratio = None if method == "full" else 0.3
        tokens, expected, kept = answered(model, inputs, method, ratio)
        with SharedPrompt(model, known) as shared, kvcompress.compress(model, method, ratio) as session:
            ours, logits = generate(model, inputs, NEW)
        known = shared.prompt_pass
        assert torch.equal(ours, tokens)
        assert entries_of(session.cache) == kept
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert shared.is_known


@pytest.mark.parametrize("where", [None, "cpu"])
def test_a_prompt_that_begins_like_another_is_answered_as_alone(device, where):
    model, inputs = on(device, "qwen2-vl")
    prefixes = kvcompress.PrefixCache(gb=1, device=where)
    for method in ("full", "snapkv", "adakv", "h2o"):
        ratio = None if method == "full" else 0.3
        tokens, expected, kept = answered(model, inputs, method, ratio)
        with kvcompress.compress(model, method, ratio, prefix_cache=prefixes) as session:
            ours, logits = generate(model, inputs, NEW)
        assert torch.equal(ours, tokens)
        assert entries_of(session.cache) == kept
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert prefixes.reused_tokens > prefixes.prompt_tokens // 2
    held = {part.device.type for node in prefixes._tree._nodes() for part in [*node.given, *node.computed]}
    assert held == {where or device.type}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("full", {}),
        ("snapkv", {"ratio": 0.3}),
        ("adakv", {"ratio": 0.3}),
        ("snapkv", {"ratio": 0.3, **EVICTING}),
        ("adakv", {"ratio": 0.3, **EVICTING}),
        ("h2o", {"ratio": 0.3, **EVICTING}),
        ("snapkv", {"ratio": 0.3, "cache_implementation": "static"}),
    ],
    ids=named,
)
def test_requests_in_flight_are_answered_as_alone(device, method, options):
    model, _ = on(device, "qwen2-vl")
    family = FAMILIES["qwen2-vl"]
    requests = [family.inputs(model, [n], [n % 2], seed=n) for n in (40, 23, 61, 35)]
    options = options | calibration_of(method, model)
    check_in_flight(model, requests, (5, 9, 1, 7), method, 2, tolerance=2e-3, **options)


def test_a_second_prompt_and_reuse_are_as_on_the_cpu(device):
    logits = {}
    for where in (torch.device("cpu"), device):
        model, _ = on(where, "qwen2")
        first, more = (torch.arange(*span, device=where)[None] for span in ((10, 50), (60, 70)))
        with torch.no_grad(), kvcompress.compress(model, "adakv", 0.4) as session:
            model(first)
            with session.reuse() as cache:
                once = model(more, past_key_values=cache).logits
            again = model(more, past_key_values=session.cache).logits
        torch.testing.assert_close(once, again, atol=1e-4, rtol=0)
        logits[where.type] = again.cpu()
    torch.testing.assert_close(logits[device.type], logits["cpu"], atol=1e-3, rtol=0)


def test_beams_are_as_on_the_cpu(device):
    found = []
    for where in (torch.device("cpu"), device):
        model, inputs = on(where, "qwen2")
        with kvcompress.compress(model, "adakv", 0.4):
            found.append(model.generate(**inputs, num_beams=3, max_new_tokens=5, do_sample=False).cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["snapkv", "adakv", "full"])
def test_flash_attention_and_sdpa_agree(cuda, method, dtype):
    pytest.importorskip("flash_attn")
    model, inputs = on(cuda, "qwen2", dtype)
    ratio = None if method == "full" else 0.3
    tokens, expected, _ = answered(model, inputs, method, ratio)
    model.set_attn_implementation("flash_attention_2")
    _, logits, _ = answered(model, inputs, method, ratio, tokens)
    assert (logits.float() - expected.float()).abs().mean() < 0.03
