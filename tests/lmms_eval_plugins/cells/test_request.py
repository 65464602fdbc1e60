"""The command line of an evaluation: what is asked for is what is run, and a slip is one clear line. Each flag of
lmms-eval's own command works, or one line says what replaces it."""

import argparse
import re
import sys

import pytest

from kvcompress.errors import KVCompressError
from kvcompress.flag_types import whole
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.cells.request import REPLACED, flag_parser, literal
from lmms_eval_plugins.evaluate import parse
from tests.support.evaluation import FOUR

# A value that each flag with a value takes; the others take a 3.
VALUES = {
    "batch_size": "auto:2", "device": "cpu", "gen_kwargs": "temperature=0", "wandb_args": "project=p",
    "hf_hub_log_args": "push_results_to_hub=true", "reasoning_tags": "none", "timezone": "Europe/Berlin",
    "verbosity": "INFO", "include_path": ".", "output_path": "out", "use_cache": "cache",
}  # fmt: skip


@pytest.fixture
def theirs(monkeypatch):
    """The actions of the installed lmms-eval's own parser."""
    from lmms_eval.__main__ import parse_eval_args

    monkeypatch.setattr(sys, "argv", ["lmms-eval"])
    parser, _ = parse_eval_args()
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]


def test_every_flag_of_the_installed_lmms_eval_works_or_one_line_says_what_replaces_it(theirs):
    """Through its own parser: a flag that a newer lmms-eval has is neither, and fails here."""
    ours = flag_parser()._option_string_actions
    assert len(theirs) > 40
    for action in theirs:
        for flag in action.option_strings:
            value = [] if action.nargs == 0 else [VALUES.get(action.dest, "3")]
            if flag in REPLACED:
                assert flag not in ours
                with pytest.raises(KVCompressError) as error:
                    parse([*FOUR, flag, *value])
                assert re.fullmatch(rf"{flag} is not supported here: \S.{{15,}}", str(error.value))
            else:
                assert flag in ours, f"{flag} of lmms-eval is neither a flag here nor replaced"
                also = ["--wandb_args", "project=p"] if flag == "--wandb_log_samples" else []
                also += ["--batch_size", "auto"] if flag == "--max_batch_size" else []
                Plan.of(parse([*FOUR, flag, *value, *also]))
    assert REPLACED.keys() <= {flag for action in theirs for flag in action.option_strings}


def test_a_path_may_begin_with_the_users_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = parse([*FOUR, "--output_path=~/out", "--data-root=~"]).flags
    assert (flags.output_path, flags.data_root) == (tmp_path / "out", tmp_path.resolve())


def test_flags_that_are_model_arguments_by_another_name():
    request = parse([*FOUR, "-b", "auto", "--max_batch_size", "8", "--system_instruction", "Be brief."])
    assert request.arguments == {"batch_size": "auto", "max_batch_size": 8, "system_prompt": "Be brief."}
    assert parse([*FOUR, "--apply_chat_template=rag"]).arguments == {"chat_template": "rag"}


@pytest.mark.parametrize(
    "argv",
    [
        ["--apply_chat_template", *FOUR],
        [*FOUR[:2], "--apply_chat_template", *FOUR[2:], "window_size=8"],
        [*FOUR, "--apply_chat_template"],
        [*FOUR, "--apply_chat_template", "window_size=8"],
        ["--apply_chat_template", "--limit", "2", *FOUR],
    ],
)
def test_the_chat_template_flag_takes_no_word_that_is_needed(argv):
    request = parse(argv)
    assert (request.tasks, request.model, request.methods) == (["tiny_textvqa"], "tiny", ["snapkv"])
    assert "chat_template" not in request.arguments


# -- the words

WORDS = ["textvqa_val", "org/model", "snapkv", "0.2"]


def test_four_words_flags_and_arguments_in_any_order():
    request = parse([*WORDS[:2], "--limit", "8", *WORDS[2:], "window_size=8", "--batch_size", "2", "dtype=float32"])
    assert (request.tasks, request.model) == (["textvqa_val"], "org/model")
    assert (request.methods, request.ratios, request.budgets) == (["snapkv"], [0.2], [])
    assert request.arguments == {"window_size": 8, "dtype": "float32", "batch_size": 2}
    assert request.flags.limit == 8


def test_lists_are_split_and_repeats_dropped():
    request = parse(["a,b", "m", "snapkv, knorm,snapkv", "0.2,0.1,0.2"])
    assert (request.tasks, request.methods, request.ratios) == (["a", "b"], ["snapkv", "knorm"], [0.2, 0.1])
    assert parse(["a", "m", "knorm", "0.1, 0.10,1e-1 ,.1,0.2"]).ratios == [0.1, 0.2]
    assert parse(["a", "m", "knorm", "-", "budget=64,064"]).budgets == [64]


def test_budgets_stand_in_place_of_ratios():
    request = parse([*WORDS[:3], "-", "budget=64,128"])
    assert (request.ratios, request.budgets) == ([], [64, 128])
    assert "budget" not in request.arguments


def test_no_task_means_the_demo_which_takes_flags_and_arguments():
    demo = parse([])
    assert (demo.tasks, demo.model) == (["tiny_textvqa"], "tiny")
    assert demo.methods == ["full", "streamingllm", "snapkv", "random"]
    assert demo.ratios == [0.5, 0.2, 0.1, 0.05]
    assert demo.flags.limit >= 250
    request = parse(["--limit", "8", "window_size=16", "--batch_size", "1"])
    assert (request.tasks, request.flags.limit) == (["tiny_textvqa"], 8)
    assert request.arguments == {"window_size": 16, "kernel_size": 7, "pooling": "max", "batch_size": 1}


def test_values_of_flags():
    flags = parse([*WORDS, "--gen_kwargs", "temperature=0.5,top_p=1", "--seed", "3", "--limit", "0.5"]).flags
    assert flags.gen_kwargs == {"temperature": 0.5, "top_p": 1}
    assert flags.seed == [3, 3, 3, 3]
    assert flags.limit == 0.5
    assert parse([*WORDS, "--seed", "0,1,2,3"]).flags.seed == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), ("-1", -1), ("0.5", 0.5), ("true", True), ("False", False), ("avg", "avg")]
)
def test_literals(text, value):
    result = literal(text)
    assert result == value
    assert type(result) is type(value)


def test_a_whole_number_has_31_bits():
    assert whole()("2147483647") == 2**31 - 1
    for text in ("2147483648", "4294967296", "99999999999"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of at least 0"):
            whole()(text)
