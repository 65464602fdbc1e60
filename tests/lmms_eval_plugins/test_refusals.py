"""What commands refuse: one line that names what is wrong, and nothing is loaded or written.

A new refusal is a row here, unless it needs more than words and the files of `folder`.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from PIL import Image

from kvcompress.__main__ import main
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import names
from lmms_eval_plugins.report.html import show
from tests.lmms_eval_plugins.leaderboard.conftest import ARCHIVE
from tests.support.result_cells import write_answers

from .reproduce.test_reproduce import MINIMAL

pytestmark = pytest.mark.usefixtures("clean_process", "small_index")

TASK = "eval tiny_textvqa tiny"
FOUR = f"{TASK} snapkv 0.2"
CALIBRATE = "calibrate tiny --out x --task tiny_textvqa --method"
LENGTHS = ([1e9], [10**9], [0], [], "4096", [True], {"a": 1}, [1.5])
# fmt: off
SLIPS = [  # also answered at once: cells/test_names.py
    ("eval no_such_task tiny snapkv 0.2", "unknown task 'no_such_task'"),
    ("eval tiny_textvqq tiny snapkv 0.2", "unknown task 'tiny_textvqq' (did you mean 'tiny_textvqa'?)"),
    (f"{TASK} full,snapvk 0.2", "there is no method 'snapvk' (did you mean 'snapkv'?)"),
    (f"{FOUR} windowsize=8", "'windowsize' (did you mean 'window_size'?)"),
    ("eval tiny_textvqa 'no such model' snapkv 0.2", "MODEL 'no such model' is neither"),
    (f"{FOUR} --limt 3", "'--limt' (did you mean '--limit'?)"),
    (f"{TASK} snapkv 7", "error: RATIO 7 is not in (0, 1]"),
]
WORDS = [
    ("eval tiny_textvqa,no_such_task tiny snapkv 0.2", "'no_such_task'"),
    ("eval tiny_textvqa ./nowhere snapkv 0.2", "'./nowhere' .*neither a folder"),
    ("eval tiny_textvqa ./empty knorm 0.2", "without config.json"),
    (f"{TASK} snapkv", "RATIO is missing"),
    ("eval tiny_textvqa", "MODEL is missing"),
    ("eval --apply_chat_template tiny_textvqa tiny", "METHOD is missing"),
    (f"{TASK} snapkv 0", "RATIO 0 is not in"),
    (f"{TASK} snapkv nan", "RATIO 'nan' is not a number"),
    (f"{TASK} snapkv 0.2,1.5", "RATIO 1.5 is not in"),
    (f"{TASK} snapkv window_size=8", "'window_size=8' is not a number"),
    (f"{TASK} snapkv 0.5,-", "RATIO '-' is not a number"),
    (f"{TASK} snapkv ''", "RATIO '' is an empty list"),
    (f"{TASK} snapkv -", "budget=ENTRIES"),
    (f"{FOUR} budget=64", "budget=ENTRIES"),
    (f"{FOUR} budget=", "give either RATIO, or '-'"),
    (f"{FOUR} budget=64 preset=paper", "budget=ENTRIES"),
    (f"{TASK} snapkv - budget=0", "budget='0' is not a whole number of at least 1"),
    (f"{TASK} snapkv - budget=,", "budget ',' is an empty list"),
    ("eval , tiny snapkv 0.2", "TASK ',' is an empty list"),
    (f"{TASK} ' , ' 0.2", "METHOD ' , ' is an empty list"),
    (f"{FOUR} extra", "'extra' is neither a flag nor key=value"),
    (f"{FOUR} a=1 a=2", "a= is given twice"),
    (f"{FOUR} method=knorm", "method= is set by METHOD"),
    (f"{FOUR} ratio=0.5", "ratio= is set by RATIO"),
    (f"{TASK} snapkv - preset=paper", "needs ratio= (fraction kept, in (0, 1]) or budget="),
    (f"{TASK} knorm,fastv - preset=k2-r50", "needs ratio= (fraction kept, in (0, 1]) or budget="),
    *((f"{TASK} random 0.5 seed={seeds}", f"seed={seeds} is not a range of 1 to 1000 seeds")
      for seeds in ("3..2", "0..1000", "0..999999999")),
]
ARGUMENTS = [
    (f"{TASK} snapkv,knorm 0.2 dtyp=float32",
     "neither the model nor snapkv, knorm has an argument 'dtyp' (did you mean 'dtype'?)"),
    (f"{TASK} knorm 0.2 window_size=8",
     "'window_size' is an option of adakv, adamixkv, cake and .* other methods, not of knorm"),
    (f"{FOUR} fewer_frames=true", "'fewer_frames' is an option of downsample, not of snapkv"),
    (f"{FOUR} legacy=1", "has an argument 'legacy'"),
    (f"{FOUR} window_size=wide", "window_size.*'wide'"),
    (f"{TASK} snapkv,knorm 0.3 window_size=0", "option 'window_size' is 0"),
    (f"{FOUR} dtype=bf16", "dtype.*'bf16'.*bfloat16"),
    (f"{FOUR} tp_plan=auto device_map=auto", "device_map='auto'.*tp_plan='auto'"),
    (f"{TASK} full,adakv 0.2 tp_plan=auto", "head_budget='adaptive' does not go with"),
    (f"{FOUR} conv_template=qwen", "conv_template.*chat template"),
    (f"{TASK} kvzap 0.3", "'kvzap' is learned: it needs checkpoint="),
    (f"{TASK} kvzap,q-filters 0.3", "'kvzap' is learned"),
    (f"{FOUR} quantization=int8", "quantization='int8'.*quanto-int8.*bnb-int4"),
    (f"{FOUR} --gen_kwargs foo=1", "there is no generation argument 'foo'; valid: assistant_"),
    (f"{FOUR} slots=4 --gen_kwargs num_beams=2", "slots=4 does not go with num_beams=2: it has to be 1"),
    (f"{FOUR} slots=4 cache_implementation=quantized", "slots=4 does not go with cache_implementation='quantized'"),
    (f"{FOUR} slots=4 batch_size=4", "slots=4 does not go with batch_size=4"),
    (f"{FOUR} slots=4 --batch_size 4", "slots=4 does not go with batch_size=4"),
    (f"{FOUR} --system_instruction a system_prompt=b", "twice: --system_instruction also sets"),
    (f"{FOUR} measurements_path=file/rows.jsonl", "file' cannot be written: "),
]
FLAGS = [
    (f"{FOUR} --lmit 8", "unknown flag '--lmit' (did you mean '--limit'?)"),
    (f"{FOUR} --batch_size auto:0", "argument --batch_size/-b: 'auto:0' is neither a whole number"),
    (f"{FOUR} --timezone Europe/Berlni", "not a time zone (did you mean 'Europe/Berlin'?)"),
    *((f"{FOUR} --reasoning_tags '{tags}'", "is neither none nor a JSON list of pairs")
      for tags in ('["<a>"]', "[[1, 2]]")),
    *((f"{FOUR} --metadata '{value}'", "not a JSON object")
      for value in ("2048", "[1]", "{", "max_seq_lengths=[2048]")),
    *((f"{FOUR} --metadata '{json.dumps({'max_seq_lengths': wrong})}'",
       "not a list of prompt lengths, whole numbers from 1 to 1048576") for wrong in LENGTHS),
    (f"{FOUR} --num_fewshot 2",
     "--num_fewshot 2: the file of task 'tiny_textvqa' names no examples (fewshot_config)"),
    (f"{FOUR} --fewshot_as_multiturn",
     "--fewshot_as_multiturn: task 'tiny_textvqa' has no examples to show; --num_few"),
    (f"{FOUR} --offset 100000", "--offset 100000 leaves no question of 'tiny_textvqa'"),
    (f"{FOUR} --use_cache file", "file' cannot be written: "),
    *((f"{FOUR} --output_path {place}", f"/{place}.*{wrong}") for place, wrong in
      (("file", "cannot be written"), ("taken", "cannot be written"), ("deeper", "snapkv-0.2' is a file"))),
    (f"{FOUR} --wandb_args ''", "holds no name=value"),
    (f"{FOUR} --wandb_args projekt=p",
     "--wandb_args: wandb.init has no argument 'projekt' (did you mean 'project'?)"),
    (f"{TASK} full,snapkv 0.2 --wandb_args id=a", "--wandb_args: id=a names one run, but there are 2 cells"),
    (f"{FOUR} --wandb_log_samples", "--wandb_log_samples needs --wandb_args"),
    (f"{FOUR} --hf_hub_log_args hub_results_org=me", "push_results_to_hub=true nor push_samples_to_hub=true"),
    (f"{FOUR} --hf_hub_log_args push_result_to_hub=true", "(did you mean 'push_results_to_hub'?)"),
    (f"{FOUR} --hf_hub_log_args push_results_to_hub=yes", "is neither true nor false"),
    (f"{FOUR} --hf_hub_log_args token=hf_secret", "set HF_TOKEN"),
    ("eval list", "the following arguments are required: kind"),
    ("eval list taks", "invalid choice: 'taks' (choose from "),
    ("eval list tasks a b", "unrecognized arguments: b"),
    ("eval list methods 'no such method'", "no line of "),
]
OTHERS = [
    ("calibrate tiny --out x --task tiny_textvq --method q-filters", "unknown task 'tiny_textvq' (did you mean"),
    (f"{CALIBRATE} snapkv", "method 'snapkv' is not calibrated"),
    (f"{CALIBRATE} q-filters recents=3", "has an argument 'recents'"),
    (f"{CALIBRATE} q-filters recent", "'recent' is not OPTION=VALUE"),
    (f"{CALIBRATE} q-filters --questions 0", "--questions"),
    (f"{CALIBRATE} q-filters --dtype float16 dtype=float32", "give either dtype=float32 or --dtype float16"),
    ("calibrate tiny --out x --method q-filters", "--task"),
    ("calibrate tiny --out x --method q-filters --text book.txt", "'tiny' is calibrated with --task"),
    ("reproduce effivlm", "no reproduction 'effivlm' (did you mean 'effivlm_bench'?)"),
    ("reproduce none.yaml", "none.yaml"),
    ("reproduce paper.yaml --only task=Two", "--only task=Two: there is no such task; valid: One, Judged"),
    ("reproduce paper.yaml --only ratio=0.3", "there is no such ratio; valid: 1, 0.5, 0.25"),
    ("reproduce paper.yaml --only size=3", "give model=, task=, method= or ratio="),
    ("reproduce paper.yaml --only method=Full,ratio=0.5", "no cell matches all of these"),
    ("reproduce paper.yaml --only ,", "--only ',' is an empty list"),
    ("reproduce paper.yaml --limi 4", "unknown flag '--limi'"),
    ("reproduce paper.yaml --output_path file", "file' cannot be written: "),
    ("reproduce paper.yaml --write-reference file/ours.csv", "file' cannot be written: "),
    ("reproduce paper.yaml --dry-run scorer=random seed=0..2",
     "one cell per method and size in its table, not .* seed=0..9"),
    ("sweep dmo", "no sweep 'dmo'.*demo.*random"),
    ("sweep none.yaml", "sweep file 'none.yaml' cannot be read: No such file"),
    ("sweep empty", "empty"),
    ("sweep a.yaml --trials 0", "error: argument --trials: '0' is not a whole number of at least 1"),
    ("sweep a.yaml --workers 2", "error: --workers and --cpus-per-trial need --ray"),
    ("sweep a.yaml limit", "error: 'limit' is not --name=value"),
    ("NUM_PROCESSES=2 sweep a.yaml --ray local", "error: NUM_PROCESSES=2 with --ray: a trial on Ray is one"),
    ("sweep a.yaml --output_path file", "file/sweeps/a' cannot be written: "),
    ("metrics none", "is not a folder"),
    ("metrics results/two/m", "run the same command with METHOD full"),
    ("metrics results/one/m --compare snapkvv knorm",
     "'snapkvv' is not a series of one; the series are: 'full', 'knorm', 'snapkv'"),
    ("metrics results/one/m --reference snapk",
     "'snapk' is not a series of one; the series are: 'full', 'knorm', 'snapkv'"),
    ("metrics results/one/m --margin 0", "--margin"),
    ("metrics results/one/m --from 1", "starts at a ratio in (0, 1), not at 1"),
    ("report empty", "empty"),
    ("report broken", "broken"),
    ("report other", "other"),
    ("report results --out file", "file' cannot be written: File exists"),
    ("show none.png ?", "none.png"),
    ("show a.png ? --out a.pdf", "a.pdf"),
    ("show a.png ? --method snap", "snap"),
    ("show a.png ? --ratio 2", "RATIO 2 is not in "),
    ("show a.png ? sinks=3", "sinks"),
    ("show a.png ? --out a.png/b.html", "a.png' cannot be written: "),
    *((f"show broken.png{number} ?", f"broken.png{number}' is not an image") for number in range(4)),
    ("leaderboard --check empty", "no cell under"),
    ("leaderboard --check file", "file' is neither a folder with results nor a tar archive of one"),
    ("leaderboard --check half.tar.xz", "half.tar.xz"),
    ("long-pack --out x --picture-size 60x60",
     "--picture-size 60x60 is too small for a card with text of --font-px 20, which needs"),
    ("long-pack --out x --page-size 300x400",
     "--page-size 300x400 is too small for a page's content at --font-px 20"),
    ("long-pack --out x --lengths 4,700", "--lengths 700: a document has at most 599 pages"),
    ("long-pack --out x --kinds countin", "did you mean 'counting'?"),
    ("long-pack --out x --lengths 1", "--lengths: '1' is not a whole number of at least 2"),
    ("long-pack --out x --questions 1000000", "at most 200000 are drawn"),
]
NOT_HERE = [  # nothing is wrong about the words: exit code 1
    ("eval tiny_textvqa org/absent-7b knorm 0.2", "`hf download org/absent-7b --local-dir absent-7b`"),
    ("eval textvqa_val tiny snapkv 0.2", "task 'textvqa_val' is not on this machine.*`hf download lmms-lab-encoder/"
     "textvqa --repo-type dataset --local-dir data/lmms-lab-encoder/textvqa`"),
    ("table empty", "no finished cell under"),
]
# fmt: on
IMAGES = [b"", b"words", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, b"GIF89a" + b"\xff" * 20]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """What the rows name. lmms-eval seems to have the grid's tasks, and no model loads."""
    installed = names.installed_tasks() | {name: ("task", tmp_path) for name in ("one", "two")}
    monkeypatch.setattr(names, "installed_tasks", lambda: installed)
    monkeypatch.setattr(evaluate, "load_model", None)
    monkeypatch.setattr(show, "load_model", None)
    for task, methods in {"one": ("full", "knorm", "snapkv"), "two": ("knorm",)}.items():
        for method in methods:
            write_answers(tmp_path / "results", task, method, 1.0 if method == "full" else 0.25, "abcd")
    for file, content in {
        "file": b"mine",
        "taken/tiny_textvqa": b"mine",
        "deeper/tiny_textvqa/tiny/snapkv-0.2": b"mine",
        "broken/results.json": b"{",
        "other/results.json": b"{}",
        "half.tar.xz": ARCHIVE.read_bytes()[:3000],
        "paper.yaml": yaml.safe_dump(MINIMAL).encode(),
        "a.yaml": (Path(__file__).parents[2] / "configs" / "sweeps" / "demo.yaml").read_bytes(),
        **{f"broken.png{number}": image for number, image in enumerate(IMAGES)},
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    (tmp_path / "empty").mkdir()
    Image.new("RGB", (20, 12)).save(tmp_path / "a.png")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(line: str, code: int, said: str, folder: Path, monkeypatch, capsys) -> None:
    words = shlex.split(line)
    if re.fullmatch(r"[A-Z_]+=\w+", words[0]):
        monkeypatch.setenv(*words.pop(0).split("="))
    before = contents(folder)
    assert main(words) == code
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") or words[0] == "leaderboard"
    assert said in error or re.search(said, error), error
    assert contents(folder) == before


@pytest.mark.parametrize(("line", "said"), [*SLIPS, *WORDS, *ARGUMENTS, *FLAGS, *OTHERS])
def test_what_is_wrong_is_one_line_and_exit_code_2(line, said, folder, monkeypatch, capsys):
    refused(line, 2, said, folder, monkeypatch, capsys)


@pytest.mark.parametrize(("line", "said"), NOT_HERE)
def test_what_is_not_here_is_one_line_and_exit_code_1(line, said, folder, monkeypatch, capsys):
    refused(line, 1, said, folder, monkeypatch, capsys)
