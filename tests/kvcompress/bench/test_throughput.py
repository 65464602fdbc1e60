"""`python -m kvcompress bench throughput`: everyone answers the same requests, in the memory that was given."""

import json
from importlib.util import find_spec

import pytest

from kvcompress.__main__ import main
from kvcompress.bench.contenders import MethodSpec, Transformers, Workload
from kvcompress.bench.results import stored_setting
from kvcompress.bench.throughput import Asked, Continuous, entry_bytes, markdown, sizes, workload
from kvcompress.errors import KVCompressError
from tests.support.families import FAMILIES, MORE_FAMILIES

QUICK = ["--shape", "tiny", "--requests", "5", "--prompt", "20", "--answers", "3", "12", "--kv-gb", "0.00005"]
ENTRY = 2 * 2 * 2 * 16 * 4  # bytes of a token: keys and values, layers, KV heads, channels, fp32


def bench(tmp_path, *arguments: str) -> dict:
    out = ["--device", "cpu", "--out", str(tmp_path / "throughput")]
    assert main(["bench", "throughput", *QUICK, "--decode-budget", "8", *out, *arguments]) == 0
    return json.loads((tmp_path / "throughput.json").read_text())


def test_all_answer_the_same_requests_within_the_memory(tmp_path):
    content = bench(tmp_path, "--peers", "padded", "--methods", "full", "knorm:decode_interval=4", "adakv")
    asked = workload(512, 5, 20, 3, 12, 0)
    limit = int(0.00005 * 2**30)
    by_name = {served["name"]: served for served in content["served"]}
    assert list(by_name) == ["transformers generate, padded batches", "full", "knorm:decode_interval=4", "adakv"]
    for served in by_name.values():
        assert served["answers"] == 5
        assert served["tokens"] == sum(each.new for each in asked)
        assert served["seconds"] > 0
    longest = 20 + max(each.new for each in asked)
    padded = by_name["transformers generate, padded batches"]
    assert padded["slots"] == limit // (longest * ENTRY) == 3
    assert padded["steps"] == max(each.new for each in asked[:3]) + max(each.new for each in asked[3:])
    assert padded["kv_bytes"] <= limit
    assert by_name["full"]["slots"] == 3
    assert by_name["knorm:decode_interval=4"]["slots"] == 5 > by_name["full"]["slots"]
    text = (tmp_path / "throughput.md").read_text()
    assert "| full | 3 |" in text
    assert "5 requests of 20 prompt tokens, answers of 3 to 12 (seed 0)" in text


@pytest.mark.parametrize("family", ["qwen2", "gemma4"])  # whose layers differ
def test_a_token_has_the_bytes_of_all_layers(family):
    model = (FAMILIES | MORE_FAMILIES)[family].build()
    assert Transformers(model, "DynamicCache").turn(Workload(3, 1, 2, "wall")).kv_bytes == 5 * entry_bytes(model)


def test_a_method_may_name_its_own_budget(tmp_path):
    names = ["knorm:decode_interval=4", "knorm:decode_interval=4:decode_budget=4"]
    content = bench(tmp_path, "--kv-gb", "0.00002", "--peers", "--methods", *names)
    large, small = content["served"]
    assert [large["name"], small["name"]] == names
    assert small["slots"] > large["slots"]


def test_a_run_that_was_cut_goes_on_with_who_is_missing(tmp_path, capsys):
    first = bench(tmp_path, "--peers", "padded", "--methods", "full")
    capsys.readouterr()
    second = bench(tmp_path, "--peers", "padded", "--methods", "full", "streamingllm", "--resume")
    assert second["served"][:2] == first["served"]
    assert capsys.readouterr().out.splitlines()[0] == "streamingllm"


