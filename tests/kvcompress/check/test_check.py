"""`kvcompress check`: it passes what is right, and names what is wrong with a method and on which prompts."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch

import kvcompress
from kvcompress import methods
from kvcompress.__main__ import main
from kvcompress.check import command, passed, promises
from kvcompress.check.command import failure
from kvcompress.check.promises import PROMISES, Checked
from kvcompress.check.token_promises import TOKEN_PROMISES, CheckedTokens
from tests.support.docs import DOCS, python_blocks

BLOCKS = python_blocks(DOCS / "adding-a-method.md")
DEFINITION, TOKENS = BLOCKS[0], next(block for block in BLOCKS if "TokenMethod" in block)


@pytest.fixture(autouse=True)
def user(registry, monkeypatch, tmp_path):
    """Has a registry and a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(methods.FILES, raising=False)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(DEFINITION, encoding="utf-8")
    return path


class Norms(kvcompress.KVCluster):
    """A right score: the methods below get one thing wrong each."""

    def score(self, queries, keys, values, view):
        return view.protect_recent(values.float().norm(dim=-1), 4)


@dataclass(frozen=True)
class MeanOverPads(Norms):
    @kvcompress.handles_padding
    def score(self, queries, keys, values, view):
        return (keys - keys.mean(2, keepdim=True)).float().norm(dim=-1)


@dataclass(frozen=True)
class EveryPair(Norms):
    def score(self, queries, keys, values, view):
        return (keys.float() @ keys.float().transpose(2, 3)).amax(2)


@dataclass(frozen=True)
class Unseeded(Norms):
    def score(self, queries, keys, values, view):
        return torch.rand(keys.shape[:3])


@dataclass(frozen=True)
class OneTooFew(Norms):
    def select(self, scores, view):
        return super().select(scores, view)[..., 1:]


@dataclass(frozen=True)
class FirstOfTheBatch(Norms):
    """Of equal scores it keeps other entries, which are not worth as much, where there are pads."""

    def select(self, scores, view):
        kept = super().select(scores, view)
        return kept if view.padding is None else super().select(-scores, view)


@dataclass(frozen=True)
class AddsToValues(Norms):
    def update_kv(self, queries, keys, values, view):
        kept = super().update_kv(queries, keys, values, view)
        return kvcompress.Kept(kept.keys, kept.values + 0.1, kept.indices)


@dataclass(frozen=True)
class ByTheBatch(Norms):
    @kvcompress.handles_padding
    def score(self, queries, keys, values, view):
        if not view.is_decoding:
            return super().score(queries, keys, values, view)
        return values.float().norm(dim=-1) / values.float().norm(dim=-1).mean()


@dataclass(frozen=True)
class ZeroOverZero(Norms):
    def score(self, queries, keys, values, view):
        return super().score(queries, keys, values, view) * torch.nan


@dataclass(frozen=True)
class Divides(Norms):
    def score(self, queries, keys, values, view):
        return 1 / 0


@dataclass(frozen=True)
class ByAllHeads(Norms):
    """Says nothing of it."""

    def score(self, queries, keys, values, view):
        norms = values.float().norm(dim=-1)
        return norms / norms.amax(1, keepdim=True)


@dataclass(frozen=True)
class BeyondTheLast(Norms):
    def select(self, scores, view):
        return super().select(scores, view) + view.lengths[0]


@dataclass(frozen=True)
class KeepsPads(Norms):
    """While decoding, a head keeps as many places as another, although it holds fewer entries."""

    def select(self, scores, view):
        if not view.is_decoding:
            return super().select(scores, view)
        return scores.topk(int(max(view.budgets))).indices.sort(-1).values


@dataclass(frozen=True)
class Remembers(Norms):
    def score(self, queries, keys, values, view):
        self.first = keys
        return super().score(queries, keys, values, view)


@dataclass(frozen=True)
class Imaginary(Norms):
    def score(self, queries, keys, values, view):
        return torch.fft.fft(values, dim=2).sum(-1)


@dataclass(frozen=True)
class Whole(Norms):
    """Nothing is wrong with whole numbers."""

    def score(self, queries, keys, values, view):
        return values.norm(dim=-1).argsort(-1)


@dataclass(frozen=True)
class InFp32Alone(Norms):
    def score(self, queries, keys, values, view):
        return (values @ torch.ones(values.shape[-1], 1))[..., 0]


