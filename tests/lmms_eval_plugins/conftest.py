"""Tiny checkpoints on disk, shared by all tests of a run, and lmms-eval's index of tasks, read once."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """family name -> folder with its tiny checkpoint, which no test may change."""
    return cache(lambda family: save_checkpoint(family, tmp_path_factory.mktemp(family)))


@cache
def _whole_index(task_manager: type, include_path: str):
    return task_manager(include_path=include_path)


@pytest.fixture
def one_index(monkeypatch) -> None:
    """lmms-eval's index of its 1900 task files, which takes seconds, is made once for all tests that look up names."""
    import lmms_eval.tasks

    original = lmms_eval.tasks.TaskManager

    def manager(include_path: str | list, include_defaults: bool = True, model_name: str | None = None):
        if include_defaults:
            return _whole_index(original, include_path)
        return original(include_path=include_path, include_defaults=False, model_name=model_name)

    monkeypatch.setattr(lmms_eval.tasks, "TaskManager", manager)