def test_a_memory_for_which_no_padded_row_is_small_enough_is_one_line(tmp_path, capsys):
    out = ["--device", "cpu", "--out", str(tmp_path / "throughput"), "--decode-budget", "8", "--methods", "knorm"]
    assert main(["bench", "throughput", *QUICK, "--peers", "padded", "--kv-gb", "0.00001", *out]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    assert "one row takes" in line
    assert "more than --kv-gb 1e-05" in line


def test_a_resumed_run_with_kv_gb_auto_has_the_memory_of_the_first(tmp_path):
    file = tmp_path / "throughput.json"
    assert stored_setting(file, "kv_gb") is None
    bench(tmp_path, "--peers", "padded", "--methods", "full")
    assert stored_setting(file, "kv_gb") == 0.00005
    file.write_text("{")
    assert stored_setting(file, "kv_gb") is None


def test_who_is_out_of_time_stops(tmp_path):
    content = bench(tmp_path, "--peers", "padded", "--methods", "full", "--minutes", "1e-9")
    padded, full = content["served"]
    assert padded["answers"] == 3  # a batch
    assert (full["answers"], full["steps"], full["tokens"]) == (0, 1, 2)  # a first token, and a step


def test_a_peer_that_had_no_time_for_a_token_is_a_row_and_compared_with_nobody(tmp_path):
    content = bench(tmp_path, "--peers", "padded", "--methods", "full")
    padded, full = content["served"]
    padded |= {"answers": 0, "tokens": 0}
    rows = [
        line.split(" | ") for line in markdown(content).splitlines() if line.startswith(("| transformers", "| full"))
    ]
    assert rows[0][2:5] == ["0.0", "", ""]
    assert rows[1][2:4] == [f"{full['tokens'] / full['seconds']:.1f}", ""]


@pytest.mark.slow
def test_transformers_continuous_batching_takes_part(tmp_path):
    content = bench(tmp_path, "--peers", "continuous", "--methods", "full")
    assert content["served"][0]["answers"] == 5
    assert content["served"][0]["tokens"] == content["served"][1]["tokens"]


# Methods inside transformers' continuous batching, at equal memory for keys and values

PAGES = "transformers.generation.continuous_batching.cache_allocators"
KNOWN_PAGES = pytest.mark.skipif(find_spec(PAGES) is None, reason="transformers has another continuous batching")
REQUESTS = [Asked(list(range(8 + i, 28 + i)), new) for i, new in enumerate((30, 3, 30, 11, 30))]


@KNOWN_PAGES
def test_a_method_serves_the_same_requests_in_fewer_steps():
    model, steps = FAMILIES["qwen2"].build(2), []
    kv_bytes = 7 * Continuous.PAGE * entry_bytes(model)
    taken = {}
    for contender in (Continuous(model), Continuous(model, MethodSpec.parse("keydiff:decode_interval=4", 1.0), 12)):
        steps.clear()
        with model.register_forward_hook(lambda *_: steps.append(1)):
            served = contender.serve(REQUESTS, kv_bytes, "wall", 60.0)
        assert (served.answers, served.tokens) == (5, 104)
        assert served.kv_bytes == kv_bytes
        taken[contender.name] = len(steps)
    assert taken["keydiff:decode_interval=4, in transformers continuous batching"] < taken[Continuous.name]


@KNOWN_PAGES
def test_a_request_that_cannot_be_answered_is_said():
    model = FAMILIES["qwen2"].build(2)
    contender = Continuous(model, MethodSpec.parse("keydiff", 1.0), 100)
    with pytest.raises(KVCompressError, match="continuous batching: No requests can be scheduled"):
        contender.serve([Asked([8] * 40, 100)], 2 * Continuous.PAGE * entry_bytes(model), "wall", 60.0)


@pytest.mark.parametrize("preset", ["cake:preset=llama-2-7b-1024", "morphkv:preset=longwriter"])
def test_a_presets_decode_budget_gives_way_to_the_commands(preset):
    found = sizes(MethodSpec.parse(preset, 1.0), 77)
    assert found["decode_budget"] == found["budget"] == 77
    assert set(found) > {"decode_budget", "budget"}
