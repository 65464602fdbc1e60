"""Each script of examples/ runs as it stands, on a tiny random model of its family with the family's own processor."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import image, save_checkpoint, write_video

EXAMPLES = Path(__file__).parents[1] / "examples"
FAMILIES = {  # script -> families, the default model's first
    "picture": ["llava-onevision", "gemma3", "gemma4", "internvl"],
    "video": ["qwen3-vl", "llava-next-video"],
    "several_questions": ["qwen2.5-vl"],
}
CASES = [(name, family) for name, families in FAMILIES.items() for family in families]


def command_of(name: str) -> str:
    """The command at the head of a script."""
    return (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()[2]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command at the head of a script, followed by `words`; return the script's globals and output."""
    monkeypatch.chdir(tmp_path)
    image(0, 128, 128).save("photo.jpg")
    write_video(Path("clip.mp4"), frames=70)

    def run(name: str, family: str, *words: str) -> tuple[dict, str]:
        save_checkpoint(family, tmp_path / "model")
        _, *command = shlex.split(command_of(name))
        monkeypatch.setattr(sys, "argv", [*command, "--model", "model", *words])
        found = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        return found, capsys.readouterr().out

    return run


def test_every_script_has_its_line_in_the_readme_and_families_here():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == FAMILIES.keys()
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8").splitlines()
    for name in scripts:
        assert command_of(name).startswith(f"python examples/{name}.py --")
        assert command_of(name) in readme


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_script_answers_with_the_full_cache_and_with_a_smaller_one(name, family, run):
    found, printed = run(name, family)
    lines = re.findall(r"^([\w-]+): KV cache (\d+\.\d+) MiB, \d+\.\d+ s$", printed, re.MULTILINE)
    assert [method for method, _ in lines] == ["full", found["args"].method]
    full, compressed = (float(mebibytes) for _, mebibytes in lines)
    assert 0 < compressed < full


@pytest.mark.slow
def test_questions_about_a_picture_that_is_read_once_get_the_answers_that_each_gets_alone(run):
    found, _ = run(
        "several_questions",
        "qwen2.5-vl",
        "--method",
        "full",
        "--ratio",
        "1",
        "--questions",
        "What?",
        "Where is it?",
        "Who",
    )
    alone = []
    for prompt in found["prompts"]:
        output = found["model"].generate(**prompt, max_new_tokens=128, do_sample=False)
        new = output[0, prompt["input_ids"].shape[1] :]
        alone.append(found["processor"].decode(new, skip_special_tokens=True).strip())
    assert found["answers"] == alone
    assert len({*alone}) == 3


@pytest.mark.slow
def test_the_video_example_shows_as_many_frames_as_asked(run):
    found, _ = run("video", "llava-next-video", "--frames", "64")
    assert found["inputs"]["pixel_values_videos"].shape[1] == 64
