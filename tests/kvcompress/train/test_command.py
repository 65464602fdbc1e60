"""`kvcompress train`: what was cut goes on, and bad input is one line before anything is loaded."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

import kvcompress
from kvcompress.__main__ import main
from kvcompress.cache_name import CACHE
from kvcompress.calibration import command as calibration_command
from kvcompress.calibration import files
from kvcompress.learned import checkpoints
from kvcompress.train import fastkvzip, kvzap, run, samples
from tests.support.checkpoints import save_checkpoint
from tests.support.families import FAMILIES, MORE_FAMILIES

SMALL = {
    "kvzap": ["pieces=4", "length=80", "tokens=50", "hidden=4", "batch=32", "epochs=2"],
    "fastkvzip": ["pieces=4", "length=100", "tokens=80", "size=4", "sinks=2", "batch=32", "steps=12"],
    "duoattention": ["shortest=20", "longest=40", "passkeys=1", "words=2", "sinks=1", "recent=4", "steps=12"],
}


class Cut(BaseException):
    """The process is killed."""


def weights_in(method: str, out: Path) -> dict[str, torch.Tensor]:
    """All numbers of what was written, by name."""
    if method == "duoattention":
        return files.load(out).tensors
    layers = getattr(checkpoints, method)(str(out)).layers
    return {f"{index}.{name}": part for index, layer in enumerate(layers) for name, part in layer.items()}


def cut_at(monkeypatch, call: int) -> list[int]:
    """Raise Cut at one of the calls of the loss; returns the steps that were taken."""
    steps, descend = [], run.Run.descend

    def cut(this, layers, optimizer, loss_of, *rest):
        def counted(step):
            steps.append(step)
            if len(steps) == call:
                raise Cut
            return loss_of(step)

        descend(this, layers, optimizer, counted, *rest)

    monkeypatch.setattr(run.Run, "descend", cut)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    return steps


@pytest.mark.parametrize("method", SMALL)
def test_a_cut_training_ends_as_one_that_was_not(method, tiny, text, tmp_path, monkeypatch):
    argv = ["train", method, tiny, *SMALL[method], "--text", str(text), "--dtype", "bfloat16", "--out"]
    assert main([*argv, str(tmp_path / "whole")]) == 0
    reads, save = [], samples._save

    def read(found, path):
        reads.append(path.name)
        if len(reads) == 3:
            raise Cut
        save(found, path)

    monkeypatch.setattr(samples, "_save", read)
    steps = cut_at(monkeypatch, 8)
    again = [*argv, str(tmp_path / "again")]
    if method != "duoattention":  # which keeps nothing of what it reads
        with pytest.raises(Cut):
            main(again)
    with pytest.raises(Cut):
        main(again)
    assert main(again) == 0
    assert steps == [*range(8), *range(7, steps[-1] + 1)]  # what was saved is not computed again
    assert len(set(reads)) == len(reads) - (method != "duoattention")  # the one that was cut
    found, expected = (weights_in(method, tmp_path / name) for name in ("again", "whole"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "whole"]


@pytest.fixture
def nothing_loads(monkeypatch):
    def load(*args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(calibration_command, "load", load)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kvzipp", "MODEL"], "METHOD: invalid choice: 'kvzipp'"),
        (["kvzap", "MODEL", "epoch=3"], "training kvzap has no option 'epoch' (did you mean 'epochs'?)"),
        (["kvzap", "MODEL", "epochs"], "'epochs' is not OPTION=VALUE"),
        (["kvzap", "MODEL", "pieces=2", "pieces=3"], "pieces= is given twice"),
        (["kvzap", "MODEL", "epochs=0"], "training kvzap: option 'epochs' is '0': "),
        (["kvzap", "MODEL", "kind=tree"], "training kvzap: option 'kind' is 'tree': "),
        (["kvzap", "MODEL", "rate=nan"], "training kvzap: option 'rate' is 'nan': "),
        (["kvzap", "MODEL", "--text", "none.txt"], "--text 'none.txt' cannot be read: No such file"),
        (["kvzap", "MODEL", "--text", "blank.txt"], "--text 'blank.txt' is empty"),
        (["kvzap", "MODEL", "--text", "binary.txt"], "--text 'binary.txt' cannot be read: it is not UTF-8"),
        (["fastkvzip", "MODEL", "--text", "book", "--out", "./book"], "book' would overwrite the file of --text"),
        (["kvzap", "MODEL", "--out", "folder"], "Is a directory"),
        (["kvzap", "MODEL", "--out", "blank.txt"], "--out 'blank.txt' is a file, and kvzap writes a folder"),
        (["kvzap", "MODEL", "--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
        (["kvzap", "MODEL", "--out", "old", "pieces=7"], "other settings (method, "),
        (["kvzap", "MODEL", "--out", "mine"], "mine.state' is not the state of a training: remove it, or give another"),
        (["kvzap", "MODEL", "--out", "file"], "file.state' is not the state of a training: remove it, or give another"),
        (["kvzap", "no/such/model"], "model 'no/such/model' cannot be loaded"),
        (["kvzap", "SLIDING"], "training kvzap needs full attention in all layers"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(words, message, tiny, text, tmp_path, monkeypatch, capsys, nothing_loads):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("book").write_text("once upon a time")
    Path("blank.txt").write_text(" \n")
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    Path("old.state").mkdir()
    Path("old.state", "settings.json").write_text(json.dumps({"method": "other", "pieces": 3}))
    Path("old.state", "piece-00000.safetensors").touch()
    Path("mine.state").mkdir()
    Path("mine.state", "thesis.txt").touch()
    Path("file.state").touch()
    if "SLIDING" in words:
        MORE_FAMILIES["gemma3"].build().config.save_pretrained("SLIDING")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    words = [tiny if word == "MODEL" else word for word in words]
    given = [flag for flag in (["--text", str(text)], ["--out", "out"]) if flag[0] not in words]
    assert main(["train", *words, *(word for flag in given for word in flag)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("error: ")
    assert message in error[0]
    assert len(error) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_too_little_text_is_one_line_before_any_is_read(tiny, tmp_path, capsys, reads):
    (tmp_path / "short.txt").write_text("abc abc")
    argv = ["train", "kvzap", tiny, "--text", str(tmp_path / "short.txt"), "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    assert f"at least {3 * kvzap.HELD_OUT} are needed" in capsys.readouterr().err
    assert not reads
    assert not (tmp_path / "out.state").exists()


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_model_that_computes_no_finite_numbers_is_one_line(kind, text, tmp_path, capsys, reads):
    broken = AutoModelForCausalLM.from_pretrained(save_checkpoint("qwen2", tmp_path / "model"))
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[3, 3] = torch.inf
    broken.save_pretrained(tmp_path / "model")
    argv = ["train", "kvzap", str(tmp_path / "model"), *SMALL["kvzap"], f"kind={kind}", "--text", str(text)]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: in float32 this model computes numbers that are not finite: give another --dtype"
    assert not reads


def test_a_training_that_is_cut_at_its_very_end_goes_on(tiny, text, tmp_path, monkeypatch):
    argv = ["train", "kvzap", tiny, *SMALL["kvzap"], "--text", str(text), "--out", str(tmp_path / "out")]

    def cut(*args):
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(kvzap, "agreement", cut)
        with pytest.raises(Cut):
            main(argv)
    assert main(argv) == 0


def test_after_a_training_that_diverged_another_rate_learns_from_what_was_read(tiny, text, tmp_path, capsys, reads):
    argv = ["train", "kvzap", tiny, *SMALL["kvzap"], "--text", str(text), "--out", str(tmp_path / "out")]
    assert main([*argv, "rate=1e9"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: by step ")
    assert error.endswith("training has diverged: give a smaller rate=")
    assert not (tmp_path / "out").exists()
    assert main([*argv, "rate=1e-3"]) == 0
    assert len(reads) == 4
    assert main([*argv[:-1], str(tmp_path / "alone"), "rate=1e-3"]) == 0
    found, expected = (weights_in("kvzap", tmp_path / name) for name in ("out", "alone"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The files of pieces that are written."""
    names, save = [], samples._save
    monkeypatch.setattr(samples, "_save", lambda found, path: (names.append(path.name), save(found, path)))
    return names


