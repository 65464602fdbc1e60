"""What all backends of cache_implementation=quantized promise alike."""

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.families import FAMILIES
from tests.support.storages import kept_lists

MODEL = FAMILIES["qwen2"].build()
FP8, TURBOQUANT, HQQ = (
    {"cache_implementation": "quantized", "kv_backend": "fp8"},
    {"cache_implementation": "quantized", "kv_backend": "turboquant", "kv_bits": 3},
    {"cache_implementation": "quantized", "kv_backend": "hqq", "kv_bits": 8, "kv_group_size": 16, "kv_residual": 4},
)
BY_ENTRY = [FP8, TURBOQUANT]  # each entry is packed by itself
every_backend = pytest.mark.parametrize("options", [*BY_ENTRY, HQQ], ids=lambda options: options["kv_backend"])


@pytest.fixture(autouse=True)
def installed(request):
    if request.node.callspec.params["options"].get("kv_backend") == "hqq":
        pytest.importorskip("hqq", reason="pip install -e .[quantized]")


@pytest.mark.parametrize("options", BY_ENTRY, ids=lambda options: options["kv_backend"])
def test_bytes_stay_when_more_comes(options):
    """Also a second prompt, and a prompt's last token that is fed again."""
    cache = kvcompress.CompressedCache(MODEL.config, "snapkv", 0.5, first_token="compressed", **options)
    before = ()
    with kvcompress.attach(MODEL), torch.no_grad():
        for prompt in (torch.arange(10, 80)[None], torch.arange(20, 60)[None]):
            generate(MODEL, {"input_ids": prompt}, 5, past_key_values=cache)
            storage = cache.layers[0].storage
            packed = storage.inner.kept(cache.get_seq_length())
            held = (packed.indices, packed.keys, packed.values, *storage.read())
            for earlier, later in zip(before, held, strict=bool(before)):
                assert torch.equal(later[:, :, : earlier.shape[2]], earlier)
            before = held


@every_backend
def test_a_token_that_is_fed_again_is_stored_once(options):
    with kvcompress.compress(MODEL, "snapkv", 0.5, first_token="compressed", **options) as session:
        MODEL(torch.arange(10, 80)[None])
    assert [head.tolist().count(69) for head in session.cache.kept_indices(0)[0]] == [1, 1]
    assert session.cache.get_seq_length() == 70


@every_backend
@pytest.mark.parametrize("method", ["snapkv", "adakv"])
def test_rows_that_change_places_and_forks_take_their_entries_along(method, options):
    """As beams do."""
    cache = kvcompress.CompressedCache(MODEL.config, method, 0.5, **options)
    with kvcompress.attach(MODEL), torch.no_grad():
        MODEL(**FAMILIES["qwen2"].inputs(MODEL, [40, 25]), past_key_values=cache)
    (before, *_), storage = kept_lists(cache), cache.layers[0].storage
    keys, values = storage.read()
    storage.fork().append(keys[:, :, :1], values[:, :, :1])
    assert torch.equal(storage.read()[0], keys)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert kept_lists(cache)[0] == before[::-1]
    assert before[0] != before[1]
    used = storage.visible()
    assert torch.equal(storage.read()[0][used], keys.flip(0)[used])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FP8 | {"kv_bits": 4}, "kv_bits=4 is not offered by kv_backend='fp8': 8"),
        (FP8 | {"kv_group_size": 32}, "kv_group_size= is not for kv_backend='fp8'"),
        (FP8 | {"kv_residual": 32}, "kv_residual= is not for kv_backend='fp8'"),
        (FP8 | {"cache_implementation": "dynamic"}, "kv_backend= needs cache_implementation='quantized'"),
        (FP8 | {"decode_budget": 9}, "does not go with decode_budget="),
        (TURBOQUANT | {"kv_bits": 8}, "kv_bits=8 is not offered by kv_backend='turboquant': 2, 3, 4"),
        (TURBOQUANT | {"kv_group_size": 32}, "kv_group_size= is not for kv_backend='turboquant', which packs each"),
        (TURBOQUANT | {"kv_residual": 32}, "kv_residual= is not for kv_backend='turboquant'"),
        ({"cache_implementation": "quantized", "kv_bits": 3}, "kv_bits=3 is not offered by kv_backend='quanto': 2, 4"),
        ({"kv_bits": 2}, "kv_bits= needs cache_implementation='quantized'"),
    ],
)
def test_what_does_not_go_together_is_an_error(options, message):
    with pytest.raises(kvcompress.KVCompressError, match=message):
        kvcompress.compress(MODEL, "snapkv", 0.5, **options)