@dataclass(frozen=True)
class OutOfRange(Norms):
    def update_kv(self, queries, keys, values, view):
        kept = super().update_kv(queries, keys, values, view)
        scale = 1.0 if values.dtype == torch.float32 else torch.nan
        return kvcompress.Kept(kept.keys, kept.values * scale, kept.indices)


BATCH = "a row gives the same result in a padded batch as alone"
DECODING = "a row gives the same result in a batch as alone while decoding evicts"
RAGGED = "a row gives the same result in a batch as alone with ragged heads"
CHUNKS = "a row gives the same result in a batch as alone in chunks"
LINEAR = "memory is linear in the prompt"
APART = "a KV head's scores depend on no other head"
HALF = "a model in bfloat16 is compressed"
MASKED = "decoding equals the full cache under a mask"
WRONG = [
    (MeanOverPads, BATCH, r"qwen2, 50 and 31 tokens, ratio 0.3: row 1, layer 0, KV head 0: entry \d+ of 31 scores"),
    (MeanOverPads, CHUNKS, "prefill_chunk=16, decode_budget=12.*while decoding: entry .* in the batch, .* alone"),
    (EveryPair, LINEAR, "qwen2, 1500 and 3000 tokens: scoring creates a tensor of"),
    (
        Unseeded,
        "the same prompt keeps the same entries",
        "row 0 keeps other entries when run again: keep no state .*uniform_noise$",
    ),
    (Unseeded, APART, r"^qwen2, 50 tokens: Unseeded.score returns other scores for the same states .*uniform_noise$"),
    (OneTooFew, "each row keeps its budget", r"row 0 keeps \[\[14, 14\].* per layer and head instead of 15"),
    (FirstOfTheBatch, BATCH, "row 0, layer 0 has the same scores, but its choice sums to .* in the batch, .* alone"),
    (AddsToValues, MASKED, "logits compressed differ from those masked by up to"),
    (ByTheBatch, DECODING, "while decoding: entry .* in the batch, .* alone"),
    (ZeroOverZero, BATCH, r"^ZeroOverZero.score returned NaN, \d+ of \d+ numbers: NaN has no rank$"),
    (ByAllHeads, APART, "qwen2, 50 tokens, ratio 0.3: layer 0, KV head 0: entry .*: set mixes_heads = True"),
    (
        BeyondTheLast,
        "each row keeps its budget",
        r"^BeyondTheLast.select returned column \d+ at .* from 0 to 49, after",
    ),
    (ByTheBatch, RAGGED, "head_budget=adaptive"),
    (KeepsPads, RAGGED, r"row 1, layer 0 keeps places that hold no entry: see view\.padding$"),
    (
        Remembers,
        BATCH,
        r"^FrozenInstanceError: .* 'first': a method holds only options, .* \(test_check.py, line \d+\)$",
    ),
    (Imaginary, BATCH, r"^Imaginary.score returned torch.complex64: scores are real numbers$"),
    (InFp32Alone, HALF, r"^RuntimeError: expected .*BFloat16.* \(test_check.py, line \d+\)$"),
    (OutOfRange, HALF, "qwen2, 50 and 31 tokens, bfloat16, ratio 0.3: logits are not finite"),
    (Divides, "each row keeps its budget", r"ZeroDivisionError: division by zero \(test_check.py, line \d+\)"),
]


@pytest.mark.parametrize(("cls", "promise", "reason"), WRONG)
def test_what_is_wrong_with_a_method_is_named_with_the_prompts(cls, promise, reason):
    kvcompress.register_method("wrong")(cls)
    found = command.failure(PROMISES[promise], Checked("wrong"))
    assert re.search(reason, found), found
    assert "\n" not in found


class LargeEmbeddings(kvcompress.TokenMethod):
    """A right token method: those below get one thing wrong each."""

    sees = "embeddings"

    def layers(self, num_layers):
        return [0]

    def score(self, tokens):
        return tokens.hidden.float().norm(dim=-1)


@dataclass(frozen=True)
class FarFromTheBatch(LargeEmbeddings):
    def score(self, tokens):
        return (tokens.hidden - tokens.hidden.mean((0, 1))).float().norm(dim=-1)


@dataclass(frozen=True)
class UnseededTokens(LargeEmbeddings):
    def score(self, tokens):
        return torch.rand(tokens.vision.shape)


@dataclass(frozen=True)
class OneTokenTooMany(LargeEmbeddings):
    def choose(self, scores, tokens):
        return tokens.best(scores, [budget + 1 for budget in tokens.budgets]), tokens.hidden


