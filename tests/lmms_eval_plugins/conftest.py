"""Tiny checkpoints on disk, shared by all tests of a run; a small index of tasks; a browser."""

import shutil
from collections.abc import Callable
from functools import cache, partial

import pytest

from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """family name -> folder with its tiny checkpoint, which no test may change."""
    return cache(lambda family: save_checkpoint(family, tmp_path_factory.mktemp(family)))


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
