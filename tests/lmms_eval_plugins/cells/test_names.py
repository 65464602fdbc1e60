"""Names are known from the text of files: a slip is answered before anything heavy is imported."""

import json
import subprocess
import sys

import pytest

import kvcompress
from kvcompress.errors import KVCompressError
from lmms_eval_plugins.cells import names
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.model.arguments import LEGACY_ARGUMENTS, ModelArguments
from lmms_eval_plugins.model.input_methods import INPUT_METHODS, method_options

SLIPS = [
    (["no_such_task", "tiny", "snapkv", "0.2"], "unknown task 'no_such_task'"),
    (["tiny_textvqq", "tiny", "snapkv", "0.2"], "unknown task 'tiny_textvqq' (did you mean 'tiny_textvqa'?)"),
    (["tiny_textvqa", "tiny", "full,snapvk", "0.2"], "there is no method 'snapvk' (did you mean 'snapkv'?)"),
    (["tiny_textvqa", "tiny", "snapkv", "0.2", "windowsize=8"], "'windowsize' (did you mean 'window_size'?)"),
    (["tiny_textvqa", "no such model", "snapkv", "0.2"], "MODEL 'no such model' is neither"),
    (["tiny_textvqa", "tiny", "snapkv", "0.2", "--limt", "3"], "'--limt' (did you mean '--limit'?)"),
]
CODE = """
import json, sys, time
from lmms_eval_plugins import evaluate
codes = [evaluate.main(argv) for argv in json.loads(sys.argv[1])]
heavy = [name in sys.modules for name in ("torch", "lmms_eval", "kvcompress.clusters")]
print(codes, *heavy, time.process_time() < 2)
"""


def test_slips_are_answered_within_two_seconds_and_without_heavy_imports():
    argument = json.dumps([argv for argv, _ in SLIPS])
    done = subprocess.run([sys.executable, "-c", CODE, argument], capture_output=True, text=True)
    assert done.stdout.split() == f"{[2] * len(SLIPS)} False False False True".split(), done.stderr
    for line, (_, message) in zip(done.stderr.splitlines(), SLIPS, strict=True):
        assert message in line


def test_who_names_files_with_methods_is_not_told_that_there_is_none(monkeypatch):
    request = parse(["tiny_textvqa", "tiny", "mine", "0.2", "my_option=3"])
    monkeypatch.delitem(sys.modules, "kvcompress.clusters")
    with pytest.raises(KVCompressError, match="there is no method 'mine'"):
        names.check_names(request)
    monkeypatch.setenv("KVCOMPRESS_METHODS", "mine.py")
    names.check_names(request)


def test_the_text_knows_every_method_and_argument():
    methods = sorted([*kvcompress.list_methods(), *INPUT_METHODS])
    assert names.method_names() == methods
    known = {option for method in methods for option in method_options(method)}
    assert known | set(ModelArguments.model_fields) | set(LEGACY_ARGUMENTS) | {"budget"} <= names.argument_names()


def test_a_method_whose_name_its_text_does_not_show_switches_the_check_off(tmp_path, monkeypatch):
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.py").write_text("@register_method(NAME)\nclass Mine: ...\n")
    monkeypatch.setattr(names, "_package", lambda name: tmp_path)
    names.method_names.cache_clear()
    assert names.method_names() == []
    names.method_names.cache_clear()


def test_a_task_file_that_includes_itself_is_read_once(tmp_path):
    (tmp_path / "a.yaml").write_text("include: a.yaml\ntask: mine\n")
    assert names.task_kinds(tmp_path) == {"mine": "task"}


def test_a_task_that_was_written_meanwhile_is_known(tmp_path):
    with pytest.raises(KVCompressError, match="unknown task 'mine'"):
        names.check_tasks(["mine"], tmp_path)
    (tmp_path / "a.yaml").write_text("task: mine\n")
    names.check_tasks(["mine"], tmp_path)
