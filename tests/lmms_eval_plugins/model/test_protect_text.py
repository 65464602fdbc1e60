"""`protect_text=` in an evaluation of the bundled model: the run finds the passage in every question by itself."""

import json
import shlex
from pathlib import Path

import pytest

from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.kept_tokens_file import unpacked
from lmms_eval_plugins.leaderboard.protocol import protocol_of
from lmms_eval_plugins.leaderboard.rerun import command_of

PASSAGE = "answer the question using a single word or phrase."  # the bundled tokenizer writes in lower case
QUESTIONS = "6"
SLOW = ("prefix_cache_gb=1", "prefill_chunk=40")

pytestmark = pytest.mark.usefixtures("one_tiny_model", "plots_not_drawn", "small_index")


def run(tmp_path: Path, *arguments: str) -> int:
    folders = ["--limit", QUESTIONS, "--overlays", QUESTIONS, "--output_path", str(tmp_path)]
    return evaluate.main(["tiny_textvqa", "tiny", "full,random", "0.3", *arguments, *folders])


@pytest.mark.parametrize(
    "how", ["batch_size=3", "slots=2", *(pytest.param(how, marks=pytest.mark.slow) for how in SLOW)]
)
def test_every_question_keeps_the_passage_in_all_heads_and_layers(how, tmp_path):
    assert run(tmp_path, f"protect_text={PASSAGE}", "decode_ratio=0.3", "decode_interval=1", how) == 0
    (folder,) = (tmp_path / "tiny_textvqa" / "tiny").glob("random-*")
    _, *entries = [json.loads(line) for line in (folder / "survivors.jsonl").read_text().splitlines()]
    assert len(entries) == int(QUESTIONS)
    for entry in entries:
        text, pieces = unpacked(entry["text"]), entry["pieces"]
        stops = [place + 1 for place, piece in enumerate(pieces) if "".join(pieces[: place + 1]).endswith(PASSAGE)]
        starts = [place for place in range(len(pieces)) if "".join(pieces[place : stops[0]]).strip() == PASSAGE]
        assert text[:, :, starts[-1] : stops[0]].all()
        assert not text.all()


def test_results_name_the_passages_and_the_command_that_asks_again(tmp_path):
    assert run(tmp_path, 'protect_text=["single word", "\\nanswer"]') == 0
    (folder,) = (tmp_path / "tiny_textvqa" / "tiny").glob("random-*")
    cell = json.loads((folder / "results.json").read_text())
    assert cell["protocol"]["changed_options"] == {"protect_text": (said := '["single word", "\\nanswer"]')}
    assert protocol_of(cell)["protect_text"] == said
    assert f"protect_text={said}" in shlex.split(command_of(cell))


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("protect_text=Answer the question", f"has 'Answer the question' 0 times, not once, but {PASSAGE[:19]!r}"),
        ("protect_text=", "option 'protect_text' is '': Input should have characters of the prompt"),
        (f"protect_text={PASSAGE}", "protect_text='answer the question using a single word or phrase.' needs"),
    ],
)
def test_what_cannot_be_kept_ends_with_2_and_one_line(argument, said, tmp_path, capsys):
    size = ["0.3"] if "phrase" not in argument else ["-", "budget=3"]
    words = ["tiny_textvqa", "tiny", "random", *size, argument, "--limit", "1", "--output_path", str(tmp_path)]
    assert evaluate.main(words) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]
