"""Tiny checkpoints on disk and the bundled model, shared by all tests of a run; a small index of tasks; a browser."""

import shutil
from collections.abc import Callable
from functools import cache, partial

import pytest

from lmms_eval_plugins.model import lm, loading
from lmms_eval_plugins.model.arguments import TINY_MODEL, ModelArguments
from lmms_eval_plugins.report import folder
from tests.support.checkpoints import load_once, save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """family name -> folder with its tiny checkpoint, which no test may change."""
    return cache(lambda family: save_checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def one_tiny_model(monkeypatch) -> None:
    """Evaluations in this process share the bundled model, in place of one for each, which a tenth of a run went to."""

    def load(args: ModelArguments, *where: object) -> tuple[object, object]:
        is_tiny = args.pretrained == ModelArguments(pretrained=TINY_MODEL).pretrained
        return (load_once if is_tiny else loading.load)(args, *where)

    monkeypatch.setattr(lm, "load", load)


@pytest.fixture
def plots_not_drawn(monkeypatch) -> None:
    """The plots beside a table of cells are empty files; test_evaluate.py and report/test_table.py draw them."""
    for name in ("plot", "plot_throughput"):
        monkeypatch.setattr(folder, name, lambda frame, title, path: path.touch())


@pytest.fixture
def small_index(monkeypatch) -> None:
    """Leaves lmms-eval's own 1900 task files out of the index, which take seconds to read."""
    import lmms_eval.tasks

    manager = partial(lmms_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lmms_eval.tasks, "TaskManager", manager)


@pytest.fixture(scope="module")
def browser():
    """Chromium; where there is none, the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on PATH (Debian: apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()
