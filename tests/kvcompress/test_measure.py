import time
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

import kvcompress
from kvcompress import device, measure
from kvcompress.device import peak_memory, reset_peak_memory
from tests.support.families import FAMILIES, IMAGE

FAMILY = FAMILIES["llava-onevision"]
MODEL = FAMILY.build()


def measured(method="snapkv", ratio=0.2, new=6, **kwargs):
    inputs = FAMILY.inputs(MODEL, [40, 25], [1, 0])
    with kvcompress.compress(MODEL, method, ratio, max_new_tokens=new) as session:
        tokens, result = measure.generate(MODEL, session, inputs, max_new_tokens=new, do_sample=False, **kwargs)
    return inputs, tokens, result, session


def test_tokens_are_counted_per_row_without_padding():
    inputs, tokens, result, _ = measured()
    assert result.tokens_in == [40, 25]
    assert result.vision_tokens == [int((inputs["input_ids"][0] == IMAGE).sum()), 0]
    assert result.tokens_out == [6, 6]
    assert tokens.shape == (2, 6)


def test_bytes_and_ratios_are_those_of_the_cache():
    _, _, result, session = measured()
    assert result.kv_bytes_end == session.cache.nbytes
    assert 0 < result.kv_bytes_prompt <= result.kv_bytes_end
    assert [row for layer in result.realised_ratios for row in layer] == pytest.approx([0.2] * 6)


def test_room_for_the_answer_is_told_from_what_is_held():
    """3 layers, 2 rows, 2 KV heads, 16 channels of keys and of values, in fp32."""
    short, long = measured(new=6)[2], measured(new=12)[2]
    assert [short.kv_room_bytes, long.kv_room_bytes] == [tokens * 3 * 2 * 2 * 2 * 16 * 4 for tokens in (6, 12)]
    assert short.kv_bytes_prompt - short.kv_room_bytes == long.kv_bytes_prompt - long.kv_room_bytes


def test_time_is_split_at_the_first_token_and_read_when_the_device_is_done(monkeypatch):
    """50 ms for the prompt and 20 ms per token, on a device that works only while somebody waits for it. Counting bytes
    takes 7 s, for which no token waits."""
    now, work, nbytes = [100.0], [], kvcompress.CompressedCache.nbytes

    def wait(device: torch.device) -> None:
        now[0] += sum(work)
        work.clear()

    def counted(cache: kvcompress.CompressedCache) -> int:
        now[0] += 7
        return nbytes.fget(cache)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for module in (device, measure):
        monkeypatch.setattr(module, "synchronise", wait)
    monkeypatch.setattr(kvcompress.CompressedCache, "nbytes", property(counted))
    with MODEL.register_forward_hook(lambda *_, **k: work.append(0.05 if now[0] == 100.0 else 0.02)):
        _, _, result, _ = measured(new=4)
    assert (result.ttft_s, result.tpot_s) == (pytest.approx(0.05), pytest.approx(0.02))


def test_a_single_token_has_no_time_per_token():
    assert measured(new=1)[2].tpot_s is None


def test_only_a_session_of_this_model_that_is_entered_is_measured():
    """Any other would tell the cost of a generation that was not compressed by that of an earlier one."""
    inputs, _, _, left = measured()
    other = kvcompress.compress(FAMILIES["qwen2"].build(), "snapkv", 0.2)
    for session in (left, other):
        with pytest.raises(kvcompress.KVCompressError, match="a session of this very model"):
            measure.generate(MODEL, session, inputs, max_new_tokens=2)
    with other, pytest.raises(kvcompress.KVCompressError, match="a session of this very model"):
        measure.generate(MODEL, other, inputs, max_new_tokens=2)


@pytest.mark.parametrize("where", ["argument", "generation_config", "model"])
def test_an_answer_ends_with_the_end_token_that_generate_takes(where, monkeypatch):
    _, tokens, _, _ = measured()
    end = int(tokens[0, 2])
    given = {"eos_token_id": end}
    if where == "generation_config":
        given = {where: GenerationConfig(**given, pad_token_id=0)}
    if where == "model":  # transformers takes from the model's what a call's leaves open
        monkeypatch.setattr(MODEL, "generation_config", GenerationConfig(**given, pad_token_id=0))
        given = {"generation_config": GenerationConfig()}
    result = measured(**given)[2]
    expected = [row.index(end) + 1 if end in row else 6 for row in tokens.tolist()]
    assert result.tokens_out == expected
    assert expected[0] <= 3


def test_peak_memory_is_at_least_the_weights():
    weights = sum(p.numel() * p.element_size() for p in MODEL.parameters())
    assert measured()[2].peak_memory_bytes > weights


def test_a_peak_of_memory_is_forgotten_before_the_next_measurement():
    cpu = torch.device("cpu")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system or container cannot forget a peak")
    torch.ones(1 << 26).sum()  # 256 MB, freed at once
    before = peak_memory(cpu)
    reset_peak_memory(cpu)
    assert peak_memory(cpu) < before - (1 << 27)


def test_the_peak_of_several_gpus_is_the_sum_of_theirs(monkeypatch):
    peaks, first = {0: 500, 1: 700}, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: peaks.update({gpu: 10}))
    assert peak_memory(first) == 1200
    reset_peak_memory(first)
    assert peak_memory(first) == 20


def test_answer_lengths_end_with_the_end_token():
    new = torch.tensor([[5, 2, 0, 0], [5, 6, 7, 8], [2, 2, 2, 2]])
    assert measure.answer_lengths(new, 2) == [2, 4, 1]
    assert measure.answer_lengths(new, [2, 6]) == [2, 2, 1]
    assert measure.answer_lengths(new, None) == [4, 4, 4]
