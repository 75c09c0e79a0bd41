"""Every formula of the benchmark, over what the client saw of each request. Pure; called by `compare.py`.

All times are seconds of the client's one monotonic clock. A request that failed gives no latency and no tokens; it is
counted, by reason, and its CPU is in `cpu_s_per_request`, which divides by the completed requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from triptych.errors import ConfigError

DEFINITIONS: dict[str, str] = {
    "ttft_s": "arrival of the first chunk that carries a token, minus the write of the request's first byte; a chunk "
    "carries one if it has text or token ids; where none has, the one with the finish reason does",
    "e2e_s": "end of the stream minus the write of the request's first byte",
    "tpot_s": "(e2e - ttft) / (output tokens - 1); undefined for fewer than two output tokens",
    "itl_s": "gaps between chunks that carry tokens, all requests pooled; tokens of one chunk have no gap of their own",
    "percentile": "linear interpolation between the two nearest ranks, as numpy's default",
    "refusal_s": "end of an answer with status 429 or 503 minus the write of the request's first byte",
    "completed": "ended in order, with the number of output tokens that was asked for; all else is failed, by reason",
    "duration_s": "first write of the round to the last end of a stream",
    "output_tokens_per_s_per_device": "output tokens of completed requests / duration / devices",
    "tokens_per_s_per_device": "prompt and output tokens of completed requests / duration / devices",
    "images_per_s_per_device": "images of completed requests / duration / devices",
    "device": "a core that the system may use, whatever it does on it",
    "goodput_per_s": "completed requests that meet every limit / duration; limits: ttft, tpot, e2e, itl (longest gap)",
    "cpu_s_per_request": "user and system CPU of all processes of the system during the round / completed requests",
    "cores_busy": "user and system CPU of all processes of the system / duration",
    "idle_cores_busy": "the same while no request is in flight",
    "peak_rss_bytes": "sum over processes of the peak resident size; memory that they share counts for each",
    "ready_s": "start of the process to the first 200 of the ready path",
    "first_answer_s": "start of the process to the end of its first one-token answer, asked for from ready on",
}


REFUSALS = ("http_429", "http_503")


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the client saw of one request. Times are from the start of the round."""

    index: int
    kind: str  # of the workload's kinds: text, images or large
    num_images: int
    asked_output_tokens: int
    due_s: float  # when the schedule wanted it sent; sent_s minus this is the client's own delay
    sent_s: float
    chunk_s: list[float]  # arrival of each chunk that carries a token
    end_s: float
    num_prompt_tokens: int = 0  # from the server's usage, as the next two
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    failure: str = ""  # reason, one word; empty: completed
    detail: str = ""  # what the server or the socket said about the failure


class Distribution(msgspec.Struct, frozen=True):
    """Seconds."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one system under one load. None: undefined, or not measured."""

    duration_s: float
    num_devices: int
    num_completed: int
    num_failed: int
    failures: dict[str, int]  # by reason
    num_images: int  # of completed requests, as the next three
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens_per_chunk: float | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    refusal_s: Distribution | None = None  # files that are older than it have none
    ttft_s_by_kind: dict[str, Distribution]
    e2e_s_by_kind: dict[str, Distribution]
    late_s: float  # the client's worst delay behind its schedule
    requests_per_s: float
    output_tokens_per_s_per_device: float
    tokens_per_s_per_device: float
    images_per_s_per_device: float
    goodput_per_s: float | None
    cpu_s_per_request: float | None
    cores_busy: float | None


def ttft_s(record: RequestRecord) -> float:
    return record.chunk_s[0] - record.sent_s


def e2e_s(record: RequestRecord) -> float:
    return record.end_s - record.sent_s


def tpot_s(record: RequestRecord) -> float | None:
    if record.num_output_tokens < 2:
        return None
    return (e2e_s(record) - ttft_s(record)) / (record.num_output_tokens - 1)


def itl_s(record: RequestRecord) -> list[float]:
    return [later - earlier for earlier, later in zip(record.chunk_s, record.chunk_s[1:], strict=False)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one value."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Of the values that are defined; None when there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = (percentile(known, percent) for percent in (50, 90, 99))
    return Distribution(len(known), sum(known) / len(known), p50, p90, p99, max(known))


LIMITS = ("ttft", "tpot", "e2e", "itl")


def check_limits(limits: Mapping[str, float]) -> None:
    """Raises ConfigError for a limit that nothing measures."""
    for name, limit_s in limits.items():
        if name not in LIMITS:
            raise ConfigError(f"slo: unknown limit {name!r}; known are {', '.join(LIMITS)}")
        if not limit_s > 0:
            raise ConfigError(f"slo: {name} is {limit_s}, not a positive number of seconds")


def meets(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether a completed request is within every limit (seconds). What is undefined for it is met."""
    found = {
        "ttft": ttft_s(record),
        "tpot": tpot_s(record) or 0.0,
        "e2e": e2e_s(record),
        "itl": max(itl_s(record), default=0.0),
    }
    return all(found[name] <= limit_s for name, limit_s in limits.items())


def duration_s(records: Sequence[RequestRecord]) -> float:
    return max(record.end_s for record in records) - min(record.sent_s for record in records)


def summarize(
    records: Sequence[RequestRecord], num_devices: int, limits: Mapping[str, float], cpu_s: float | None
) -> Summary:
    """`records` are all requests of the round, at least one; `cpu_s` is what the system's processes spent meanwhile."""
    done = [record for record in records if not record.failure]
    length_s = duration_s(records)
    num_output = sum(record.num_output_tokens for record in done)
    num_prompt = sum(record.num_prompt_tokens for record in done)
    num_images = sum(record.num_images for record in done)
    num_chunks = sum(len(record.chunk_s) for record in done)
    kinds = {kind: [record for record in done if record.kind == kind] for kind in sorted({r.kind for r in done})}

    def rate(amount: float) -> float:
        return amount / length_s if length_s > 0 else 0.0

    return Summary(
        duration_s=length_s,
        num_devices=num_devices,
        num_completed=len(done),
        num_failed=len(records) - len(done),
        failures=dict(Counter(record.failure for record in records if record.failure)),
        num_images=num_images,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(record.num_cached_tokens for record in done),
        num_output_tokens=num_output,
        tokens_per_chunk=num_output / num_chunks if num_chunks else None,
        ttft_s=distribution(map(ttft_s, done)),
        tpot_s=distribution(map(tpot_s, done)),
        itl_s=distribution(gap for record in done for gap in itl_s(record)),
        e2e_s=distribution(map(e2e_s, done)),
        refusal_s=distribution(e2e_s(record) for record in records if record.failure in REFUSALS),
        ttft_s_by_kind={kind: spread for kind, of in kinds.items() if (spread := distribution(map(ttft_s, of)))},
        e2e_s_by_kind={kind: spread for kind, of in kinds.items() if (spread := distribution(map(e2e_s, of)))},
        late_s=max(record.sent_s - record.due_s for record in records),
        requests_per_s=rate(len(done)),
        output_tokens_per_s_per_device=rate(num_output) / num_devices,
        tokens_per_s_per_device=rate(num_prompt + num_output) / num_devices,
        images_per_s_per_device=rate(num_images) / num_devices,
        goodput_per_s=rate(sum(meets(record, limits) for record in done)) if limits else None,
        cpu_s_per_request=cpu_s / len(done) if cpu_s is not None and done else None,
        cores_busy=rate(cpu_s) if cpu_s is not None else None,
    )
