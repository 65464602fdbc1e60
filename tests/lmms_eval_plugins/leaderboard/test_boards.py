"""What stands in one table was asked and answered in the same way; each row says how it was made."""

import json
import shlex
from dataclasses import asdict
from itertools import combinations

import pytest

from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.leaderboard.boards import leaderboard, rows_of
from lmms_eval_plugins.leaderboard.protocol import holds_full, protocol_of, regime, variant
from lmms_eval_plugins.leaderboard.rerun import command_of
from lmms_eval_plugins.report.groups import load_groups
from lmms_eval_plugins.report.significance import holm, paired_test
from tests.support.result_cells import write_answers

SCOPE = {"scope": "prompt", "ratio_of": "prompt"}


def cell_of(method="snapkv", settings=None, changed=None, **options):
    protocol = {"task": "t", "model": "m", "method": method, "ratio": 0.2, "budget": None}
    protocol |= {"settings": settings or {}, "options": options, "changed_options": changed or {}}
    return {"protocol": protocol}


DIFFERENT = {
    "as it comes": cell_of(),
    "first_token": cell_of(first_token="compressed"),
    "scope": cell_of(scope="context"),
    "context_tokens": cell_of(scope="context", context_tokens=-1),
    "fair": cell_of(fair="first:9"),
    "protect_text": cell_of(protect_text="Be brief."),
    "ratio_of": cell_of(ratio_of="vision"),
    "positions": cell_of(positions="cache"),
    "prefill_chunk": cell_of(prefill_chunk=512),
    "decode_budget": cell_of(decode_budget=64),
    "static": cell_of(cache_implementation="static"),
    "quanto": cell_of(cache_implementation="quantized"),
    "two bits": cell_of(cache_implementation="quantized", kv_bits=2),
    "small groups": cell_of(cache_implementation="quantized", kv_group_size=32),
    "fewer channels": cell_of(cache_implementation="think"),
    "few channels": cell_of(cache_implementation="think", key_channels=0.3),
    "turboquant": cell_of(cache_implementation="quantized", kv_backend="turboquant"),
    "fp8": cell_of(cache_implementation="quantized", kv_backend="fp8"),
    "batch_size": cell_of(settings={"batch_size": 8}),
    "slots": cell_of(settings={"slots": 8}),
    "generation": cell_of(settings={"gen_kwargs": {"temperature": 1.0}}),
    "another": cell_of(settings={"gen_kwargs": {"temperature": 0.5}}),
    "examples": cell_of(settings={"num_fewshot": 0}),
    "prompt": cell_of(settings={"system_prompt": "Be brief."}),
    "pixels": cell_of(settings={"max_pixels": 1000}),
    "dtype": cell_of(settings={"dtype": "float32"}),
    "weights": cell_of(settings={"quantization": "bnb-int4"}),
    "questions": cell_of(settings={"offset": 8}),
}


@pytest.mark.parametrize(("a", "b"), list(combinations(DIFFERENT, 2)))
def test_what_changes_the_numbers_is_another_protocol(a, b):
    assert protocol_of(DIFFERENT[a]) != protocol_of(DIFFERENT[b])


@pytest.mark.parametrize(
    "same",
    [
        cell_of("adakv"),
        cell_of(window_size=8, changed={"window_size": 8}),
        cell_of(settings={"device": "cuda:1"}),
        cell_of(settings={"revision": "v2"}),
        cell_of(settings={"batch_size": 1}),
        cell_of(kv_bits=2),  # nothing is quantized
    ],
)
def test_a_method_its_options_and_the_machine_are_no_protocol(same):
    assert protocol_of(same) == protocol_of(cell_of())


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_full_cache_stands_where_it_was_asked_and_stored_in_the_same_way(name):
    cell, full = DIFFERENT[name], protocol_of(cell_of("full"))
    only_compressed = {"as it comes", "fair", "protect_text", "scope", "context_tokens", "ratio_of", "positions"}
    only_compressed |= {"decode_budget"}
    assert holds_full(protocol_of(cell), full) == (name in only_compressed)
    own = {**cell["protocol"], "method": "full"}
    assert holds_full(protocol_of(cell), protocol_of({"protocol": own}))


def test_a_row_names_the_options_that_are_no_protocol():
    cell = cell_of(changed={"window_size": 8, "first_token": "compressed", "merge": "cam"})
    assert variant(cell) == "snapkv merge=cam window_size=8"


