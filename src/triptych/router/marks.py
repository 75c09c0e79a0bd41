"""What the router notes of one request while it runs: its timeline, and the one log line that it ends with.

All instants are of the router's clock, in seconds since the request's arrival; workers add durations of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triptych.clock import Clock
from triptych.errors import TriptychError
from triptych.messages import DecodeTiming, EncodeSource, ItemEncoded, PrefillTiming, TokenOutput
from triptych.observe.logging import canonical_line
from triptych.observe.timeline import ItemMark, Marks, build_timing
from triptych.router.plan import Plan
from triptych.types import FinishReason, Timing, Usage

CLIENT_CLOSED_REQUEST = 499  # the status that proxies log for a client that went away


class _Item:
    """One item's way from demand to the consumer's memory."""

    def __init__(self, demanded_s: float) -> None:
        self.demanded_s = demanded_s
        self.given_s = demanded_s  # to an encode worker
        self.encoded: ItemEncoded | None = None
        self.worker = ""
        self.encoded_s = 0.0
        self.held_s = 0.0


class RequestMarks:
    def __init__(self, request_id: str, clock: Clock) -> None:
        self.arrived_s = clock.now()
        self.ttft_s = 0.0
        self.gap_s = 0.0  # between the last two tokens
        self._request_id = request_id
        self._clock = clock
        self._fetch = (0.0, 0.0)  # start, duration
        self._plan = (0.0, 0.0)
        self._items: dict[str, _Item] = {}
        self._plans: list[Plan] = []
        self._encoders: dict[str, None] = {}  # names, in the order of their first item
        self._prefill: PrefillTiming | None = None
        self._decode: DecodeTiming | None = None
        self._decode_start_s = 0.0
        self._last_token_s = 0.0
        self._num_images = 0
        self._num_encodes = 0
        self._status = 500
        self._error: TriptychError | None = None
        self._outcome: tuple[FinishReason, Usage, Timing] | None = None

    def _now_s(self) -> float:
        return self._clock.now() - self.arrived_s

    @contextmanager
    def fetch(self) -> Iterator[None]:
        start_s = self._now_s()
        yield
        self._fetch = (start_s, self._now_s() - start_s)

    @contextmanager
    def plan(self) -> Iterator[None]:
        start_s = self._now_s()
        yield
        self._plan = (start_s, self._now_s() - start_s)

    def planned(self, plan: Plan, num_images: int) -> None:
        self._plans.append(plan)
        self._num_images = num_images

    def item_demanded(self, mm_hash: str) -> None:
        self._items[mm_hash] = _Item(self._now_s())

    def item_given(self, mm_hash: str, worker: str) -> None:
        self._encoders[worker] = None
        self._items[mm_hash].given_s = self._now_s()

    def item_encoded(self, message: ItemEncoded, worker: str) -> None:
        self._num_encodes += message.source is EncodeSource.FORWARD
        item = self._items.get(message.mm_hash)
        if item is not None:
            item.encoded, item.worker, item.encoded_s = message, worker, self._now_s()

    def item_held(self, mm_hash: str) -> None:
        item = self._items.get(mm_hash)
        if item is not None:
            item.held_s = self._now_s()

    def decode_sent(self) -> None:
        self._decode_start_s = self._now_s()

    def token(self, output: TokenOutput) -> None:
        now_s = self._now_s()
        self.ttft_s = self.ttft_s or now_s
        self.gap_s, self._last_token_s = now_s - self._last_token_s, now_s
        self._prefill = self._prefill or output.prefill
        self._decode = output.decode or self._decode

    # -- the end -------------------------------------------------------------------------------------------------------

    def finished(self, reason: FinishReason, usage: Usage) -> Timing:
        timing = self._timing()
        self._status, self._outcome = 200, (reason, usage, timing)
        return timing

    def failed(self, error: TriptychError) -> None:
        self._status, self._error = error.status, error

    def cancelled(self) -> bool:
        """False when the request had ended before."""
        if self._outcome is not None:
            return False
        self._status = CLIENT_CLOSED_REQUEST
        return True

    def _timing(self) -> Timing:
        plan = self._plans[-1]
        return build_timing(
            Marks(
                first_token_s=self.ttft_s,
                finished_s=self._now_s(),
                fetch_start_s=self._fetch[0],
                fetch_s=self._fetch[1],
                plan_start_s=self._plan[0],
                plan_s=self._plan[1],
                prefill=self._prefill,
                prefill_worker=plan.prefill.name,
                items=tuple(self._item_marks()),
                decode=self._decode,
                decode_worker=plan.decode.name,
                decode_start_s=self._decode_start_s,
            )
        )

    def _item_marks(self) -> Iterator[ItemMark]:
        for mm_hash, item in self._items.items():
            if item.encoded is not None:
                yield ItemMark(
                    mm_hash=mm_hash,
                    worker=item.worker,
                    queue_s=item.given_s - item.demanded_s + item.encoded.queue_s,
                    encode_s=item.encoded.encode_s,
                    transfer_s=max(item.held_s - item.encoded_s, 0.0),
                    cached=item.encoded.source is not EncodeSource.FORWARD,
                    demanded_s=item.demanded_s,
                    held_s=item.held_s,
                )

    def log(self) -> None:
        """Exactly one line a request, whatever its end."""
        reason, usage, timing = self._outcome or (None, None, None)
        names = self._encoders | {w.name: None for plan in self._plans for w in (plan.prefill, plan.decode)}
        canonical_line(
            request_id=self._request_id,
            status=self._status,
            e2e_s=self._now_s(),
            finish_reason=reason,
            usage=usage,
            timing=timing,
            images=self._num_images,
            encodes=self._num_encodes,
            attempts=len(self._plans),
            workers=list(names),
            error=self._error,
        )