def test_steps_are_not_continued_with_other_options_but_what_was_read_may_be(
    tiny, text, tmp_path, monkeypatch, capsys, reads
):
    argv = ["train", "kvzap", tiny, *SMALL["kvzap"], "--text", str(text), "--out", str(tmp_path / "out")]
    others = [word.replace("hidden=4", "hidden=5") for word in argv]
    with monkeypatch.context() as patch:
        cut_at(patch, 3)
        with pytest.raises(Cut):
            main(argv)
    assert main(others) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "other settings (hidden): " in error
    assert error.endswith("or remove 'descent.pt' in it, which keeps what was read")
    (tmp_path / "out.state" / "descent.pt").unlink()
    assert main([word.replace("tokens=50", "tokens=40") for word in others]) == 2
    assert "other settings (tokens, hidden): " in capsys.readouterr().err
    assert main(others) == 0
    assert len(reads) == 4
    assert weights_in("kvzap", tmp_path / "out")["0.0.bias"].shape == (5,)


@pytest.mark.parametrize(
    ("file", "damage"), [("piece-00001.safetensors", b"{}"), ("descent.pt", b"PK"), ("descent.pt", b"")]
)
def test_a_damaged_state_is_one_line(file, damage, tiny, text, tmp_path, monkeypatch, capsys, reads):
    argv = ["train", "kvzap", tiny, *SMALL["kvzap"], "--text", str(text), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        cut_at(patch, 3)
        with pytest.raises(Cut):
            main(argv)
    (tmp_path / "out.state" / file).write_bytes(damage)
    capsys.readouterr()
    assert main(argv) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert f"{file}' cannot be read: " in error
    assert error.endswith("; remove it, and the same command makes it anew")
    (tmp_path / "out.state" / file).unlink()
    reads.clear()
    assert main(argv) == 0
    assert reads == [name for name in [file] if name.startswith("piece")]


def test_too_little_memory_for_what_was_read_is_no_damaged_state(tiny, text, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(samples.torch, "cat", full)
    argv = ["train", "kvzap", tiny, *SMALL["kvzap"], "kind=linear", "--text", str(text), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(
        kvzap,
        "kvzip_plus",
        lambda decoder, before, between, ids: samples.Samples(torch.zeros(3, 80, 64), torch.zeros(3, 2, 80)),
    )
    assert main(argv) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: not enough memory: ")


def test_other_weights_of_the_same_name_do_not_go_on(text, tmp_path, monkeypatch, capsys):
    model = save_checkpoint("qwen2", tmp_path / "model")
    argv = ["train", "kvzap", model, *SMALL["kvzap"], "--text", str(text), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        cut_at(patch, 3)
        with pytest.raises(Cut):
            main(argv)
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    changed.save_pretrained(model)
    assert main(argv) == 2
    assert "out.state' was left by a training with other settings (weights): " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no users here') }}", "cannot be used: no users here"),
        ("hello", "it leaves out what a user"),
    ],
)
def test_a_chat_template_that_fails_is_one_line(template, message, run):
    run.tokenizer.chat_template = template
    with pytest.raises(samples.KVCompressError, match=message):
        samples.chat_frame(run.tokenizer)


@pytest.mark.parametrize(
    "words",
    [
        "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}",
        "{{ message.content[0].text + '' }}",
    ],
    ids=["nothing of a string is found", "a string fails"],
)
def test_a_chat_template_may_know_parts_only(words, run):
    run.tokenizer.chat_template = "{% for message in messages %}USER: " + words + " ASSISTANT:{% endfor %}"
    found = tuple(run.tokenizer.decode(ids) for ids in samples.chat_frame(run.tokenizer))
    assert found == ("USER:", "ASSISTANT:")


def test_without_a_chat_template_a_text_begins_and_a_line_ends(run):
    run.tokenizer.chat_template = None
    assert samples.chat_frame(run.tokenizer) == (run.tokenizer("").input_ids, samples.plain_ids(run.tokenizer, "\n"))


@pytest.mark.parametrize(
    ("method", "family", "layers"),
    [("kvzap", "qwen2.5-vl", 3), ("fastkvzip", "qwen2.5-vl", 3), ("duoattention", "gemma3", 2)],
)
def test_models_that_see_learn_from_text(method, family, layers, text, tmp_path):
    """M-RoPE, and layers with a sliding window, which have no gates."""
    out, model = tmp_path / "out", save_checkpoint(family, tmp_path / "model")
    assert main(["train", method, model, *SMALL[method], "--text", str(text), "--out", str(out)]) == 0
    option = "calibration" if method == "duoattention" else "checkpoint"
    loaded = MORE_FAMILIES.get(family, FAMILIES.get(family)).build()
    with kvcompress.compress(loaded, method, 0.5, **{option: str(out)}):
        loaded(torch.arange(8, 30)[None])
    found = weights_in(method, out)
    count = len(found["gates"]) if "gates" in found else len({name.split(".")[0] for name in found})
    assert count == layers


@pytest.mark.parametrize("method", ["kvzap", "fastkvzip"])
def test_a_model_whose_attention_layers_are_not_found_is_one_line(method, tiny, text, tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=200, **sizes)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "model")
    argv = ["train", method, str(tmp_path / "model"), *SMALL[method], "--text", str(text)]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "those of GPTNeoXModel's layers [0, 1] are not found" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("method", SMALL)
def test_more_tokens_than_a_model_was_made_for_are_warned_of(method, text, tmp_path, monkeypatch, capsys):
    """To the token, except for DuoAttention's prompts, which vary in length: the model is watched."""
    config = AutoConfig.from_pretrained(save_checkpoint("qwen2", tmp_path / "model"))
    monkeypatch.setattr(fastkvzip, "CHUNK", 30)
    fed, forward = [], Qwen2Model.forward

    def watched(self, input_ids=None, **kwargs):
        cache = kwargs.get(CACHE)
        fed.append(input_ids.shape[1] + (cache.get_seq_length() if cache is not None else 0))
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(Qwen2Model, "forward", watched)
    argv = ["train", method, str(tmp_path / "model"), *SMALL[method], "--text", str(text), "--out"]
    assert main([*argv, str(tmp_path / "out")]) == 0
    assert "warning" not in capsys.readouterr().err
    vary = 40 if method == "duoattention" else 0
    for most, warnings in ((max(fed) + vary, 0), (max(fed) - 1 - vary, 1)):
        config.max_position_embeddings = most
        config.save_pretrained(tmp_path / "model")
        assert main([*argv, str(tmp_path / str(most))]) == 0
        assert capsys.readouterr().err.count(" at once: a smaller l") == warnings
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config.save_pretrained(tmp_path / "model")
    assert main([*argv, str(tmp_path / "stretched")]) == 0
    assert "warning" not in capsys.readouterr().err


def test_too_full_a_disk_is_one_line(run):
    with pytest.raises(samples.KVCompressError, match=r"need .* GiB in .*: take fewer with pieces= or tokens="):
        run.begin(2**60)


def test_other_attention_is_restored(run):
    ids = torch.arange(8, 20)[None]
    before = run.model(ids).logits
    samples_seen = kvzap.kvzip_plus(run.decoder, [8, 9], [10], [11, 12, 13])
    assert samples_seen.scores.shape == (3, 2, 3)
    assert torch.equal(run.model(ids).logits, before)
    assert run.decoder.config._attn_implementation == "sdpa"
