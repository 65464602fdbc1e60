"""Notice failures while lmms-eval scores: a scorer that raises, and a judge that does not answer.

Most scorers turn a failed request into a score. So the requests themselves are watched, at the point where Python's
usual clients (requests, httpx, urllib3) send them.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


class JudgeWatch:
    """Records POST requests that failed and did not succeed when sent again.

    Attributes:
        is_on: whether requests are recorded; True while answers are scored.
        unanswered: request -> why it failed.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.unanswered: dict[str, str] = {}

    def note(self, method: str, url: str, body: Any, status: int | None, reason: str) -> None:
        """Record one attempt of a request; `status` is None if there was no response, because of `reason`."""
        if not self.is_on or method.upper() != "POST":
            return
        body = body if isinstance(body, bytes) else str(body).encode()
        request = hashlib.sha256(f"{url}\n".encode() + body).hexdigest()
        if status is None or status >= 400:
            self.unanswered[request] = f"{url}: {reason if status is None else f'HTTP {status}'}"
        else:
            self.unanswered.pop(request, None)

    @contextlib.contextmanager
    def attempt(self, method: str, url: str, body: Any) -> Iterator[SimpleNamespace]:
        """Record one attempt, made inside this context, which sets the response's `status`."""
        attempt = SimpleNamespace(status=None)
        try:
            yield attempt
        except Exception as error:
            self.note(method, url, body, None, type(error).__name__)
            raise
        self.note(method, url, body, attempt.status, "")


@contextlib.contextmanager
def scorers_watched() -> Iterator[JudgeWatch]:
    """Watch requests inside this context, and let a scorer's own error propagate instead of a RetryError."""
    import httpx
    import urllib3
    from lmms_eval.api.task import ConfigurableTask

    from kvcompress.hooks.replacement import Replacement

    watch, pool = JudgeWatch(), urllib3.HTTPConnectionPool
    urlopen, send, async_send = pool.urlopen, httpx.Client.send, httpx.AsyncClient.send

    def watched_urlopen(self: Any, method: str, url: str, body: Any = None, *args: Any, **kwargs: Any) -> Any:
        with watch.attempt(method, f"{self.scheme}://{self.host}:{self.port}{url}", body) as attempt:
            response = urlopen(self, method, url, body, *args, **kwargs)
            attempt.status = response.status
        return response

    def watched_send(self: Any, request: httpx.Request, **kwargs: Any) -> httpx.Response:
        with watch.attempt(request.method, str(request.url), _content(request)) as attempt:
            response = send(self, request, **kwargs)
            attempt.status = response.status_code
        return response

    async def watched_async_send(self: Any, request: httpx.Request, **kwargs: Any) -> httpx.Response:
        with watch.attempt(request.method, str(request.url), _content(request)) as attempt:
            response = await async_send(self, request, **kwargs)
            attempt.status = response.status_code
        return response

    with (
        Replacement(pool, "urlopen", watched_urlopen),
        Replacement(httpx.Client, "send", watched_send),
        Replacement(httpx.AsyncClient, "send", watched_async_send),
        Replacement(ConfigurableTask.process_results.retry, "reraise", True),
    ):
        yield watch


def _content(request: Any) -> bytes:
    """Return the body of an httpx request; empty for a stream, which cannot be sent again anyway."""
    import httpx

    try:
        return request.content
    except httpx.RequestNotRead:
        return b""
