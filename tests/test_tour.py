"""The notebook runs from its first cell to its last, with what is in the repository."""

from pathlib import Path

import nbclient
import nbformat
import pytest

TOUR = Path(__file__).parent.parent / "docs" / "tour.ipynb"


@pytest.mark.slow
def test_the_tour_runs_from_beginning_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TOUR_LIMIT", "2")
    monkeypatch.setenv("TOUR_RESULTS", str(tmp_path))
    notebook = nbformat.read(TOUR, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    cells = sorted(path.name for path in (tmp_path / "tiny_textvqa" / "tiny").glob("value-aware-*"))
    assert len(cells) == 4  # the method of the notebook, at each ratio
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if {"image/png", "image/jpeg"} & output.get("data", {}).keys()]
    assert len(pictures) == 3  # the question's image, the Pareto plot, the survivors


def test_the_tour_is_committed_as_it_ran():
    cells = [cell for cell in nbformat.read(TOUR, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
