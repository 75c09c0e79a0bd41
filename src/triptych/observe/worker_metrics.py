"""The workers' own counters and loads as Prometheus families, read from the registry at each scrape.

Runs in the router process as a custom collector of `observe/metrics.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.types import Load, WorkerInfo

PREFIX = "triptych:"
NAME = re.compile(r"[a-z][a-z0-9_]*")

HELP = {
    "encode_forwards_total": "Forwards of the vision tower",
    "encode_items_total": "Media items encoded by a forward",
    "encode_embeds_total": "Embeds that forwards returned",
    "encode_time_seconds_total": "Time in forwards of the vision tower",
    "encode_queue_time_seconds_total": "Time of demanded items before their forward",
    "encode_failures_total": "Items that could not be encoded",
    "encoder_cache_hits_total": "Demanded items found in the encoder cache",
    "encoder_cache_misses_total": "Demanded items not in the encoder cache",
    "encoder_cache_evictions_total": "Entries evicted from the encoder cache",
    "encoder_cache_embeds": "Embeds in the encoder cache",
    "embed_transfer_items_total": "Embeddings fetched from encode workers",
    "embed_transfer_bytes_total": "Bytes of embeddings fetched",
    "embed_transfer_time_seconds_total": "Time to fetch embeddings",
    "embed_transfer_failures_total": "Fetches of embeddings that failed",
    "kv_transfer_blocks_total": "KV blocks fetched by a decode worker",
    "kv_transfer_bytes_total": "Bytes of KV fetched by a decode worker",
    "kv_transfer_time_seconds_total": "Time to fetch KV blocks",
    "kv_transfer_failures_total": "Fetches of KV blocks that failed",
    "kv_transfer_blocks_sent_total": "KV blocks published by a prefill worker",
    "kv_transfer_bytes_sent_total": "Bytes of KV published by a prefill worker",
    "kv_transfer_blocks_avoided_total": "KV blocks that the decode worker had already",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache",
    "kv_cache_evictions_total": "KV blocks evicted from the prefix cache",
    "num_preemptions_total": "Requests preempted for want of KV blocks",
    "prompt_tokens_computed_total": "Prompt tokens computed by forwards",
    "engine_steps_total": "Steps of the engine",
    "engine_step_time_seconds_total": "Time in steps of the engine",
    "leases_expired_total": "Leases that ran out before their consumer released them",
    "tcp_fetches_total": "Fetches over TCP, of embeddings and KV, that came to an end",
    "tcp_fetch_failures_total": "Fetches over TCP that failed or were given up",
    "tcp_fetched_bytes_total": "Bytes fetched over TCP",
    "tcp_sent_bytes_total": "Bytes that other workers fetched from this one over TCP",
}


class WorkerView(Protocol):
    """What is read of a registered worker; `router.registry.RegisteredWorker` satisfies it."""

    @property
    def info(self) -> WorkerInfo: ...

    @property
    def load(self) -> Load: ...

    @property
    def counters(self) -> dict[str, float]: ...

    @property
    def state(self) -> str: ...  # live, draining or suspect


class WorkerCollector(Collector):
    """`taken` are the family names of the router's own metrics, which a worker's counter cannot use again."""

    def __init__(self, workers: Callable[[], Sequence[WorkerView]], taken: Iterable[str]) -> None:
        self._workers = workers
        self._taken = frozenset(taken)

    def describe(self) -> list[Metric]:
        return []  # what workers count is not known before they register

    def collect(self) -> Iterator[Metric]:
        workers = list(self._workers())
        ours = [*_load_gauges(workers), *_weights(workers)]
        yield from ours
        taken = self._taken | {family.name for family in ours}
        names = {name for worker in workers for name in worker.counters if NAME.fullmatch(name)}
        for name in sorted(names):
            if PREFIX + name.removesuffix("_total") not in taken:
                yield _family(name, [(w.info.address.name, w.counters[name]) for w in workers if name in w.counters])


def _family(name: str, values: Iterable[tuple[str, float]]) -> Metric:
    """A counter when the name ends in _total, else a gauge; one sample a worker."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(PREFIX + name, HELP.get(name, name.replace("_", " ")), labels=["worker"])
    for worker, value in values:
        family.add_metric([worker], value)
    return family


def _load_gauges(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    """The loads under vLLM's names where it has one."""
    words: list[tuple[str, str, Callable[[Load], float]]] = [
        ("num_requests_running", "Requests that run", lambda load: load.num_running),
        ("num_requests_waiting", "Requests that wait", lambda load: load.num_waiting),
        ("num_waiting_tokens", "Prompt tokens not yet computed", lambda load: load.num_waiting_tokens),
        ("num_waiting_embeds", "Embeds demanded and not yet encoded", lambda load: load.num_waiting_embeds),
        ("embedding_cache_embeds", "Embeds cached on the worker", lambda load: load.cached_embeds),
        ("num_leases", "Leases held for consumers", lambda load: load.num_leases),
        ("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all", _kv_usage),
    ]
    for name, text, read in words:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["worker"])
        for worker in workers:
            family.add_metric([worker.info.address.name], read(worker.load))
        yield family


def _kv_usage(load: Load) -> float:
    return 1 - load.num_free_blocks / load.num_total_blocks if load.num_total_blocks else 0.0


def _weights(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    """What each worker read of the checkpoint when it started."""
    for name, text in (
        ("weights_shards_read", "Checkpoint shards that the worker read"),
        ("weights_bytes_read", "Checkpoint bytes that the worker read"),
        ("weights_load_seconds", "Time to read the weights"),
    ):
        family = GaugeMetricFamily(PREFIX + name, text, labels=["worker"])
        for worker in workers:
            weights = worker.info.weights
            value = {"shards": weights.shards_read, "bytes": weights.bytes_read, "load": weights.load_s}
            family.add_metric([worker.info.address.name], value[name.split("_")[1]])
        yield family
