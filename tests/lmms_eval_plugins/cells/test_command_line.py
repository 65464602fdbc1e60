"""The command line of run_eval.sh: what is asked for is what is run, and a slip is one clear line, at once."""

import subprocess
import sys

import pytest

from kvcompress.errors import KVCompressError
from lmms_eval_plugins.cells.request import literal
from lmms_eval_plugins.evaluate import parse

FOUR = ["textvqa_val", "org/model", "snapkv", "0.2"]


def test_four_words_flags_and_arguments_in_any_order():
    request = parse([*FOUR[:2], "--limit", "8", *FOUR[2:], "window_size=8", "--batch_size", "2", "dtype=float32"])
    assert (request.tasks, request.model) == (["textvqa_val"], "org/model")
    assert (request.methods, request.ratios, request.budgets) == (["snapkv"], [0.2], [])
    assert request.arguments == {"window_size": 8, "dtype": "float32", "batch_size": 2}
    assert request.flags.limit == 8


def test_lists_are_split_and_repeats_dropped():
    request = parse(["a,b", "m", "snapkv, knorm,snapkv", "0.2,0.1,0.2"])
    assert (request.tasks, request.methods, request.ratios) == (["a", "b"], ["snapkv", "knorm"], [0.2, 0.1])


def test_budgets_stand_in_place_of_ratios():
    request = parse([*FOUR[:3], "-", "budget=64,128"])
    assert (request.ratios, request.budgets) == ([], [64, 128])
    assert "budget" not in request.arguments


def test_no_task_means_the_demo():
    request = parse([])
    assert (request.tasks, request.model) == (["tiny_textvqa"], "tiny")
    assert request.methods == ["full", "streamingllm", "snapkv", "random"]
    assert request.ratios == [0.5, 0.2, 0.1, 0.05]
    assert request.flags.limit >= 250
    assert request.arguments["window_size"] == 8


def test_demo_takes_flags_and_arguments():
    request = parse(["--limit", "8", "window_size=16", "--batch_size", "1"])
    assert (request.tasks, request.flags.limit) == (["tiny_textvqa"], 8)
    assert request.arguments == {"window_size": 16, "kernel_size": 7, "pooling": "max", "batch_size": 1}


def test_flags_of_lmms_eval():
    flags = parse([*FOUR, "--gen_kwargs", "temperature=0.5,top_p=1", "--seed", "3", "--limit", "0.5"]).flags
    assert flags.gen_kwargs == {"temperature": 0.5, "top_p": 1}
    assert flags.seed == [3, 3, 3, 3]
    assert flags.limit == 0.5
    assert parse([*FOUR, "--seed", "0,1,2,3"]).flags.seed == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (FOUR[:3], "RATIO is missing"),
        (FOUR[:1], "MODEL is missing"),
        ([*FOUR[:3], "20"], "RATIO 20 is not in"),
        ([*FOUR[:3], "0"], "RATIO 0 is not in"),
        ([*FOUR[:3], "nan"], "RATIO 'nan' is not a number"),
        ([*FOUR[:3], "0.2,1.5"], "RATIO 1.5 is not in"),
        ([*FOUR[:3], "window_size=8"], "'window_size=8' is not a number"),
        ([*FOUR[:3], "-"], "budget=ENTRIES"),
        ([*FOUR, "budget=64"], "budget=ENTRIES"),
        ([*FOUR, "budget=64", "preset=paper"], "budget=ENTRIES"),
        ([*FOUR[:3], "-", "budget=0"], "budget='0' is not a whole number of at least 1"),
        ([*FOUR, "--lmit", "8"], "unknown flag '--lmit' (did you mean '--limit'?)"),
        ([*FOUR, "--limit", "-1"], "--limit: '-1' is neither"),
        ([*FOUR, "--limit", "2.5"], "--limit: '2.5' is neither"),
        ([*FOUR, "--limit", "x"], "--limit: 'x' is neither a number of questions nor a fraction below 1"),
        ([*FOUR, "--seed", "1,2"], "neither one seed nor four"),
        ([*FOUR, "--gen_kwargs", "x"], "'x' is neither a flag nor key=value"),
        ([*FOUR, "--data-root", "/no/such"], "'/no/such' is not a folder"),
        ([*FOUR, "extra"], "'extra' is neither a flag nor key=value"),
        ([*FOUR, "a=1", "a=2"], "a= is given twice"),
        ([*FOUR, "method=knorm"], "method= is set by METHOD"),
        (["", *FOUR[1:]], "TASK '' is an empty list"),
        ([",", *FOUR[1:]], "TASK ',' is an empty list"),
        ([*FOUR[:2], "", "0.2"], "METHOD '' is an empty list"),
        ([*FOUR[:2], " , ", "0.2"], "METHOD ' , ' is an empty list"),
        ([*FOUR[:3], ""], "RATIO '' is an empty list"),
        ([*FOUR[:3], ","], "RATIO ',' is an empty list"),
        ([*FOUR[:3], "0.5,-"], "RATIO '-' is not a number"),
        ([*FOUR[:3], "0.5,-", "budget=64"], "give either RATIO, or '-'"),
        ([*FOUR[:3], "-", "budget=,"], "budget ',' is an empty list"),
        ([*FOUR, "budget=,"], "give either RATIO, or '-'"),
        ([*FOUR, "budget="], "give either RATIO, or '-'"),
        ([*FOUR, "ratio=0.5"], "ratio= is set by RATIO"),
    ],
)
def test_bad_input_is_one_line_that_names_it(argv, message):
    with pytest.raises(KVCompressError) as error:
        parse(argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), ("-1", -1), ("0.5", 0.5), ("true", True), ("False", False), ("avg", "avg")]
)
def test_literals(text, value):
    result = literal(text)
    assert result == value
    assert type(result) is type(value)


def test_a_slip_is_answered_without_loading_torch():
    code = (
        "import sys\nfrom lmms_eval_plugins import evaluate\n"
        "code = evaluate.main(['a', 'b', 'snapkv', '7'])\nsys.exit(99 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: RATIO 7 is not in (0, 1]")
    assert len(done.stderr.splitlines()) == 1
