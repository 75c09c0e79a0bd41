"""One answer to a request: its attempts, one after the other, until its last token; and several answers side by side.

Made by `router.py`, one for each of the request's `n` choices. The first choice brings the prompt's KV to be; the
others begin when its first token comes, and find the prompt in the prefix cache of the same worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from triptych import messages
from triptych.errors import NoCapacityError, WorkerLostError
from triptych.merge import merge
from triptych.router.attempt import Attempt
from triptych.router.marks import RequestMarks
from triptych.router.output import RequestOutput
from triptych.router.parts import RouterParts
from triptych.router.plan import Plan, make_plan
from triptych.types import ChoiceFinished, Event, MediaItem, Prompt, Request, Started

logger = logging.getLogger(__name__)

Attempts = dict[tuple[str, int], Attempt]  # those that run, by request id and number


class Choice:
    """`attempts` is where the router finds an attempt that a message is for."""

    def __init__(
        self,
        index: int,
        request: Request,
        prompt: Prompt,
        media: Sequence[MediaItem],
        output: RequestOutput,
        parts: RouterParts,
        marks: RequestMarks,
        attempts: Attempts,
        joined: asyncio.Event,
    ) -> None:
        self.index = index
        self.output = output
        self.plan: Plan | None = None
        self.num_cached_tokens = 0
        self._request = request if index == 0 else sibling(request, index)
        self._prompt = prompt
        self._media = {item.mm_hash: item for item in media}
        self._parts = parts
        self._marks = marks
        self._attempts = attempts
        self._joined = joined
        limit_s = parts.config.deadline_s if request.deadline_s is None else request.deadline_s
        self._deadline_s = marks.arrived_s + min(limit_s, parts.config.deadline_s)

    async def run(self, plan: Plan) -> AsyncGenerator[Event, None]:
        """`Started` from the first choice, then what its tokens give, then `ChoiceFinished`."""
        max_attempts = self._parts.config.max_attempts
        for number in range(max_attempts):
            self.plan = plan
            self._marks.planned(plan, len(self._media))
            attempt = Attempt(
                number, self._request, self._prompt, self._media, plan, self._parts, self._marks, self._deadline_s
            )
            try:
                async with aclosing(self._tokens(attempt)) as tokens:
                    async for token in tokens:
                        for event in self._push(token, attempt):
                            yield event
                        if self.output.finish_reason is not None:
                            yield ChoiceFinished(self.index, self.output.finish_reason, self.output.stop_reason)
                            return
            except (WorkerLostError, NoCapacityError) as error:
                logger.warning("request_id=%s attempt=%d ended: %s", self._request.request_id, number, error)
                if number + 1 == max_attempts:
                    raise
            plan = await self.next_plan()

    async def _tokens(self, attempt: Attempt) -> AsyncGenerator[messages.TokenOutput, None]:
        key = (attempt.request_id, attempt.number)
        self._attempts[key] = attempt
        try:
            async with aclosing(attempt.run(list(self.output.token_ids))) as tokens:
                async for token in tokens:
                    yield token
        finally:
            del self._attempts[key]
            attempt.close()

    def _push(self, token: messages.TokenOutput, attempt: Attempt) -> list[Event]:
        is_first = not self.output.token_ids
        if is_first:
            self.num_cached_tokens = attempt.num_cached_tokens
        events = self.output.push(token)
        self._marks.token(token)
        if not is_first:
            self._parts.metrics.inter_token(self._marks.gap_s)
        elif self.index == 0:
            self._parts.metrics.first_token(self._marks.ttft_s)
            events.insert(0, self._started(token))
        return events

    def _started(self, token: messages.TokenOutput) -> Started:
        return Started(
            prompt_token_ids=self._prompt.token_ids,
            num_cached_tokens=self.num_cached_tokens,
            num_image_tokens=sum(item.placeholder.length for item in self._prompt.items),
            prompt_logprobs=self.output.prompt_logprobs(token.prompt_logprobs),
        )

    async def next_plan(self) -> Plan:
        """A plan over the workers that there are, or over one that is started again within the time for that."""
        clock, request = self._parts.clock, self._request
        give_up_s = min(clock.now() + self._parts.config.capacity_wait_s, self._deadline_s)
        while True:
            try:
                return make_plan(
                    self._prompt, request.cache_salt, self._parts.registry, self._parts.prefixes, request.session_id
                )
            except NoCapacityError:
                left_s = give_up_s - clock.now()
                if left_s <= 0:
                    raise
                self._joined.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._joined.wait()


def sibling(request: Request, index: int) -> Request:
    """The request of a further choice: an id and draws of its own, and nothing asked of the prompt again."""
    sampling = msgspec.structs.replace(
        request.sampling, seed=(request.sampling.seed + index) % (1 << 63), num_prompt_logprobs=None
    )
    return msgspec.structs.replace(request, request_id=f"{request.request_id}#{index}", sampling=sampling, n=1)


def run_side_by_side(choices: Sequence[Choice], plan: Plan) -> AsyncGenerator[Event, None]:
    """The events of all choices as they come. The first failure ends all of them."""
    first, *others = choices

    def begun_by(event: Event) -> list[AsyncGenerator[Event, None]]:
        if not isinstance(event, Started):
            return []
        assert first.plan is not None
        return [choice.run(first.plan) for choice in others]

    return merge([first.run(plan)], begun_by) if others else first.run(plan)
