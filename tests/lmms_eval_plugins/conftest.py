"""Tiny checkpoints on disk and the bundled model, shared by all tests of a run; a small index of tasks; a browser."""

import shutil
import sys
from collections.abc import Callable
from functools import cache, partial

import pytest

from lmms_eval_plugins.model import loading
from lmms_eval_plugins.model.arguments import TINY_MODEL, ModelArguments
from lmms_eval_plugins.report import plots
from tests.support.checkpoints import save_checkpoint, write_video

_tiny_models: dict[str, object] = {}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """family name -> folder with its tiny checkpoint, which no test may change."""
    return cache(lambda family: save_checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def video(tmp_path_factory) -> str:
    """A clip of 12 frames, at 4 per second."""
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4")


@pytest.fixture
def one_tiny_model(monkeypatch) -> None:
    """Evaluations in this process share the weights of the bundled model."""
    read = loading._read

    def read_once(
        args: ModelArguments, raw_config: object, config: object, processor: object, settings: dict
    ) -> object:
        if args.pretrained != ModelArguments(pretrained=TINY_MODEL).pretrained:
            return read(args, raw_config, config, processor, settings)
        key = repr((args.revision, args.trust_remote_code, settings))
        if key not in _tiny_models:
            _tiny_models[key] = read(args, raw_config, config, processor, settings)
        return _tiny_models[key]

    monkeypatch.setattr(loading, "_read", read_once)


@pytest.fixture
def clean_process(monkeypatch, tmp_path, one_tiny_model) -> None:
    """A test in a folder of its own, offline, and with what a command sets for a whole process put back."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which the hub's client reads at import
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("lmms_eval.api.task", "lmms_eval.evaluator", "lm_eval.api.task"):
        if module := sys.modules.get(name):
            monkeypatch.setattr(module, "tqdm", module.tqdm)


@pytest.fixture
def plots_not_drawn(monkeypatch) -> None:
    """The plots beside a table of cells are empty files; test_evaluate.py and report/test_table.py draw them."""
    for name in ("plot", "plot_throughput"):
        monkeypatch.setattr(plots, name, lambda frame, title, path: path.touch())


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
