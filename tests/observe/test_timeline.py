"""The arithmetic of a request's timeline, by hand, and its drawing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.messages import DecodeTiming, PrefillTiming
from triptych.observe.timeline import ItemMark, Marks, build_timing
from triptych.observe.trace import draw
from triptych.types import Span, Timing

A, B = "a" * 64, "b" * 64


def item(mm_hash: str = A, *, cached: bool = False, **times: float) -> ItemMark:
    numbers = {"queue_s": 0.1, "encode_s": 0.3, "transfer_s": 0.05, "demanded_s": 0.2, "held_s": 0.7} | times
    return ItemMark(mm_hash=mm_hash, worker="encode-0", cached=cached, **numbers)


def marks(prefill: PrefillTiming, *items: ItemMark, decode: DecodeTiming | None = None) -> Marks:
    return Marks(
        fetch_start_s=0.0, fetch_s=0.1, plan_start_s=0.1, plan_s=0.1, first_token_s=1.0, finished_s=2.0,
        prefill=prefill, prefill_worker="prefill-0", items=items, decode=decode, decode_worker="decode-0",
        decode_start_s=0.25,
    )  # fmt: skip


def durations(spans: list[Span]) -> dict[str, float]:
    return {span.name: round(span.duration_s, 9) for span in spans}


def test_text_only() -> None:
    timing = build_timing(marks(PrefillTiming(0.2, 0.0, 0.6)))
    assert [span.name for span in timing.critical_path] == ["fetch", "plan", "prefill_queue", "prefill"]
    assert [span.start_s for span in timing.critical_path] == [0.0, 0.1, 0.2, pytest.approx(0.4)]
    assert sum(span.duration_s for span in timing.critical_path) == pytest.approx(timing.ttft_s)
    assert (timing.ttft_s, timing.e2e_s, timing.items, timing.after_first_token) == (1.0, 2.0, [], [])


def test_the_wait_is_split_backwards_from_the_blocking_item() -> None:
    # 0.5 s of wait: the last 0.05 s are the transfer, the 0.3 s before it the forward, the rest the queue.
    timing = build_timing(marks(PrefillTiming(0.1, 0.5, 0.2, blocking_item=A), item(B, encode_s=9.0), item(A)))
    assert durations(timing.critical_path) == {
        "fetch": 0.1, "plan": 0.1, "prefill_queue": 0.1, "encode_queue": 0.15, "encode": 0.3, "embed_transfer": 0.05,
        "prefill": 0.2,
    }  # fmt: skip
    assert sum(span.duration_s for span in timing.critical_path) == pytest.approx(timing.ttft_s)
    assert timing.critical_path[4].detail == f"encode-0 {A[:8]}"


@pytest.mark.parametrize(
    ("wait_s", "expected"),
    [
        (0.03, {"embed_transfer": 0.03}),
        (0.15, {"encode": 0.1, "embed_transfer": 0.05}),
        (0.0, {}),
    ],
)
def test_a_short_wait_saw_only_the_end_of_the_items_way(wait_s: float, expected: dict[str, float]) -> None:
    timing = build_timing(marks(PrefillTiming(0.1, wait_s, 0.2, blocking_item=A), item(A)))
    found = durations(timing.critical_path)
    assert {name: found[name] for name in found if name.startswith("e")} == expected


def test_a_wait_for_an_item_that_nobody_marked_is_queueing() -> None:
    timing = build_timing(marks(PrefillTiming(0.1, 0.5, 0.2, blocking_item="c"), item(A)))
    assert durations(timing.critical_path)["encode_queue"] == 0.5


def test_an_items_own_spans() -> None:
    timing = build_timing(marks(PrefillTiming(0, 0, 0.8), item(A), item(B, cached=True, encode_s=0.0, queue_s=0.0)))
    assert [(span.name, round(span.start_s, 9), span.duration_s, span.detail) for span in timing.items] == [
        ("encode_queue", 0.2, 0.1, "encode-0 aaaaaaaa"),
        ("encode", 0.3, 0.3, "encode-0 aaaaaaaa"),
        ("embed_transfer", 0.65, 0.05, "encode-0 aaaaaaaa"),
        ("embed_transfer", 0.65, 0.05, "encode-0 bbbbbbbb cached"),
    ]


def test_the_hand_off_counts_from_the_first_token_on() -> None:
    # Decode was sent at 0.25 s, its KV was complete 0.85 s later, at 1.1 s; the first token came at 1.0 s.
    timing = build_timing(marks(PrefillTiming(0, 0, 0.8), decode=DecodeTiming(kv_transfer_s=0.85, queue_s=0.02)))
    kv_transfer, queue = timing.after_first_token
    assert (kv_transfer.name, kv_transfer.start_s) == ("kv_transfer", 1.0)
    assert (queue.name, queue.duration_s) == ("decode_queue", 0.02)
    assert [kv_transfer.duration_s, queue.start_s] == pytest.approx([0.1, 1.1])
    assert queue.detail == "decode-0"


def test_kv_that_was_there_before_the_first_token() -> None:
    timing = build_timing(marks(PrefillTiming(0, 0, 0.8), decode=DecodeTiming(kv_transfer_s=0.3, queue_s=0.02)))
    assert durations(timing.after_first_token) == {"kv_transfer": 0.0, "decode_queue": 0.02}


seconds = st.floats(0, 10)


@given(seconds, seconds, seconds, seconds, seconds, seconds, seconds, seconds)
def test_the_path_always_sums_to_the_parts_and_never_goes_backwards(
    fetch: float,
    plan: float,
    queue: float,
    wait: float,
    prefill: float,
    in_queue: float,
    encode: float,
    transfer: float,
) -> None:
    mark = item(A, queue_s=in_queue, encode_s=encode, transfer_s=transfer)
    total = fetch + plan + queue + wait + prefill
    timing = build_timing(
        Marks(
            fetch_s=fetch, plan_start_s=fetch, plan_s=plan, first_token_s=total, finished_s=total,
            prefill=PrefillTiming(queue, wait, prefill, blocking_item=A), items=(mark,),
        )
    )  # fmt: skip
    assert sum(span.duration_s for span in timing.critical_path) == pytest.approx(timing.ttft_s)
    assert all(span.duration_s > 0 for span in timing.critical_path)
    starts = [span.start_s for span in timing.critical_path]
    assert starts == sorted(starts)


def test_drawing() -> None:
    path = [Span("fetch", 0.0, 0.25, "r"), Span("prefill", 0.25, 0.75, "prefill-0")]
    text = draw(Timing(1.0, 1.5, path, [], [Span("decode_queue", 1.0, 0.0)]), width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("first token after 1000.0 ms, all after 1500.0 ms")
    assert (lines[1], lines[4]) == ("critical path", "after the first token")
    bars = [line.split("|")[1] for line in (lines[2], lines[3], lines[5])]
    assert abs(bars[0].count("█") * 3 - bars[1].count("█")) <= 3
    assert bars[1].endswith("█")
    assert bars[2].count("█") == 1  # what is too short for the scale still shows
    assert lines[3].rstrip().endswith("+  250.0 ms   750.0 ms  prefill-0")


def test_drawing_of_nothing() -> None:
    assert "first token" in draw(Timing(0.0, 0.0, [Span("plan", 0.0, 0.0)], [], []))
