"""Where one request's time went: from the router's marks and the workers' own durations to a `types.Timing`. Pure.

Called by `router/router.py` at the end of each request. Instants are of the router's clock, in seconds since the
request's arrival; durations of a worker are of that worker's clock, and only ever used as durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.messages import DecodeTiming, PrefillTiming
from triptych.types import Span, Timing

HASH_DIGITS = 8  # of an mm_hash in a span's detail


@dataclass(frozen=True)
class ItemMark:
    """One needed media item's way from demand to the prefill worker's memory."""

    mm_hash: str
    worker: str  # that published it
    queue_s: float  # from demand to the start of its forward
    encode_s: float
    transfer_s: float  # on the consumer's clock
    cached: bool  # no forward ran for this request
    demanded_s: float  # instant: the router asked for it
    held_s: float  # instant: the router heard that the consumer holds it


@dataclass(frozen=True)
class Marks:
    """What the router noted of one request. The attempt that was answered counts."""

    first_token_s: float
    finished_s: float
    fetch_start_s: float = 0.0
    fetch_s: float = 0.0
    plan_start_s: float = 0.0
    plan_s: float = 0.0  # until the submit to the prefill worker
    prefill: PrefillTiming | None = None
    prefill_worker: str = ""
    items: tuple[ItemMark, ...] = ()
    decode: DecodeTiming | None = None  # None: the prefill worker went on itself
    decode_worker: str = ""
    decode_start_s: float = 0.0  # instant: `Decode` was sent


def build_timing(marks: Marks) -> Timing:
    return Timing(
        ttft_s=marks.first_token_s,
        e2e_s=marks.finished_s,
        critical_path=_critical_path(marks),
        items=[span for item in marks.items for span in _item_spans(item)],
        after_first_token=_after_first_token(marks),
    )


def _critical_path(marks: Marks) -> list[Span]:
    """fetch, plan, then the prefill worker's split of the time from submit to first token, laid end to end.

    Its chunks and waits really alternate; the spans show their sums, in the order in which each began. What the router
    waited beyond the worker's own account counts as prefill_queue: the submit lay in the mailbox of a busy worker.
    """
    path = [
        Span("fetch", marks.fetch_start_s, marks.fetch_s),
        Span("plan", marks.plan_start_s, marks.plan_s),
    ]
    if marks.prefill is not None:
        worker, submitted_s = marks.prefill_worker, marks.plan_start_s + marks.plan_s
        worked_s = marks.prefill.embed_wait_s + marks.prefill.prefill_s
        parts = [
            ("prefill_queue", max(marks.prefill.queue_s, marks.first_token_s - submitted_s - worked_s), worker),
            *_split_wait(marks.prefill, marks.items),
            ("prefill", marks.prefill.prefill_s, worker),
        ]
        path += _end_to_end(submitted_s, parts)
    return [span for span in path if span.duration_s > 0]


def _split_wait(prefill: PrefillTiming, items: Sequence[ItemMark]) -> list[tuple[str, float, str]]:
    """The wait for embeddings, split backwards from the arrival of the item that was waited for last."""
    wait_s = prefill.embed_wait_s
    item = next((item for item in items if item.mm_hash == prefill.blocking_item), None)
    if item is None:
        return [("encode_queue", wait_s, "")]
    transfer_s = min(wait_s, item.transfer_s)
    encode_s = min(wait_s - transfer_s, item.encode_s)
    detail = _detail(item)
    return [
        ("encode_queue", wait_s - transfer_s - encode_s, detail),
        ("encode", encode_s, detail),
        ("embed_transfer", transfer_s, detail),
    ]


def _item_spans(item: ItemMark) -> list[Span]:
    spans = _end_to_end(item.demanded_s, [("encode_queue", item.queue_s, ""), ("encode", item.encode_s, "")])
    spans.append(Span("embed_transfer", max(item.held_s - item.transfer_s, item.demanded_s), item.transfer_s))
    return [Span(s.name, s.start_s, s.duration_s, _detail(item)) for s in spans if s.duration_s > 0]


def _after_first_token(marks: Marks) -> list[Span]:
    """The hand-off to the decode worker, as far as it lies after the first token: KV moves while prefill runs."""
    if marks.decode is None:
        return []
    start_s = max(marks.first_token_s, marks.decode_start_s)
    kv_transfer_s = max(0.0, marks.decode_start_s + marks.decode.kv_transfer_s - start_s)
    parts = [("kv_transfer", kv_transfer_s), ("decode_queue", marks.decode.queue_s)]
    return _end_to_end(start_s, [(name, duration_s, marks.decode_worker) for name, duration_s in parts])


def _end_to_end(start_s: float, parts: Sequence[tuple[str, float, str]]) -> list[Span]:
    spans = []
    for name, duration_s, detail in parts:
        spans.append(Span(name, start_s, duration_s, detail))
        start_s += duration_s
    return spans


def _detail(item: ItemMark) -> str:
    return f"{item.worker} {item.mm_hash[:HASH_DIGITS]}" + (" cached" if item.cached else "")
