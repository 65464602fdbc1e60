"""Figures that are looked at."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """Every figure that is saved."""
    saved, save = [], Figure.savefig

    def savefig(figure: Figure, file: Path, **how: object) -> None:
        saved.append(figure)
        save(figure, file, **how)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


@pytest.fixture
def figures_not_rendered(monkeypatch) -> list[Figure]:
    """Every figure that is saved; it is laid out, and its file is empty."""
    saved = []

    def savefig(figure: Figure, file: Path, **how: object) -> None:
        saved.append(figure)
        figure.draw_without_rendering()
        Path(file).touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved
