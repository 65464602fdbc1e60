"""Fixtures that several test files use."""

import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from tests import ordinary

# The same examples each time, and a failure is not made smaller: for tests.mutate, which only wants to know whether.
settings.register_profile(
    "mutate", database=None, derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate)
)


os.environ.pop("KVCOMPRESS_SCRIPTS", None)  # run_tests.sh sets it, and messages would name its scripts
gc.disable()  # until the tests begin: looking through half-loaded modules takes a tenth of the time to import them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="more than the sample of tests of an ordinary run")


def pytest_configure(config: pytest.Config) -> None:
    config.option.every_case |= ordinary.is_part(config)
    # Ctrl-C and a hang-up are heard: a shell that starts the tests in the background, or nohup, has them ignore these,
    # and so what they start.
    if threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, handler)


@pytest.hookimpl(trylast=True)  # of what is left without slow and GPU tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.every_case:
        items[:], left = ordinary.sample(items)
        config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.option.every_case:
        terminalreporter.write_line("This was a sample of the tests: --every-case runs all.")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 50, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file's tests leave behind (imported modules, small models) stays, so that no later collection of garbage
    looks through it, which would take a second late in a run."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def fake_flash_attn() -> Iterator[None]:
    """The test runs with the stand-in for flash-attn: see tests/support/fake_flash_attn."""
    from tests.support.flash_attn_stand_in import flash_attn_stand_in  # imports transformers

    with flash_attn_stand_in():
        yield
