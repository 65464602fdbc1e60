"""The notebooks of docs/ run from their first cell to their last, with what is in the repository."""

from pathlib import Path

import nbclient
import nbformat
import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a notebook in `tmp_path`, with `settings` in its environment."""

    def run(name: str, **settings: str) -> nbformat.NotebookNode:
        for setting, value in settings.items():
            monkeypatch.setenv(setting, value)
        notebook = nbformat.read(DOCS / name, as_version=4)
        resources = {"metadata": {"path": tmp_path}}
        nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
        return notebook

    return run


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum(bool({"image/png", "image/jpeg"} & output.get("data", {}).keys()) for output in outputs)


@pytest.mark.slow
def test_the_tour_runs_from_beginning_to_end(run, tmp_path):
    notebook = run("tour.ipynb", TOUR_LIMIT="2", TOUR_RESULTS=str(tmp_path))
    cells = sorted(path.name for path in (tmp_path / "tiny_textvqa" / "tiny").glob("value-aware-*"))
    assert len(cells) == 4  # the method of the notebook, at each ratio
    assert pictures(notebook) == 3  # the question's image, the Pareto plot, the survivors


@pytest.mark.slow
def test_an_idea_gets_from_its_cell_to_a_paired_test(run):
    assert pictures(run("idea-to-significance.ipynb", NOTEBOOK_QUESTIONS="3")) == 1  # the differences


@pytest.mark.slow
def test_speed_and_memory_are_measured_and_drawn(run, tmp_path):
    notebook = run("speed-and-memory.ipynb", NOTEBOOK_REPEATS="1", NOTEBOOK_LENGTHS="64 128")
    assert pictures(notebook) == 2  # speed and memory, what was kept
    assert (tmp_path / "bench.json").exists()


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
