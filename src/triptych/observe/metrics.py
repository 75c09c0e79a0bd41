"""Prometheus metrics of the router process, in vLLM's words with the prefix `triptych:`.

What the router sees of requests is observed by the methods; what workers count arrives with their heartbeats and is
exported by `WorkerCollector` with the label `worker`. `/metrics` in `api/app.py` renders both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from triptych.observe.worker_metrics import PREFIX, WorkerCollector, WorkerView
from triptych.types import FinishReason, Timing, Usage

__all__ = ["CONTENT_TYPE", "Metrics", "WorkerView"]

AVOIDED = ("prefix_cache", "embedding_cache", "encoder_cache", "single_flight")
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
SPANS = (
    "fetch", "plan", "encode_queue", "encode", "embed_transfer", "prefill_queue", "prefill", "kv_transfer",
    "decode_queue",
)  # fmt: skip


class Metrics:
    """One a router process, with a registry of its own, so that tests can have many."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._latencies()
        self._sizes()
        self._outcomes()

    def watch(self, workers: Callable[[], Sequence[WorkerView]]) -> None:
        """From now on each scrape also reads these workers; called once, with `registry.workers`."""
        own = [family.name for family in self._registry.collect()]
        self._registry.register(WorkerCollector(workers, own))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    # -- called by the router, in the order of a request ---------------------------------------------------------------

    def request_started(self) -> None:
        self._in_flight.inc()

    def request_ended(self) -> None:
        """However it ended."""
        self._in_flight.dec()

    def encode_avoided(self, reason: str, n: int = 1) -> None:
        self._avoided.labels(reason).inc(n)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def inter_token(self, gap_s: float) -> None:
        self._itl.observe(gap_s)

    def finished(self, usage: Usage, reason: FinishReason, timing: Timing, num_choices: int = 1) -> None:
        """`reason` is that of the first choice."""
        self._success.labels(reason.value).inc()
        self._prompt_tokens_total.inc(usage.prompt_tokens)
        self._cached_tokens_total.inc(usage.cached_tokens)
        self._generation_tokens_total.inc(usage.completion_tokens)
        self._prompt_tokens.observe(usage.prompt_tokens)
        self._generation_tokens.observe(usage.completion_tokens)
        self._e2e.observe(timing.e2e_s)
        decode_s = timing.e2e_s - timing.ttft_s
        self._decode.observe(decode_s)
        if usage.completion_tokens > num_choices:
            self._tpot.observe(decode_s / (usage.completion_tokens / num_choices - 1))
        path = {span.name: span.duration_s for span in timing.critical_path}
        self._queue.observe(path.get("prefill_queue", 0.0))
        self._prefill.observe(path.get("prefill", 0.0))
        for span in (*timing.critical_path, *timing.after_first_token):
            self._spans.labels(span.name).observe(span.duration_s)
        for span in timing.items:
            self._item_spans.labels(span.name).observe(span.duration_s)

    def failed(self, error: BaseException) -> None:
        self._failures.labels(type(error).__name__).inc()

    def cancelled(self) -> None:
        self._cancelled.inc()

    # -- the families --------------------------------------------------------------------------------------------------

    def _latencies(self) -> None:
        self._ttft = self._seconds("time_to_first_token_seconds", "Arrival to first token")
        self._itl = self._seconds("inter_token_latency_seconds", "Gap between two tokens of a request")
        self._tpot = self._seconds("request_time_per_output_token_seconds", "Mean gap between a request's tokens")
        self._e2e = self._seconds("e2e_request_latency_seconds", "Arrival to last token")
        self._queue = self._seconds("request_queue_time_seconds", "Waiting for a place in a prefill step")
        self._prefill = self._seconds("request_prefill_time_seconds", "Computing the prompt")
        self._decode = self._seconds("request_decode_time_seconds", "First token to last")
        self._spans = self._seconds("request_span_seconds", "Part of the critical path of a request", "span")
        self._item_spans = self._seconds("item_span_seconds", "Part of a needed media item's way", "span")
        for span in SPANS:
            self._spans.labels(span)
        for span in ("encode_queue", "encode", "embed_transfer"):
            self._item_spans.labels(span)

    def _sizes(self) -> None:
        self._prompt_tokens = self._tokens("request_prompt_tokens", "Prompt tokens of a request")
        self._generation_tokens = self._tokens("request_generation_tokens", "Tokens produced for a request")
        self._prompt_tokens_total = self._counter("prompt_tokens", "Prompt tokens of answered requests")
        self._cached_tokens_total = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was cached")
        self._generation_tokens_total = self._counter("generation_tokens", "Tokens produced")

    def _outcomes(self) -> None:
        self._in_flight = Gauge(PREFIX + "num_requests_in_flight", "Requests admitted", registry=self._registry)
        self._success = self._counter("request_success", "Requests answered", "finished_reason")
        self._failures = self._counter("request_failure", "Requests that ended with an error", "error")
        self._cancelled = self._counter("request_cancelled", "Requests whose client went away")
        self._avoided = self._counter("encodes_avoided", "Items that needed no forward of their own", "reason")
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._success.labels(reason.value)
        for why in AVOIDED:
            self._avoided.labels(why)

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, registry=self._registry, buckets=SECONDS)

    def _tokens(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self._registry, buckets=TOKENS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)