@pytest.fixture
def boards(tmp_path):
    """Two protocols of one task, one of another; two models."""
    compressed = {"options": {"first_token": "compressed"}, **SCOPE, "first_token": "compressed"}
    plain = {"options": {}, **SCOPE, "first_token": "full"}
    for model, answers in (("org/a", "abxx"), ("org/b", "abcx")):
        common = {"model": model, "tokens": 9}
        write_answers(tmp_path, "letters", "full", 1.0, "abcd", protocol=plain, **common)
        write_answers(tmp_path, "letters", "snapkv", 0.5, answers, protocol=plain, **common)
        write_answers(tmp_path, "letters", "snapkv", 0.2, answers, protocol=plain, **common)
        changed = {"options": {"first_token": "compressed"}}
        write_answers(tmp_path, "letters", "full", 1.0, "abcx", protocol=compressed, **changed, **common)
        write_answers(tmp_path, "letters", "snapkv", 0.2, "xxxx", protocol=compressed, **changed, **common)
    write_answers(tmp_path, "words", "knorm", 0.2, "abcd", protocol=plain, model="org/a", tokens=40)
    return {
        (board["task"], board["protocol"]["first_token"]): board
        for board in leaderboard(rows_of("mine", load_groups(tmp_path)))["boards"]
    }


def test_each_table_holds_one_task_under_one_protocol_with_its_full_cache(boards):
    rows = {
        key: sorted((cell["model"], cell["variant"], cell["ratio"]) for cell in board["cells"])
        for key, board in boards.items()
    }
    both = [("full", 1.0), ("snapkv", 0.2), ("snapkv", 0.5)]
    assert rows == {
        ("letters", "full"): [(model, *row) for model in ("org/a", "org/b") for row in both],
        ("letters", "compressed"): [(model, *row) for model in ("org/a", "org/b") for row in both[:2]],
        ("words", "full"): [("org/a", "knorm", 0.2)],
    }
    letters = boards["letters", "compressed"]
    said = "first_token=compressed, scope=prompt, ratio_of=prompt, batch_size=1; 4 questions"
    assert letters["protocol_text"] == said
    assert {cell["series"] for cell in letters["cells"]} == {
        f"{model}: {method}" for model in ("org/a", "org/b") for method in ("full", "snapkv")
    }
    assert {cell["series"] for cell in boards["words", "full"]["cells"]} == {"knorm"}
    assert boards["words", "full"]["regime"] != letters["regime"]


def test_a_row_is_held_against_its_own_models_full_cache_under_its_own_protocol(boards):
    found = {cell["model"]: cell for cell in boards["letters", "full"]["cells"] if cell["ratio"] == 0.2}
    expected = paired_test([1, 1, 0, 0], [1, 1, 1, 1])
    against = found["org/a"]["against"]
    ends = [100 * end for end in (expected.low, expected.high)]
    assert [against[name] for name in ("difference", "low", "high")] == [-50, *ends]
    assert (against["questions"], against["broken"], against["mended"], against["not_worse"]) == (4, 2, 0, 0)
    assert found["org/a"]["same"] == 0.5
    assert found["org/b"]["against"]["difference"] == -25
    assert found["org/a"]["interval"] == [0, 1]
    low, high = found["org/b"]["interval"]
    assert 0 <= low < 0.75 < high <= 1
    lost = [cell for cell in boards["letters", "compressed"]["cells"] if cell["ratio"] == 0.2]
    assert [cell["against"]["difference"] for cell in lost] == [-75, -75]
    (alone,) = boards["words", "full"]["cells"]
    assert (alone["against"], alone["same"], alone["interval"]) == (None, None, None)  # all its answers are right


def test_p_values_are_corrected_for_the_rows_of_a_table(tmp_path):
    truth = "abcdefghijklmnopqrst"
    protocol = {"options": {}, **SCOPE, "first_token": "full"}
    for method, lost in (("full", 0), ("snapkv", 8), ("knorm", 6), ("random", 1)):
        answers = "-" * lost + truth[lost:]
        ratio = 1.0 if method == "full" else 0.2
        write_answers(tmp_path, "letters", method, ratio, answers, truth=truth, protocol=protocol)
    (board,) = leaderboard(rows_of("mine", load_groups(tmp_path)))["boards"]
    found = {cell["method"]: cell["against"] for cell in board["cells"]}
    assert found.pop("full") is None
    expected = holm([2**-7, 2**-5, 1])  # of 8, 6 and 1 answers that all turned the same way
    assert [found[method]["holm"] for method in ("snapkv", "knorm", "random")] == pytest.approx(expected)


def test_draws_of_a_method_are_one_of_those_to_choose_among(tmp_path):
    truth = "abcd" * 11
    write_answers(tmp_path, "letters", "full", 1.0, truth, truth, protocol=SCOPE)
    for seed, wrong in enumerate((4, 0, 6)):
        answers, options = "X" * wrong + truth[wrong:], {"seed": seed} if seed else {}
        folder = write_answers(tmp_path, "letters", "random", 0.5, answers, truth, protocol=SCOPE, options=options)
    write_answers(tmp_path, "letters", "knorm", 0.5, "X" + truth[1:], truth, protocol=SCOPE)
    (board,) = leaderboard(rows_of("mine", load_groups(folder)))["boards"]
    assert (board["choice"], board["best"]) == (None, ["knorm", "random"])  # one draw is better than knorm, none chosen
    write_answers(tmp_path, "letters", "snapkv", 0.5, "XXX" + truth[3:], truth, protocol=SCOPE)
    (board,) = leaderboard(rows_of("mine", load_groups(folder)))["boards"]
    assert (board["choice"]["method"], board["choice"]["methods"]) == ("knorm", 3)


