"""The archive that the benchmark writes is the results, without the names of this machine's folders."""

import json

from benchmarks.leaderboard import ROOT, pack
from lmms_eval_plugins.cells.results import read_cell
from lmms_eval_plugins.leaderboard.submissions import unpacked
from tests.support.result_cells import write_answers


def test_an_archive_holds_the_cells_and_names_no_folder_of_this_machine(tmp_path):
    results = tmp_path / "results"
    cell = write_answers(results, "letters", "knorm", 0.2, "abxx") / "knorm-0.2"
    content = json.loads((cell / "results.json").read_text())
    named = {"output_path": f"{results}/letters/x", "pretrained": f"{ROOT}/lmms_eval_plugins"}
    (cell / "results.json").write_text(json.dumps({**content, "config": named}))
    (cell / "survivors.jsonl").write_text("{}\n")
    pack(results, tmp_path / "a.tar.xz")
    with unpacked(tmp_path / "a.tar.xz") as folder:
        (file,) = folder.rglob("results.json")
        packed, samples = read_cell(file.parent)
        assert [path.name for path in sorted(file.parent.iterdir())] == ["results.json", "samples.jsonl"]
    assert packed == {**content, "config": {"output_path": "results/letters/x", "pretrained": "./lmms_eval_plugins"}}
    assert samples == read_cell(cell)[1]
