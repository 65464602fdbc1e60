"""Whatever is typed: a wrong value is one line that names it, at once, and a right one stays right.

Nothing here is a list of known mistakes: flags, arguments and options are those that parsers, models and methods
declare, and wrong_values.py makes wrong values from their types. A new flag or option is tried as soon as it is there.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pytest

import kvcompress
from kvcompress import KVCompressError
from kvcompress.__main__ import main as core_main
from kvcompress.command_line import VARIABLES as CORE_VARIABLES
from kvcompress.policy.make import make_policy
from kvcompress.policy.options import Engine
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import machine
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.cells.request import BUNDLED_MODEL, literal
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.model.arguments import TINY_MODEL, ModelArguments, make_compression
from lmms_eval_plugins.model.generation import GenerationArguments
from lmms_eval_plugins.sweep.__main__ import main as sweep_main
from lmms_eval_plugins.sweep.trial import FLAGS
from tests.support.wrong_values import UNPRINTABLE, flags_with_values, spelt, wrong_for_flag, wrong_for_kind

ROOT = Path(__file__).parents[1]
FOUR = ["tiny_textvqa", "tiny", "snapkv", "0.2"]
DEMO = str(ROOT / "configs" / "sweeps" / "demo.yaml")

PLUGIN = "lmms_eval_plugins"
BENCH = "kvcompress.bench"
# command -> (module with its parser, the parser's name, words that are right, what must not be reached)
COMMANDS = {
    "run_eval": (f"{PLUGIN}.cells.request", "flag_parser", FOUR, f"{PLUGIN}.evaluate.run"),
    "run_sweep": (f"{PLUGIN}.sweep.__main__", "parser", [DEMO], f"{PLUGIN}.sweep.__main__.quiet"),
    "reproduce": (f"{PLUGIN}.reproduce.__main__", "parser", ["tiny"], f"{PLUGIN}.reproduce.grid.run_all"),
    "metrics": (f"{PLUGIN}.report.metrics_command", "parser", ["."], f"{PLUGIN}.report.metrics_tables.load_grid"),
    "table": (f"{PLUGIN}.report.table_command", "parser", ["."], f"{PLUGIN}.report.table.report"),
    "heatmap": (f"{PLUGIN}.report.heatmap_command", "parser", ["."], f"{PLUGIN}.report.heatmap.question_rows"),
    "long_pack": (f"{PLUGIN}.long_pack.__main__", "parser", ["--out", "x"], f"{PLUGIN}.long_pack.__main__.write"),
    "report": (
        f"{PLUGIN}.report.html.report_command",
        "parser",
        ["."],
        f"{PLUGIN}.report.groups.load_groups",
    ),
    "leaderboard": (f"{PLUGIN}.leaderboard.command", "parser", ["."], f"{PLUGIN}.report.groups.load_groups"),
    "show": (
        f"{PLUGIN}.report.html.show_command",
        "parser",
        ["a.png", "What?"],
        f"{PLUGIN}.report.html.show.photo",
    ),
    "bench": (f"{BENCH}.command", "parser", ["org/model"], f"{BENCH}.comparison.load"),
    "export": (
        "kvcompress.engines.command",
        "parser",
        ["snapkv", "0.2", "--engine", "openvino", "--tokens", "999"],
        "kvcompress.engines.openvino.export",
    ),
    "train": (
        "kvcompress.train.command",
        "parser",
        ["kvzap", "org/model", "--text", "x", "--out", "x"],
        "kvcompress.train.run.Run",
    ),
    "serve": ("kvcompress.serve.command", "parser", ["org/model", "snapkv", "0.2"], "kvcompress.serve.command.load"),
    "speech": ("kvcompress.speech.command", "parser", ["org/model", "snapkv", "0.2"], "kvcompress.speech.run.cold"),
}
FREE = {"words", "overrides", "options", "question"}  # text, or `key=value`, tried below by what the keys are


class Started(BaseException):
    """A wrong value got as far as the work itself."""


def started(*args, **kwargs):
    raise Started


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.rglob("*"))


@pytest.fixture
def refused(capsys):
    """Calls a command that must refuse its arguments; what is wrong about how it does, or nothing."""

    def call(main, argv, *named) -> str:
        shown = f"{[word[:30] for word in argv]}: "
        try:
            code = main(argv)
        except Started:
            return shown + "is accepted"
        except BaseException as error:
            return f"{shown}{type(error).__name__}: {str(error)[:200]}"
        lines = capsys.readouterr().err.splitlines()
        if code != 2 or len(lines) != 1 or not lines[0].startswith("error: ") or len(lines[0]) > 3000:
            return f"{shown}exit code {code}, {len(lines)} lines: {lines[-1][:200] if lines else ''}"
        if named and not any(name in lines[0] for name in named):
            return f"{shown}does not name {named[0]}: {lines[0][:200]}"
        return ""

    return call


def none_of(failures: list[str]) -> None:
    if found := [failure for failure in failures if failure]:
        pytest.fail("\n".join(found), pytrace=False)


def command(name, monkeypatch):
    """(parser, right words, main); reaching the work raises Started."""
    module, parser, words, work = COMMANDS[name]
    module = importlib.import_module(module)

    monkeypatch.setattr(work, started)
    of_core = ("bench", "export", "speech", "train", "serve")
    first = {"run_sweep": ["run"], **{own: [own] for own in of_core}}.get(name, [])
    main = {"run_eval": evaluate.main, **dict.fromkeys(of_core, core_main)}.get(name) or module.main
    return getattr(module, parser)(), words, lambda argv: main([*first, *argv])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_every_command_refuses_what_is_none(name, monkeypatch, refused):
    parser, words, main = command(name, monkeypatch)
    failures, positions = [], 0
    for action in flags_with_values(parser):
        named = [*action.option_strings, str(action.metavar), action.dest.upper(), action.dest.rstrip("s")]
        place, positions = positions, positions + (not action.option_strings)
        if action.dest in FREE:
            continue
        for wrong in wrong_for_flag(action):
            if action.option_strings:
                values = [wrong, "b"] if action.nargs == 2 else [wrong]
                argv = [*words, action.option_strings[0], *values]
            elif wrong.startswith("-"):
                continue  # is a flag
            else:
                argv = [*words[:place], wrong, *words[place + 1 :]]
            failures.append(refused(main, argv, *named))
    none_of(failures)
    assert failures


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_declares_what_it_may_be(name, monkeypatch):
    for action in flags_with_values(command(name, monkeypatch)[0]):
        declared = action.choices is not None or action.type not in (None, int, float, str, Path)
        assert declared or action.dest in FREE, action.dest


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_nobody_knows_is_one_line(name, monkeypatch, refused):
    _, words, main = command(name, monkeypatch)
    assert refused(main, [*words, "--no-such\nflag", "1"]) == ""


def kinds_of(model: Any) -> dict[str, Any]:
    """Field of a pydantic model -> its type with its bounds."""
    return {name: Annotated[(field.annotation, *field.metadata, "")] for name, field in model.model_fields.items()}


def test_every_model_argument_refuses_what_is_none(monkeypatch, refused):
    _, _, main = command("run_eval", monkeypatch)
    kinds = {name: kind for name, kind in kinds_of(ModelArguments).items() if name not in ("pretrained", "legacy")}
    failures = []
    for name, kind in kinds.items():
        wrong = [value for value in wrong_for_kind(kind) if isinstance(value, str | int | float)]
        if "str" in str(kind) and name != "system_prompt":
            wrong += UNPRINTABLE
        if name in ("device", "device_map", "chat_template", "revision", "measurements_path"):
            wrong += ["a" * 5000]
        failures += [refused(main, [*FOUR, f"{name}={spelt(value)}"], name) for value in wrong]
    none_of(failures)
    assert len(failures) > 300


def test_every_generation_argument_refuses_what_is_none(monkeypatch, refused):
    _, _, main = command("run_eval", monkeypatch)
    failures = [
        refused(main, [*FOUR, "--gen_kwargs", f"{name}={spelt(value)}"], name, "--gen_kwargs")
        for name, kind in kinds_of(GenerationArguments).items()
        for value in wrong_for_kind(kind)
        if isinstance(value, str | int | float) and "," not in spelt(value) and spelt(value)
    ]
    none_of(failures)
    assert len(failures) > 300


@pytest.mark.parametrize("position", range(4))
def test_task_model_method_and_ratio_refuse_what_is_none(position, monkeypatch, refused):
    _, _, main = command("run_eval", monkeypatch)
    numbers = ["nan", "inf", "1e999", "0", "2", "-0.5", "1_0", "٣", "true", "0.5,nan"] if position == 3 else []
    for wrong in [*UNPRINTABLE, "'", "no such", "a" * 5000, "~nobody/x", "../..", *numbers]:
        argv = [*FOUR[:position], wrong, *FOUR[position + 1 :]]
        assert refused(main, argv) == "", wrong


def options() -> list[tuple[str, str, Any]]:
    """(method, option, type) of every method's own options, and of the engine's, once."""
    found = [
        (info.name, name, get_type_hints(info.cls, include_extras=True)[name])
        for info in kvcompress.list_methods().values()
        for name in info.options
    ]
    hints = get_type_hints(Engine, include_extras=True)
    return found + [("knorm", field.name, hints[field.name]) for field in dataclasses.fields(Engine)]


def test_every_option_of_every_method_refuses_what_is_none():
    failures = []
    for method, option, kind in options():
        size = {} if method == "full" else {"ratio": 0.5}
        for wrong in wrong_for_kind(kind):
            for value in [wrong, literal(wrong)] if isinstance(wrong, str) else [wrong]:
                try:
                    make_policy(method, **size, **{option: value})
                except KVCompressError as error:
                    message = str(error)
                    if option not in message or len(message) > 2000:
                        failures.append(f"{method} {option}={value!r:.40}: {message[:200]}")
                except Exception as error:
                    failures.append(f"{method} {option}={value!r:.40}: {type(error).__name__}: {str(error)[:200]}")
                else:
                    failures.append(f"{method} {option}={value!r:.40} is accepted")
    none_of(failures)


def test_true_is_no_number_and_nan_no_ratio():
    with pytest.raises(
        KVCompressError, match="'window_size' is True: Input should be a whole number, not true or false"
    ):
        make_policy("snapkv", 0.5, window_size=True)
    for make in (make_policy, make_compression):
        for wrong in (True, float("nan"), float("inf"), 0, -0.1, 1.1, "half", [0.5]):
            with pytest.raises(KVCompressError, match="ratio="):
                make("snapkv", wrong)
        for wrong in (True, float("nan"), 0, -1, 1.5, "many"):
            with pytest.raises(KVCompressError, match="budget="):
                make("snapkv", None, wrong)


def test_every_parameter_of_a_trial_refuses_what_is_none(monkeypatch, refused):
    monkeypatch.setattr(f"{PLUGIN}.sweep.__main__.run_trial", started)
    number = ["", "nan", "-1", "1.5", "٣", "1_000", "true", "9" * 5000, "a\nb"]
    wrong = {
        **{flag: ["", " ", "a\x00b", "no/such", "x" * 5000] for flag in FLAGS},
        "limit": number,
        "overlays": number,
        "ratio": [*number, "0", "2"],
        "window_size": number,
        "gen_kwargs": ["x", "temperature=-1", "max_new_tokens=0", "tmperature=1"],
        "task": ["", "no such", "a,b"],
        "method": ["", "no such", "a,b"],
        "model": ["", "no such", "a\nb"],
        "dtype": ["", "bf16", "7"],
        "output_path": ["", "a\x00b", "x" * 5000],
    }
    right = {"task": "tiny_textvqa", "model": "tiny", "method": "snapkv", "ratio": "0.2"}
    failures = []
    for name, values in wrong.items():
        for value in values:
            words = [f"--{key}={word}" for key, word in {**right, name: value}.items()]
            failures.append(refused(sweep_main, ["trial", *words]))
    none_of(failures)
    assert refused(sweep_main, ["trial", "--task=a", "--task=b"], "task= is given twice") == ""


def test_every_variable_refuses_what_is_none(monkeypatch, refused):
    wrong = ["-2", "nan", "1.5", "٣", "1_000", "x", " ", "99999", "'", "a\nb", "9" * 5000]
    failures = []
    for name in machine.VARIABLES:
        for value in wrong:
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                failures.append(refused(evaluate.main, FOUR, name))
                failures.append(refused(sweep_main, ["run", DEMO], name))
                failures += [refused(core_main, ["bench", "m"], name)] if name in CORE_VARIABLES else []
    none_of(failures)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["window_size=8", "kernel_size=07", "batch_size=4.0"], {"window_size": 8, "kernel_size": 7}),
        (["pyramid_beta=2", "decode_ratio=.50", "safeguard=5e-1"], {"pyramid_beta": 2.0, "decode_ratio": 0.5}),
        (["revision=1.10", "trust_remote_code=false", "max_pixels=None"], {}),
        (["decode_budget=+64"], {"decode_budget": 64}),
    ],
)
def test_right_values_stay_right_in_every_spelling(words, arguments):
    plan = Plan.of(parse([*FOUR, *words]))
    ((_, options),) = plan.cells
    assert arguments.items() <= options.items()
    assert plan.arguments.revision in ("main", "1.10")


def test_a_numbers_text_is_kept_where_text_is_meant():
    assert [literal(text) for text in ("1.10", "0012", "1e10", "8", "0.5")] == ["1.10", "0012", "1e10", 8, 0.5]


def test_the_bundled_model_has_one_name():
    assert BUNDLED_MODEL == TINY_MODEL
