"""The text of /metrics: router-side observations, and worker counters from heartbeats."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from triptych.errors import EngineError
from triptych.observe.metrics import Metrics
from triptych.types import (
    FinishReason,
    Load,
    Span,
    Stage,
    Timing,
    Usage,
    WeightsReport,
    WorkerAddress,
    WorkerInfo,
)


@dataclass
class Worker:
    info: WorkerInfo
    load: Load = field(default_factory=Load)
    counters: dict[str, float] = field(default_factory=dict)
    state: str = "live"


def worker(name: str, counters: dict[str, float] | None = None, load: Load | None = None) -> Worker:
    address = WorkerAddress(name, "e", "", "")
    weights = WeightsReport(2, 3, 20, 30, 0.5)
    return Worker(WorkerInfo(address, [Stage.ENCODE], "v", "demo", 10, weights, 1), load or Load(), counters or {})


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample by its name without the prefix and its label values."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found[(sample.name.removeprefix("triptych:"), *sample.labels.values())] = sample.value
    return found


def test_one_answered_request() -> None:
    metrics = Metrics()
    metrics.request_started()
    assert values(metrics)["num_requests_in_flight",] == 1
    path = [Span("fetch", 0, 0.1), Span("prefill_queue", 0.1, 0.2), Span("prefill", 0.3, 0.7)]
    timing = Timing(1.0, 3.0, path, [Span("encode", 0, 0.4)], [Span("kv_transfer", 1.0, 0.25)])
    metrics.first_token(1.0)
    metrics.inter_token(0.5)
    metrics.finished(Usage(100, 5, cached_tokens=40), FinishReason.STOP, timing)
    metrics.request_ended()
    found = values(metrics)
    assert found["num_requests_in_flight",] == 0
    assert found["time_to_first_token_seconds_sum",] == 1.0
    assert found["inter_token_latency_seconds_sum",] == 0.5
    assert found["request_time_per_output_token_seconds_sum",] == 0.5  # (3 - 1) / (5 - 1)
    assert found["e2e_request_latency_seconds_sum",] == 3.0
    assert found["request_queue_time_seconds_sum",] == 0.2
    assert found["request_prefill_time_seconds_sum",] == 0.7
    assert found["request_decode_time_seconds_sum",] == 2.0
    assert found["request_span_seconds_sum", "kv_transfer"] == 0.25
    assert found["item_span_seconds_sum", "encode"] == 0.4
    assert found["request_success_total", "stop"] == 1
    assert (found["prompt_tokens_total",], found["generation_tokens_total",]) == (100, 5)
    assert found["prompt_tokens_cached_total",] == 40
    assert found["request_prompt_tokens_bucket", "50.0"] == 0
    assert found["request_prompt_tokens_bucket", "100.0"] == 1


def test_one_token_has_no_time_per_token() -> None:
    metrics = Metrics()
    metrics.finished(Usage(1, 1), FinishReason.LENGTH, Timing(1, 1, [], [], []))
    assert values(metrics)["request_time_per_output_token_seconds_count",] == 0


def test_other_ends_and_encodes_avoided() -> None:
    metrics = Metrics()
    metrics.failed(EngineError("x"))
    metrics.cancelled()
    metrics.encode_avoided("prefix_cache", 3)
    metrics.encode_avoided("single_flight")
    found = values(metrics)
    assert found["request_failure_total", "EngineError"] == 1
    assert found["request_cancelled_total",] == 1
    assert found["encodes_avoided_total", "prefix_cache"] == 3
    assert found["encodes_avoided_total", "single_flight"] == 1
    assert found["encodes_avoided_total", "encoder_cache"] == 0


def test_workers_counters_follow_the_registry() -> None:
    metrics, workers = Metrics(), [worker("encode-0", {"encode_forwards_total": 4, "encoder_cache_embeds": 70})]
    metrics.watch(lambda: workers)
    assert values(metrics)["encode_forwards_total", "encode-0"] == 4
    workers.append(worker("encode-1", {"encode_forwards_total": 1}))
    found = values(metrics)
    assert (found["encode_forwards_total", "encode-1"], found["encoder_cache_embeds", "encode-0"]) == (1, 70)
    text = metrics.render().decode()
    assert "# TYPE triptych:encode_forwards_total counter" in text
    assert "# HELP triptych:encode_forwards_total Forwards of the vision tower" in text
    assert "# TYPE triptych:encoder_cache_embeds gauge" in text
    workers.clear()
    assert ("encode_forwards_total", "encode-0") not in values(metrics)


def test_loads_and_weights() -> None:
    metrics = Metrics()
    load = Load(num_running=2, num_waiting=3, num_free_blocks=1, num_total_blocks=4)
    metrics.watch(lambda: [worker("p", load=load)])
    found = values(metrics)
    assert (found["num_requests_running", "p"], found["num_requests_waiting", "p"]) == (2, 3)
    assert found["kv_cache_usage_perc", "p"] == 0.75
    assert (found["weights_shards_read", "p"], found["weights_bytes_read", "p"]) == (2, 20)
    assert found["weights_load_seconds", "p"] == 0.5


def test_a_worker_cannot_break_the_page() -> None:
    """Names that are the router's own, or no names at all, are left out."""
    metrics = Metrics()
    odd = {"prompt_tokens_total": 1.0, "no name": 2.0, "x\n": 3.0, "": 4.0, "good_total": 5.0}
    odd |= {"num_requests_running": 6.0, "weights_bytes_read": 7.0}
    metrics.watch(lambda: [worker("p", odd)])
    found = values(metrics)
    assert found["good_total", "p"] == 5
    assert found["prompt_tokens_total",] == 0
    assert (found["num_requests_running", "p"], found["weights_bytes_read", "p"]) == (0, 20)
    text = metrics.render().decode()
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
