"""The endpoints: chat completions as OpenAI's clients ask for them, models, health and metrics."""

import asyncio
import hmac
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..errors import KVCompressError, one_line
from ..inflight import Answer
from .chat import Asked, Prompts
from .metrics import Metrics, kept_entries
from .text import AnswerText
from .worker import Job, Worker

if TYPE_CHECKING:  # only --pages-gb needs transformers' continuous batching
    from .paged_worker import PagedWorker

LARGEST_BODY = 64 * 2**20  # bytes


@dataclass
class Server:
    """A model that is served.

    Attributes:
        name: the model's name, which requests must give.
        about: what else `/v1/models` says of it.
        most: the most unanswered requests.
        api_key: what requests to /v1 must bring; None: nothing.
        hosts: the names that requests to /v1 may call this machine by; empty: any. A web page whose name was made to
            mean the loopback is refused by the name, which its browser sends.
    """

    name: str
    about: Mapping[str, Any]
    worker: "Worker | PagedWorker"
    prompts: Prompts
    most: int
    api_key: str | None = None
    hosts: tuple[str, ...] = ()
    _preparing: int = 0
    _started: int = field(default_factory=lambda: int(time.time()))

    def app(self) -> Starlette:
        """Return the ASGI application; the worker starts and ends with it."""
        self._metrics = Metrics(self.worker)
        self._processing = anyio.CapacityLimiter(1)  # tokenizers may not be used by two threads

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            try:
                yield
            finally:
                await asyncio.to_thread(self.worker.stop)

        routes = [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refused})

    async def health(self, request: Request) -> Response:
        if self.worker.error is not None:
            return JSONResponse({"status": said(self.worker.error)}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "kvcompress", **self.about}
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(self, request: Request) -> Response:
        try:
            response = await self._complete(request)
        except HTTPException as error:
            self._metrics.requests.labels(error.status_code).inc()
            raise
        self._metrics.requests.labels(response.status_code).inc()
        return response

    async def _complete(self, request: Request) -> Response:
        self._authorize(request)
        asked = Asked.of(await body_of(request))
        if asked.model != self.name:
            raise HTTPException(404, f"there is no model {asked.model!r} here, only {self.name!r}")
        if self.worker.waiting + self.worker.running + self._preparing >= self.most:
            raise HTTPException(429, f"{self.most} requests are unanswered: try again later", {"Retry-After": "1"})
        reply = Reply(AnswerText(self.prompts.tokenizer, asked.stop or ()))
        self._preparing += 1
        try:
            job = await anyio.to_thread.run_sync(self._job, asked, reply, limiter=self._processing)
        finally:
            self._preparing -= 1
        try:
            self.worker.submit(job)
        except KVCompressError as error:
            raise HTTPException(400, said(error)) from None
        watch = asyncio.create_task(self._cancel_if_gone(request, job))
        try:
            update = await self._next(reply, job)
            head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
            if asked.stream:
                events = self._events(update, reply, job, asked, head, watch)
                watch = None  # the events end it
                return StreamingResponse(events, media_type="text/event-stream")
            text = ""
            while isinstance(update, str):
                text, update = text + update, await self._next(reply, job)
        finally:
            if watch is not None:
                watch.cancel()
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, **self._end(reply, update, asked)}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage(update)})

    def _job(self, asked: Asked, reply: "Reply") -> Job:
        """Read the prompt, outside of the event loop."""
        inputs = self.prompts.inputs(asked.messages)
        room = self.prompts.room(inputs["input_ids"].shape[1], asked.most_tokens)
        options = {"max_new_tokens": room, **asked.options()}
        return Job(inputs, options, asked.drawn_seed(), reply.on_tokens, reply.on_end)

    async def _cancel_if_gone(self, request: Request, job: Job) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._cancel(job)

    def _cancel(self, job: Job) -> None:
        if not job.is_cancelled:
            self._metrics.cancelled.inc()
            self.worker.cancel(job)

    async def _next(self, reply: "Reply", job: Job) -> str | Answer:
        """Wait for the next piece of text, or the whole answer. Raises HTTPException if there is none."""
        update = await reply.updates.get()
        if isinstance(update, str):
            return update
        if job.is_cancelled and not self.worker.is_closing:
            raise HTTPException(499, "the request was cancelled")
        if update is None and job.error is not None:
            raise HTTPException(500, said(job.error))
        if update is None:
            raise HTTPException(503, said(self.worker.error or "the server is ending"))
        if update.error is not None:
            raise HTTPException(400 if isinstance(update.error, KVCompressError) else 500, said(update.error))
        self._metrics.count(update, reply.first_at - reply.started)
        return update

    async def _events(
        self, update: str | Answer, reply: "Reply", job: Job, asked: Asked, head: dict[str, Any], watch: asyncio.Task
    ) -> AsyncIterator[str]:
        """Yield the events of a streamed answer, which begins with `update`."""

        def chunk(*choices: dict[str, Any], **more: Any) -> str:
            return event({**head, "object": "chat.completion.chunk", "choices": choices, **more})

        is_over = False
        try:
            yield chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            while isinstance(update, str):
                yield chunk({"index": 0, "delta": {"content": update}, "finish_reason": None})
                update = await self._next(reply, job)
            is_over = True
            yield chunk({"index": 0, "delta": {}, **self._end(reply, update, asked)})
            if asked.stream_options is not None and asked.stream_options.include_usage:
                yield chunk(usage=usage(update))
            yield "data: [DONE]\n\n"
        except HTTPException as error:  # too late for a status
            is_over = True
            yield event(error_body(error))
        finally:
            watch.cancel()
            if not is_over:
                self._cancel(job)

    def _end(self, reply: "Reply", answer: Answer, asked: Asked) -> dict[str, Any]:
        """Return the fields of a choice that say how the answer ended."""
        tokens = answer.tokens.tolist()
        is_whole = reply.text.is_stopped or tokens[-1] in self.prompts.ends
        ids = {"token_ids": tokens} if asked.return_token_ids else {}
        return {"finish_reason": "stop" if is_whole else "length", **ids}

    def _authorize(self, request: Request) -> None:
        if self.hosts and (name := request.url.hostname) not in self.hosts:
            raise HTTPException(403, f"this server has no name {name!r}, only {', '.join(self.hosts)}")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(
            key.strip().encode("latin-1"), (self.api_key or "").encode()
        )
        if self.api_key is not None and not is_right:
            message = "the API key is missing or wrong: Authorization: Bearer KEY"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