@dataclass(frozen=True)
class NeedsAPicture(LargeEmbeddings):
    def score(self, tokens):
        rows = zip(tokens.hidden, tokens.vision, strict=True)
        return torch.stack([row @ row[vision].amax(0) for row, vision in rows])


@dataclass(frozen=True)
class ScalesKeys(LargeEmbeddings):
    sees = "attention"

    def layers(self, num_layers):
        return [2]

    def score(self, tokens):
        return tokens.attention.keys.mul_(0.5).norm(dim=-1).sum(1)


@dataclass(frozen=True)
class ScalesKeysUnseen(ScalesKeys):
    def score(self, tokens):
        return tokens.attention.keys.data.mul_(0.5).norm(dim=-1).sum(1)


@dataclass(frozen=True)
class FollowsFp32(LargeEmbeddings):
    def score(self, tokens):
        return tokens.hidden @ torch.ones(tokens.hidden.shape[-1])


@dataclass(frozen=True)
class RemembersTokens(LargeEmbeddings):
    def score(self, tokens):
        self.before = tokens.hidden
        return super().score(tokens)


TOKEN_BATCH = "a row gives the same result in a padded batch as alone"
TOKEN_BUDGET = "each row keeps its budget of vision tokens"
WRONG_TOKENS = [
    (
        FarFromTheBatch,
        TOKEN_BATCH,
        r"ratio 0.5: row \d, layer 0 keeps columns \[\d.*\] in the batch, \[\d.*\] alone$",
    ),
    (UnseededTokens, "the same prompt keeps the same tokens", r"keep no state .* tokens\.row_seeds$"),
    (
        OneTokenTooMany,
        TOKEN_BUDGET,
        r"row 0 keeps \[13, 13, 13, 13\] of 24 vision tokens per layer instead of \[12, 12",
    ),
    (NeedsAPicture, TOKEN_BATCH, r"^IndexError: .*\(test_check.py, line \d+\)$"),
    (FollowsFp32, HALF, r"^RuntimeError: .*BFloat16.* \(test_check.py, line \d+\)$"),
    (ScalesKeys, TOKEN_BATCH, "^method 'wrong' changes what it is given in place: use copies$"),
    (
        ScalesKeysUnseen,
        "the answer equals the full model's under a mask",
        "logits with the method differ from those of the",
    ),
    (
        RemembersTokens,
        TOKEN_BATCH,
        r"^FrozenInstanceError: .* 'before': a method holds only options, and its `prepare` ",
    ),
]


@pytest.mark.parametrize(("cls", "promise", "reason"), WRONG_TOKENS)
def test_what_is_wrong_with_a_token_method_is_named_with_the_prompts(cls, promise, reason):
    kvcompress.register_method("wrong")(cls)
    found = failure(TOKEN_PROMISES[promise], CheckedTokens("wrong"))
    assert re.search(reason, found), found
    assert "\n" not in found