def test_tables_of_other_questions_or_another_definition_of_the_task_are_others(tmp_path):
    for model, answers, definition in (("a", "abcd", "1"), ("b", "ab", "1"), ("c", "abcd", "2")):
        write_answers(tmp_path, "letters", "knorm", 0.2, answers, truth=answers, model=model)
        file = tmp_path / "letters" / model / "knorm-0.2" / "results.json"
        results = json.loads(file.read_text())
        file.write_text(json.dumps({**results, "fingerprint": {"tasks": {"letters": definition}}}))
    boards = leaderboard(rows_of("mine", load_groups(tmp_path)))["boards"]
    assert sorted([cell["model"] for cell in board["cells"]] for board in boards) == [["a"], ["b"], ["c"]]
    assert len({board["protocol_text"] for board in boards}) == 3


@pytest.mark.parametrize(
    ("images", "videos", "vision", "tokens", "answer", "expected"),
    [
        (0, 0, 0, 100, 4, "text"),
        (1, 0, 2900, 3000, 4, "an image"),
        (3, 0, 2900, 3000, 4, "several images"),
        (0, 1, 2900, 3000, 4, "video"),
        (1, 0, 300, 3000, 4, "an image, long text"),
        (1, 0, 300, 380, 60, "an image, long answers"),
        (0, 0, 0, 2000, 200, "text, long text, long answers"),
    ],
)
def test_the_regime_says_what_questions_demand(images, videos, vision, tokens, answer, expected):
    seen = {"images": images, "videos": videos, "vision_tokens": vision, "tokens_in": tokens, "tokens_out": answer}
    assert regime([{"efficiency": {name: {"median": value, "p90": value} for name, value in seen.items()}}]) == expected


COMMANDS = {
    "plain": "tiny_textvqa tiny full,snapkv 0.2,0.05",
    "options": "tiny_textvqa tiny full,snapkv 0.2 window_size=8 first_token=compressed merge=cam",
    "budget": "tiny_textvqa tiny snapkv - budget=64,128 layer_budget=pyramid decode_ratio=0.5",
    "preset": "tiny_textvqa tiny simlayerkv - preset=qwen2",
    "several numbers": "tiny_textvqa tiny pyramiddrop 0.2 steps=2,3,4",
    "blind": "tiny_textvqa tiny blind 1",
    "seeds": "tiny_textvqa tiny random 0.2 seed=3 --seed 7",
    "settings": "tiny_textvqa tiny knorm 0.2 batch_size=auto:4 dtype=float32 max_new_tokens=7 vision_cache_gb=0 "
    "'system_prompt=Be brief, please.' --limit 0.25 --offset 3 --seed 7 --num_fewshot 0 "
    "--gen_kwargs temperature=0.5,do_sample=true --fewshot_as_multiturn --predict_only -n 3 --reasoning_tags none",
    "slots": "tiny_video tiny adakv 0.2 slots=8 cache_implementation=static --process_with_media",
    "text": "gsm8k tiny knorm 0.2 --apply_chat_template --metadata '{\"max_seq_lengths\": [4096]}'",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_of_a_row_asks_for_that_cell_alone(name):
    plan = Plan.of(parse(shlex.split(COMMANDS[name])))
    for cell, options in plan.cells:
        of_cell = asdict(cell)
        changed = of_cell.pop("options")
        command = command_of({"protocol": {**of_cell, "options": options, "changed_options": changed}})
        script, *words = shlex.split(command)
        assert script == "./scripts/run_eval.sh"
        assert Plan.of(parse(words)).cells == [(cell, options)]


def test_the_command_of_a_row_that_a_server_answered_asks_the_server():
    cell = cell_of(changed={"server": "kvcompress", "window_size": 8})
    environment = {"device": "kvcompress at http://127.0.0.1:8000/v1"}
    assert command_of({**cell, "environment": environment}) == (
        "./scripts/run_eval.sh t m snapkv 0.2 --server http://127.0.0.1:8000/v1 window_size=8"
    )


def test_the_command_of_several_processes_says_so():
    assert command_of({**cell_of(), "environment": {"processes": 4}}) == (
        "NUM_PROCESSES=4 ./scripts/run_eval.sh t m snapkv 0.2"
    )
