"""What `/metrics` reports, in Prometheus's format."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..inflight import Answer
from .worker import Worker

if TYPE_CHECKING:
    from .paged_worker import PagedWorker

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one server."""

    def __init__(self, worker: "Worker | PagedWorker"):
        self._registry = CollectorRegistry()
        own = {"registry": self._registry}
        self.requests = Counter("kvcompress_requests", "Requests for completions, by HTTP status", ["status"], **own)
        self.cancelled = Counter("kvcompress_cancelled_requests", "Requests whose client went away", **own)
        self.prompt_tokens = Counter("kvcompress_prompt_tokens", "Tokens of answered prompts", **own)
        self.kept_entries = Counter("kvcompress_kept_entries", "Entries kept of them, per layer and KV head", **own)
        self.new_tokens = Counter("kvcompress_completion_tokens", "Tokens of answers", **own)
        self.ttft = Histogram("kvcompress_ttft_seconds", "From a request to its first token", buckets=SECONDS, **own)
        self.tpot = Histogram("kvcompress_tpot_seconds", "Per further token", buckets=SECONDS, **own)
        for name, told, read in (
            ("running", "Requests that are prefilled or decoded", lambda: worker.running),
            ("waiting", "Requests that wait for a slot or pages", lambda: worker.waiting),
            ("kv_bytes", "Bytes of all slots or pages", lambda: worker.kv_bytes),
        ):
            Gauge(f"kvcompress_{name}", told, **own).set_function(read)

    def count(self, answer: Answer, ttft_s: float) -> None:
        """Count an answer; `ttft_s` includes the wait for a slot."""
        self.prompt_tokens.inc(answer.tokens_in)
        self.kept_entries.inc(kept_entries(answer))
        self.new_tokens.inc(len(answer.tokens))
        self.ttft.observe(ttft_s)
        if answer.tpot_s is not None:
            self.tpot.observe(answer.tpot_s)

    def page(self) -> bytes:
        return generate_latest(self._registry)


def kept_entries(answer: Answer) -> int:
    """Return the entries kept of the prompt, a mean over layers and KV heads."""
    ratios = answer.realised_ratios
    return round(answer.tokens_in * sum(ratios) / len(ratios))