@pytest.mark.parametrize("method", ["cdpruner", "fastv", "pyramiddrop", "visionzip", "prumerge+", "dycoke", "fastvid"])
def test_token_methods_of_ours_keep_every_promise_that_they_make(method, capsys):
    assert main(["check", method]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == list(TOKEN_PROMISES)
    assert {line[0] for line in lines} <= {"o", "-"}


class Misspelt(Norms):
    head_budgets = "adaptive"
    norms = "of values"
    _final_scores = None

    def final_score(self, scores, view):
        return -scores

    def scores(self):
        return "a helper of the score, which it defines too"


def test_what_is_defined_under_almost_a_name_that_is_read_is_named(capsys, monkeypatch):
    kvcompress.register_method("misspelt")(dataclass(frozen=True)(Misspelt))
    monkeypatch.setattr(promises, "PROMISES", {})
    assert main(["check", "misspelt"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "-       misspelt: its 'final_score' is not read (did you mean 'final_scores'?)",
        "-       misspelt: its 'head_budgets' is not read (did you mean 'head_budget'?)",
    ]


@pytest.mark.parametrize("options", [{"decode_ratio": 0.5}, {"head_budget": "shared"}])
def test_what_an_option_excludes_is_not_a_broken_promise(options):
    promise = PROMISES["decoding equals the full cache under a mask"]
    assert command.failure(promise, Checked("snapkv", {"window_size": 4, **options})) == ""


def test_scores_may_be_whole_numbers():
    kvcompress.register_method("whole")(Whole)
    assert command.failure(PROMISES[APART], Checked("whole")) == ""


@pytest.mark.parametrize(
    ("text", "method", "asked"),
    [(DEFINITION, "value-norm", PROMISES), (TOKENS, "large-embeddings", TOKEN_PROMISES)],
    ids=["KV", "tokens"],
)
def test_a_right_method_keeps_every_promise_and_its_file_is_noted_until_it_changes(file, text, method, asked, capsys):
    file.write_text(text, encoding="utf-8")
    assert main(["check", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"ok      {method}: {promise}" for promise in asked]
    assert passed.has_passed(file)
    file.write_text(text + "\n# changed\n", encoding="utf-8")
    assert not passed.has_passed(file)


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_file_that_was_never_checked_is_warned_of_once(file, is_checked, monkeypatch, capsys):
    if is_checked:
        passed.note(file, passed.hash_of(file))
    monkeypatch.setenv(methods.FILES, str(file))
    for _ in range(2):
        assert "value-norm" in kvcompress.list_methods()
    warning = f"warning: {file} was not checked in its present form: python -m kvcompress check {file}\n"
    assert capsys.readouterr().err == ("" if is_checked else warning)


CALIBRATED = """
from dataclasses import dataclass
from typing import ClassVar

import kvcompress
from kvcompress.clusters.calibrated import CalibratedKVCluster


@kvcompress.register_method("calibrated")
@dataclass(frozen=True)
class Calibrated(CalibratedKVCluster):
    calibrated: ClassVar[dict] = {"mean": ("layers", "kv_heads", "head_dim")}

    def gather(self, queries, keys, values, view):
        return {"mean": keys[0].double().mean(1)}

    def score(self, queries, keys, values, view):
        mean = self.known("mean", view, keys.device)
        return view.protect_recent((keys.float() @ mean[..., None])[..., 0], 4)
"""


def test_a_method_that_needs_a_calibration_is_calibrated_and_checked(file, capsys, monkeypatch):
    monkeypatch.setattr(promises, "PROMISES", {name: PROMISES[name] for name in (BATCH, CHUNKS, APART)})
    file.write_text(CALIBRATED, encoding="utf-8")
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"ok      calibrated: {name}" for name in promises.PROMISES]
    assert passed.has_passed(file)


def test_a_method_that_cannot_be_calibrated_is_one_line(file, capsys):
    file.write_text(CALIBRATED.replace("mean(1)", "mean(7)"), encoding="utf-8")
    assert main(["check", str(file)]) == 2
    said = r"error: method 'calibrated' cannot be calibrated: IndexError: .* \(mine\.py, line 15\)\n"
    assert re.fullmatch(said, capsys.readouterr().err)


LEARNED = """
from dataclasses import dataclass

import kvcompress
from kvcompress.clusters.learned import LearnedKVCluster


@kvcompress.register_method("learned")
@dataclass(frozen=True)
class Learned(LearnedKVCluster):
    pass
"""


def test_nothing_is_said_of_a_file_that_cannot_be_checked(file, monkeypatch, capsys):
    file.write_text(LEARNED, encoding="utf-8")
    monkeypatch.setenv(methods.FILES, str(file))
    assert "learned" in kvcompress.list_methods()
    assert capsys.readouterr().err == ""
    monkeypatch.delenv(methods.FILES)
    assert main(["check", "learned"]) == 2
    assert capsys.readouterr().err == "error: method 'learned' needs a checkpoint, and check's models have none\n"


def test_a_damaged_record_is_as_if_nothing_had_passed(file):
    passed.record().parent.mkdir(parents=True)
    for text in ("{", "[1]", ""):
        passed.record().write_text(text, encoding="utf-8")
        assert not passed.has_passed(file)
    passed.note(file, passed.hash_of(file))
    assert passed.has_passed(file)


def test_of_two_checks_that_end_at_once_both_are_noted(file, monkeypatch):
    other, noted, began = file.with_name("other.py"), passed._noted, []

    def slow():
        found = noted()
        if not began:
            began.append(threading.Thread(target=passed.note, args=(other, "2")))
            began[0].start()
            time.sleep(0.2)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(passed, "_noted", slow)
        passed.note(file, "1")
        began[0].join()
    assert noted() == {str(file): "1", str(other): "2"}


def test_a_record_that_cannot_be_written_is_a_warning(file, capsys, monkeypatch):
    monkeypatch.setattr(promises, "PROMISES", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert main(["check", str(file)]) == 0
    assert f"warning: commands will warn of {file} all the same: " in capsys.readouterr().err


def test_what_was_written_into_a_file_while_it_was_checked_has_not_passed(file, monkeypatch):
    def edit(checked):
        file.write_text(DEFINITION + "# not checked\n", encoding="utf-8")

    monkeypatch.setattr(promises, "PROMISES", {"any": edit})
    assert main(["check", str(file)]) == 0
    assert not passed.has_passed(file)
    file.write_text(DEFINITION, encoding="utf-8")
    assert passed.has_passed(file)


def test_a_broken_promise_is_two_lines_and_exit_code_1_and_is_not_noted(file, capsys, monkeypatch):
    wrong = DEFINITION.replace("    def score", "    @kvcompress.handles_padding\n    def score")
    wrong = wrong.replace(".norm(dim=-1)  #", ".norm(dim=-1) - values.float().mean((2, 3))[..., None]  #")
    assert wrong.count("handles_padding") == wrong.count("mean((2, 3))") == 1
    monkeypatch.setattr(promises, "PROMISES", {name: PROMISES[name] for name in (BATCH, DECODING)})
    file.write_text(wrong, encoding="utf-8")
    assert main(["check", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    place = lines.index(f"FAILED  value-norm: {BATCH}")
    assert lines[place + 1].startswith("        qwen2, 50 and 31 tokens, ratio 0.3: row 1, layer 0, KV head 0: entry ")
    assert lines[place + 2].startswith(("ok ", "FAILED "))
    assert not passed.has_passed(file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["snapk"], "there is no method 'snapk' (did you mean 'snapkv'?)"),
        (["none.py"], "there is no Python file none.py"),
        (["snapkv", "window"], "'window' is not OPTION=VALUE"),
        (["snapkv", "ratio=0.5"], "ratio= is not for check"),
        (["full"], "method 'full' keeps everything"),
        (["snapkv", "window=3"], "no option 'window'"),
        (["q-filters", "calibration=q.safetensors"], "calibration= is not for check, which calibrates its own models"),
        (["kvzap"], "method 'kvzap' needs a checkpoint, and check's models have none"),
    ],
)
def test_what_cannot_be_checked_is_one_line(words, said, capsys):
    assert main(["check", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "options", "asked"),
    [
        ("keydiff", {}, [BATCH, DECODING, RAGGED, CHUNKS]),  # equal tokens score the same, and rounding breaks the tie
        ("lagkv", {}, [LINEAR]),  # scores in blocks, of one size whatever the prompt's
        ("snapkv", {"prefill_chunk": 40, "window_size": 4}, PROMISES),  # an option that a promise sets, too
    ],
)
def test_methods_of_ours_keep_the_promises_that_are_hard_to_check(method, options, asked):
    checked = Checked(method, options)
    assert {promise: reason for promise in asked if (reason := failure(PROMISES[promise], checked))} == {}


def test_a_method_that_says_that_it_mixes_heads_is_not_asked_whether_it_does(capsys, monkeypatch):
    kvcompress.register_method("mixing")(type("Mixing", (ByAllHeads,), {"mixes_heads": True}))
    monkeypatch.setattr(promises, "PROMISES", {APART: PROMISES[APART]})
    assert main(["check", "mixing"]) == 0
    assert capsys.readouterr().out == f"-       mixing: {APART}: Mixing.mixes_heads is True\n"


def test_a_promise_that_a_method_does_not_make_is_named_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(promises, "PROMISES", {CHUNKS: PROMISES[CHUNKS]})
    assert main(["check", "cake"]) == 0
    assert capsys.readouterr().out == (
        f"-       cake: {CHUNKS}: layer_budget='cake' does not go with prefill_chunk=: "
        "it is measured in the whole prompt\n"
    )


@pytest.mark.slow
def test_it_runs_outside_of_a_checkout(file, tmp_path):
    """Of the tests nothing is imported, and no working directory is looked at."""
    code = "import sys; from kvcompress.check import promises, models, reference; print('tests' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path[1:]))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_the_entries_that_are_compared_are_the_rows_own():
    """A row of a batch is cut out with its own picture, and without pads."""
    text, vision = Checked("full").tried
    assert text.alone(1).inputs["input_ids"].shape == (1, 31)
    assert vision.alone(0).inputs["pixel_values"].shape == vision.inputs["pixel_values"].shape
    assert "pixel_values" not in vision.alone(1).inputs
    assert vision.alone(1).inputs["attention_mask"].all()
