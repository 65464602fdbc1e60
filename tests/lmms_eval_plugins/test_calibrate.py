"""Calibrating on a task's prompts, and what a cell's identity has of the file."""

from types import SimpleNamespace

from kvcompress.calibration import files
from lmms_eval_plugins import calibrate
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
