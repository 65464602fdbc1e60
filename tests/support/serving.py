"""A server in this process, at a free port of the loopback."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from kvcompress.command_line import key_values
from kvcompress.serve.app import Runner, Server
from kvcompress.serve.command import listening, load, parser
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT

METHOD = ("snapkv", "0.2", "window_size=8")


def loaded(*flags: str, method: tuple[str, ...] = METHOD) -> Server:
    """Load the bundled model as the command does."""
    given = parser().parse_intermixed_args([str(TINY_CHECKPOINT), *method, "--name", "tiny", *flags])
    return load(given, key_values(given.options))


@contextmanager
def served(server: Server) -> Iterator[httpx.Client]:
    """Serve; yields a client."""
    with listening("127.0.0.1", 0) as place:
        runner = Runner(server, seconds=1)
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [place]})
        thread.start()
        try:
            until(lambda: runner.started)
            url = f"http://127.0.0.1:{place.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=60) as client:
                yield client
        finally:
            runner.should_exit = True
            thread.join()


def until(holds, seconds: float = 20) -> None:
    """Wait until `holds()`. Raises AssertionError if it takes too long."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)
