"""Every formula against numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.bench.metrics import (
    DEFINITIONS,
    LIMITS,
    RequestRecord,
    Summary,
    check_limits,
    distribution,
    e2e_s,
    itl_s,
    median,
    meets,
    percentile,
    summarize,
    tpot_s,
    ttft_s,
)
from triptych.errors import ConfigError


def record(**fields: Any) -> RequestRecord:
    """Sent at 1 s; tokens at 1.5, 1.6, 1.8; over at 2.1; three output tokens."""
    base: dict[str, Any] = {"index": 0, "kind": "images", "num_images": 2, "asked_output_tokens": 3}
    base |= {"due_s": 1.0, "sent_s": 1.0, "chunk_s": [1.5, 1.6, 1.8], "end_s": 2.1}
    base |= {"num_prompt_tokens": 100, "num_output_tokens": 3}
    return RequestRecord(**(base | fields))


def test_latencies_of_one_request() -> None:
    one = record()
    assert ttft_s(one) == pytest.approx(0.5)
    assert e2e_s(one) == pytest.approx(1.1)
    assert tpot_s(one) == pytest.approx(0.3)  # (1.1 - 0.5) / 2
    assert itl_s(one) == pytest.approx([0.1, 0.2])


def test_time_per_output_token_counts_tokens_and_not_chunks() -> None:
    assert tpot_s(record(num_output_tokens=7)) == pytest.approx(0.1)  # (1.1 - 0.5) / 6
    assert tpot_s(record(num_output_tokens=1)) is None


def test_percentiles_interpolate() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([0, 10], 90) == 9
    assert percentile([1, 2, 3, 4, 5], 25) == 2
    assert percentile([7], 99) == 7
    assert median([1, 9, 2]) == 2


def test_a_distribution_is_of_what_is_defined() -> None:
    spread = distribution([None, 1.0, 3.0])
    assert spread is not None
    assert (spread.num, spread.mean, spread.p50, spread.max) == (2, 2.0, 2.0, 3.0)
    assert spread.p90 == pytest.approx(2.8)
    assert spread.p99 == pytest.approx(2.98)
    assert distribution([None]) is None


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({"ttft": 0.5}, True),
        ({"ttft": 0.49}, False),
        ({"tpot": 0.31, "e2e": 1.2, "itl": 0.21}, True),
        ({"tpot": 0.29}, False),
        ({"e2e": 1.0}, False),
        ({"itl": 0.19}, False),
    ],
)
def test_a_request_meets_all_limits_or_is_not_good(limits: dict[str, float], met: bool) -> None:
    assert meets(record(sent_s=1.0, chunk_s=[1.5, 1.6, 1.8]), limits) is met


def test_what_is_undefined_for_a_request_is_met() -> None:
    assert meets(record(num_output_tokens=1, chunk_s=[1.5]), {"tpot": 0.001, "itl": 0.001})


def test_unknown_limits_are_refused() -> None:
    check_limits(dict.fromkeys(LIMITS, 1.0))
    with pytest.raises(ConfigError, match="tftt"):
        check_limits({"tftt": 1.0})
    with pytest.raises(ConfigError, match="ttft is 0"):
        check_limits({"ttft": 0})


def test_a_round() -> None:
    """Two that completed and two that failed, from 1 s to 5 s on two devices, for 6 CPU seconds."""
    records = [
        record(),
        record(index=1, kind="text", num_images=0, sent_s=2.0, due_s=1.75, chunk_s=[4.0, 4.5], end_s=5.0),
        record(index=2, failure="cut", end_s=3.0, num_output_tokens=2),
        record(index=3, failure="http_503", chunk_s=[], end_s=1.2),
    ]
    found = summarize(records, num_devices=2, limits={"ttft": 1.0}, cpu_s=6.0)
    assert found.duration_s == 4.0
    assert (found.num_completed, found.num_failed) == (2, 2)
    assert found.failures == {"cut": 1, "http_503": 1}
    assert found.refusal_s is not None
    assert found.refusal_s.num == 1
    assert found.refusal_s.max == pytest.approx(0.2)
    assert (found.num_images, found.num_prompt_tokens, found.num_output_tokens) == (2, 200, 6)
    assert found.tokens_per_chunk == 6 / 5
    assert found.ttft_s is not None
    assert (found.ttft_s.num, found.ttft_s.p50, found.ttft_s.max) == (2, 1.25, 2.0)
    assert found.itl_s is not None
    assert found.itl_s.num == 3  # 0.1 and 0.2 of one request, 0.5 of the other
    assert found.itl_s.p50 == pytest.approx(0.2)
    assert {kind: spread.p50 for kind, spread in found.ttft_s_by_kind.items()} == {"images": 0.5, "text": 2.0}
    assert found.requests_per_s == 0.5
    assert found.output_tokens_per_s_per_device == 6 / 4 / 2
    assert found.tokens_per_s_per_device == 206 / 4 / 2
    assert found.images_per_s_per_device == 2 / 4 / 2
    assert found.goodput_per_s == 0.25  # one request in four seconds
    assert found.cpu_s_per_request == 3.0
    assert found.cores_busy == 1.5
    assert found.late_s == 0.25


def test_a_round_of_failures_has_no_latencies() -> None:
    found = summarize([record(failure="connect", chunk_s=[])], 1, {}, None)
    assert (found.num_completed, found.ttft_s, found.tpot_s, found.tokens_per_chunk) == (0, None, None, None)
    assert (found.goodput_per_s, found.cpu_s_per_request, found.cores_busy) == (None, None, None)


def test_every_measure_of_a_round_is_defined() -> None:
    parts = ("_per_device", "_by_kind")
    counts = {"num_devices", "num_completed", "num_failed", "failures", "tokens_per_chunk", "late_s", "requests_per_s"}
    for name in Summary.__struct_fields__:
        known = name in DEFINITIONS or name.removesuffix(parts[1]) in DEFINITIONS
        assert known or name in counts or name.startswith("num_"), name
