"""Calibrating on a task's prompts, and what a cell's identity has of the file."""

import json
from types import SimpleNamespace

import pytest

from kvcompress.calibration import files
from lmms_eval_plugins import calibrate, evaluate
from lmms_eval_plugins.cells import identity
from lmms_eval_plugins.cells.results import Cell

TINY = ["tiny", "--task", "tiny_textvqa"]


def test_a_task_with_images_calibrates_the_bundled_model(tmp_path, capsys):
    out = tmp_path / "new" / "tri.safetensors"
    given = ["--method", "triattention", "--questions", "3", "--seed", "5", "--out", str(out), "group=mean"]
    assert calibrate.main([*TINY, *given]) == 0
    assert "written: " in capsys.readouterr().out
    made = files.load(out)
    assert (made.prompts, made.seed, made.data) == (3, 5, "task: tiny_textvqa")
    assert made.options["group"] == "mean"
    assert made.tokens > 3 * 200  # of pictures
    assert made.tensors["mean"].shape == (made.model.layers, made.model.heads, made.model.head_dim)


def test_a_cells_identity_has_the_hash_of_its_file(tmp_path):
    file, arguments = tmp_path / "x.safetensors", SimpleNamespace(pretrained="m", revision="main", chat_template=None)
    arguments.system_prompt = None
    found = []
    for content in (b"one", b"other", b"one"):
        file.write_bytes(content)
        options = {"calibration": str(file)}
        found.append(identity.fingerprint(Cell("t", "m", "q-filters", 0.2), arguments, options, {}, {}))
    assert found[0] == found[2] != found[1]
    plain = identity.fingerprint(Cell("t", "m", "q-filters", 0.2), arguments, {"calibration": None}, {}, {})
    assert "calibration" not in plain


@pytest.mark.slow
def test_a_cell_is_computed_with_the_file_and_again_with_another(tmp_path, capsys):
    out, argv = tmp_path / "q.safetensors", ["tiny_textvqa", "tiny", "q-filters", "0.3", "--limit", "4"]
    argv += [f"calibration={out}", "--output_path", str(tmp_path / "results")]
    assert evaluate.main(argv) == 2
    assert "cannot be read as a safetensors file" in capsys.readouterr().err
    for seed in ("0", "1"):
        assert (
            calibrate.main([*TINY, "--method", "q-filters", "--questions", "2", "--seed", seed, "--out", str(out)]) == 0
        )
        assert evaluate.main(argv) == 0
    (results,) = (tmp_path / "results").rglob("results.json")
    assert json.loads(results.read_text())["protocol"]["method"] == "q-filters"
    assert "computing again" in capsys.readouterr().out
