"""Flags of lmms-eval's own command: each works, or one line says what replaces it."""

import re
import sys
from pathlib import Path

import pytest

from kvcompress.errors import KVCompressError
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.cells.request import REPLACED, flag_parser
from lmms_eval_plugins.evaluate import parse

FOUR = ["tiny_textvqa", "tiny", "snapkv", "0.2"]
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch_size", "auto:0"], "argument --batch_size/-b: 'auto:0' is neither a whole number of at least 1, nor"),
        (["--batch_size", "0"], "'0' is neither"),
        (["--max_batch_size", "-1"], "argument --max_batch_size: '-1' is not"),
        (["--offset", "x"], "argument --offset: 'x' is not"),
        (["--repeats", "0"], "argument -n/--repeats/--num_samples: '0' is not"),
        (["--timezone", "Europe/Berlni"], "'Europe/Berlni' is not a time zone (did you mean 'Europe/Berlin'?)"),
        (["--timezone", "../../etc/passwd"], "is not a time zone"),
        (["--reasoning_tags", '["<a>"]'], "is neither none nor a JSON list of pairs"),
        (["--reasoning_tags", "[[1, 2]]"], "is neither none nor a JSON list of pairs"),
        (["--wandb_args", "project"], "'project' is not name=value"),
        (["--wandb_args", ""], "holds no name=value"),
        (["--wandb_log_samples"], "--wandb_log_samples needs --wandb_args"),
        (["--hf_hub_log_args", "hub_results_org=me"], "push_results_to_hub=true nor push_samples_to_hub=true"),
        (["--hf_hub_log_args", "push_result_to_hub=true"], "(did you mean 'push_results_to_hub'?)"),
        (["--hf_hub_log_args", "push_results_to_hub=yes"], "is neither true nor false"),
        (["--hf_hub_log_args", "token=hf_secret"], "set HF_TOKEN"),
        (
            ["--system_instruction", "a", "system_prompt=b"],
            "system_prompt= is given twice: --system_instruction also sets",
        ),
        (["--tasks", "list"], "`python -m kvcompress list tasks [WORD]`"),
        (["--config=run.yaml"], "--config is not supported here: python -m kvcompress sweep"),
        (["--batch_siz", "2"], "unknown flag '--batch_siz' (did you mean '--batch_size'?)"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_flag(argv, message):
    with pytest.raises(KVCompressError) as error:
        parse([*FOUR, *argv])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


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


def test_what_is_missing_is_named_also_behind_the_chat_template_flag():
    with pytest.raises(KVCompressError, match="METHOD is missing"):
        parse(["--apply_chat_template", *FOUR[:2]])


def cell(*argv):
    return Plan.of(parse([*FOUR, *argv])).cells[0][0]


@pytest.mark.parametrize(
    "argv",
    [
        ["--batch_size", "auto"], ["--offset", "2"], ["--repeats", "2"], ["--system_instruction", "Be brief."],
        ["--fewshot_as_multiturn"], ["--process_with_media"], ["--reasoning_tags", "none"],
    ],
)  # fmt: skip
def test_what_changes_answers_is_part_of_a_cells_identity(argv):
    assert cell(*argv).folder(Path()) != cell().folder(Path())


@pytest.mark.parametrize(
    "argv",
    [
        ["--use_cache", "cache"], ["--check_integrity"], ["--write_out"], ["--show_config"], ["--timezone", "UTC"],
        ["--wandb_args", "project=p", "--wandb_log_samples"], ["--hf_hub_log_args", "push_results_to_hub=true"],
        ["--apply_chat_template"], ["--process-docs-parallel", "1"], ["--log_samples"], ["--offset", "0"],
        ["--repeats", "1"],
    ],
)  # fmt: skip
def test_what_changes_no_answer_is_not(argv):
    assert cell(*argv) == cell()


def test_each_search_for_a_batch_size_is_a_cell_of_its_own():
    auto = ["--batch_size", "auto"]
    assert cell(*auto) != cell("--batch_size", "auto:4") != cell(*auto, "--max_batch_size", "8") != cell(*auto)
