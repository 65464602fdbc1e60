"""Make a leaderboard submission of the bundled model: a few methods on five bundled tasks.

    python -m benchmarks.leaderboard
    python -m kvcompress leaderboard benchmarks/results/leaderboard.tar.xz

Writes the archive if `leaderboard --check` finds no problem, with the tables of all methods whose answers are in
benchmarks/results (verdict.py, ruler.py, method_table.py's list), and which method they choose into
docs/methods-compared.md. Cells that are complete in `--folder` are not computed again; `--tables-only` keeps those of
the archive. The archive contains no folder names of this machine.
"""

import io
import os
import sys
import tarfile
from pathlib import Path

import torch

from kvcompress.files import replacing, write_text
from kvcompress.flag_types import path, whole
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.results import RESULTS_FILE, SAMPLES_FILE
from lmms_eval_plugins.leaderboard.checks import problems
from lmms_eval_plugins.leaderboard.submissions import unpacked
from lmms_eval_plugins.leaderboard.tables import FILE, Tables

from .driver import RESULTS, new_parser, put, start
from .leaderboard_tables import sentences, tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "methods-compared.md"
METHODS = "full,random,streamingllm,snapkv,adakv,keydiff"
RATIOS = "0.5,0.2"
# The demo's window. Slots, because videos of different lengths cannot share a batch.
ARGUMENTS = ("window_size=8", "slots=8")
RUNS = (  # tasks and protocol; with first_token=compressed, short answers show compression too
    ("tiny_textvqa", ()),
    ("tiny_textvqa,tiny_read_all,tiny_multi_image,tiny_video,tiny_needle", ("first_token=compressed",)),
)


def pack(results: Path, archive: Path) -> None:
    """Write the cells and tables under `results` into a tar.xz, without this machine's folder names."""
    with replacing(archive) as draft, tarfile.open(draft, "w:xz") as packed:
        for file in sorted([*results.rglob(RESULTS_FILE), *results.rglob(SAMPLES_FILE), *results.glob(FILE)]):
            text = file.read_text(encoding="utf-8")
            for folder, name in ((results.resolve(), "results"), (ROOT, ".")):
                text = text.replace(str(folder), name)
            entry = tarfile.TarInfo(file.relative_to(results).as_posix())
            content = text.encode()
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))


def main(argv: list[str]) -> int:
    parser = new_parser("leaderboard", __doc__)
    parser.add_argument("--limit", type=whole(1), default=16, metavar="N", help="questions per task (16)")
    parser.add_argument("--folder", type=path, default=ROOT / "runs" / "leaderboard", help="of the results")
    parser.add_argument("--out", type=path, default=RESULTS / "leaderboard.tar.xz", help="the archive")
    parser.add_argument("--tables-only", action="store_true", help="run nothing")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = list(tables(RESULTS))
    put(PAGE, "leaderboard", "which-method", sentences(found))
    text = Tables(tables=found).model_dump_json()
    if given.tables_only:
        with unpacked(given.out) as folder:
            write_text(folder / FILE, text)
            pack(folder, given.out)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the model's layers are too small to share
    for tasks, protocol in RUNS:
        words = [tasks, "tiny", METHODS, RATIOS, *ARGUMENTS, *protocol]
        if code := evaluate.main([*words, "--limit", str(given.limit), "--output_path", str(given.folder)]):
            return code
    if wrong := problems(given.folder):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    write_text(given.folder / FILE, text)
    pack(given.folder, given.out)
    print(f"written: {given.out} ({given.out.stat().st_size / 1e3:.0f} kB)")
    return 0


if __name__ == "__main__":
    start(main)
