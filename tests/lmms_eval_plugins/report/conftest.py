"""Figures that are looked at, not saved."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures_not_rendered(monkeypatch) -> None:
    """A figure that is saved is laid out, and its file is empty."""

    def savefig(figure: Figure, file: Path, **how: object) -> None:
        figure.draw_without_rendering()
        Path(file).touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