class Runner(uvicorn.Server):
    """Serves over HTTP. Asked to end, it gives the answers under way some seconds; then they end with an error."""

    def __init__(self, server: Server, seconds: float):
        # A client that does not even read the error is cut off.
        super().__init__(uvicorn.Config(server.app(), log_level="warning", timeout_graceful_shutdown=2 * seconds))
        self._worker, self._seconds = server.worker, seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(self._seconds, self._worker.close)
        await super().shutdown(sockets)
        ending.cancel()


class Reply:
    """An answer on its way from the worker's thread to the client.

    Attributes:
        updates: pieces of text; at the end the `Answer`, or None if there is none.
        started, first_at: times of the request and of its first token.
    """

    def __init__(self, text: AnswerText):
        self.updates: asyncio.Queue[str | Answer | None] = asyncio.Queue()
        self.text, self.started, self.first_at = text, time.perf_counter(), 0.0
        self._loop = asyncio.get_running_loop()

    def on_tokens(self, tokens: list[int]) -> bool:
        self.first_at = self.first_at or time.perf_counter()
        self._send(self.text.add(tokens))
        return self.text.is_stopped

    def on_end(self, answer: Answer | None) -> None:
        if answer is not None and answer.error is None:
            self._send(self.text.end(answer.tokens.tolist()))
        self._loop.call_soon_threadsafe(self.updates.put_nowait, answer)

    def _send(self, piece: str) -> None:
        if piece:
            self._loop.call_soon_threadsafe(self.updates.put_nowait, piece)


async def body_of(request: Request) -> bytes:
    """Read a request's body. Raises HTTPException if it is no JSON, too large, or broken off.

    A page of another origin can send a browser's JSON only if this server allowed it, and it does not."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be application/json")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_BODY:
                raise HTTPException(413, f"the body has more than {LARGEST_BODY} bytes")
    except ClientDisconnect:
        raise HTTPException(499, "the client left before the end of its body") from None
    return bytes(body)


def usage(answer: Answer) -> dict[str, int]:
    """Return the tokens of prompt and answer, and the entries that were kept of the prompt, a mean over layers and
    heads."""
    new = len(answer.tokens)
    counts = {"prompt_tokens": answer.tokens_in, "completion_tokens": new, "total_tokens": answer.tokens_in + new}
    return {**counts, "kept_entries": kept_entries(answer)}


def event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def said(error: object) -> str:
    return one_line(error, 500) or type(error).__name__


def error_body(error: HTTPException) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return {"error": {"message": said(error.detail), "type": kind, "code": error.status_code}}


async def refused(request: Request, error: HTTPException) -> Response:
    return JSONResponse(error_body(error), error.status_code, error.headers)
