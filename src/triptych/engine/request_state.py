"""One request as an engine sees it: its tokens, how far they are computed, its KV blocks, and its status.

Mutable, owned by one engine, changed only by the scheduler and the engine of the same worker.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.block_hash import BlockHash, extend_hashes
from triptych.engine.batch import Scoring
from triptych.errors import GrammarError
from triptych.messages import Logprobs, PrefillTiming
from triptych.types import FinishReason, PromptItem, SamplingParams

if TYPE_CHECKING:
    from triptych.engine.grammar import GrammarMatcher


class RequestKey(NamedTuple):
    """One attempt at one request."""

    request_id: str
    attempt: int


class Status(StrEnum):
    WAITING = "waiting"  # holds no block
    WAITING_FOR_EMBEDDINGS = "waiting_for_embeddings"  # the next token is a placeholder whose embedding is not here
    WAITING_FOR_KV = "waiting_for_kv"  # holds its blocks; another worker fills them
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks, waits to be computed again
    FINISHED = "finished"


class PositionTable:
    """Rotary positions of a request: from the family's rule for the prompt, index + delta for what follows."""

    def __init__(self, prompt_positions: NDArray[np.int64], delta: int) -> None:
        self._prompt = prompt_positions  # [axes, num_prompt_tokens]
        self._delta = delta

    def slice(self, start: int, end: int) -> NDArray[np.int64]:
        """Positions of tokens `start` to `end`: [axes, end - start]."""
        axes, num_prompt_tokens = self._prompt.shape
        if end <= num_prompt_tokens:
            return self._prompt[:, start:end]
        tail = np.arange(max(start, num_prompt_tokens), end, dtype=np.int64) + self._delta
        tail = np.broadcast_to(tail, (axes, len(tail)))
        return tail if start >= num_prompt_tokens else np.concatenate([self._prompt[:, start:], tail], axis=1)


class RequestState:
    """Status and progress of one request. All counts are in tokens unless named otherwise."""

    def __init__(
        self,
        key: RequestKey,
        token_ids: list[int],
        num_prompt_tokens: int,
        items: list[PromptItem],
        sampling: SamplingParams,
        positions: PositionTable,
        *,
        cache_salt: str,
        block_size: int,
        now: float,
        priority: int = 0,
        decode_elsewhere: bool = False,
        kv_from_elsewhere: bool = False,
        has_siblings: bool = False,
    ) -> None:
        self.key = key
        self.token_ids = token_ids  # prompt, then output
        self.num_prompt_tokens = num_prompt_tokens
        self.items = items
        self.sampling = sampling
        self.positions = positions
        self.priority = priority  # lower is sooner
        self.decode_elsewhere = decode_elsewhere
        self.kv_from_elsewhere = kv_from_elsewhere
        self.has_siblings = has_siblings  # requests with the same prompt follow
        self.status = Status.WAITING
        self.arrival = 0  # order of arrival at this engine, kept when preempted; set by the scheduler
        self.place = 0  # in line, in prompt tokens; set by the scheduler, see its `_urgency`
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.ends_in_text = False  # it stopped because its grammar is complete, not by a token that is no text
        self.matcher: GrammarMatcher | None = None  # of its grammar, from the first token that is sampled here
        self.failure = ""  # why it cannot go on, if it cannot
        self.is_own_failure = False  # what it asks for is at fault
        self.block_table: list[int] = []
        self.pinned_blocks: list[int] = []  # cached ones that it found when it came, kept while it waits
        self.num_committed_blocks = 0
        self.is_reserved = False  # has all it needs to finish its prompt, and is not preempted before that
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.demanded: set[str] = set()  # mm_hashes asked for and not yet here
        self.prompt_logprobs: list[Logprobs] = []  # of the prompt's tokens but the first, as far as they are known
        # A request that goes on here had them with its first token already.
        wants_scores = sampling.num_prompt_logprobs is not None and not kv_from_elsewhere and not self.num_output_tokens
        self._num_to_score = num_prompt_tokens - 1 if wants_scores else 0
        self._block_size = block_size
        self._cache_salt = cache_salt
        self._hashes: list[BlockHash] = []
        self._times_s = {Status.WAITING: 0.0, Status.WAITING_FOR_EMBEDDINGS: 0.0, Status.RUNNING: 0.0}
        self._marked_s = now
        self._blocking_item = ""
        self._timed = kv_from_elsewhere  # then the prefill worker reports the time to the first token

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the token that was sampled last is left to compute."""
        return self.num_tokens_to_compute == 1 and self.num_output_tokens > 0

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens that need not be computed here if their KV is cached.

        The last one is sampled from; where log-probabilities of the prompt are wanted, each is scored from the one
        before it.
        """
        num_scored = len(self.prompt_logprobs)
        return num_scored if num_scored < self._num_to_score else len(self.token_ids) - 1

    def scoring(self, start: int, end: int) -> Scoring | None:
        """What to score from the rows of tokens `start` to `end`."""
        num_top = self.sampling.num_prompt_logprobs
        if num_top is None or len(self.prompt_logprobs) >= self._num_to_score:
            return None
        return Scoring(self.token_ids[start + 1 : min(end, self._num_to_score) + 1], num_top)

    def add_scores(self, start: int, scores: list[Logprobs]) -> None:
        """From the rows of tokens from `start` on. Those that a preempted request computes again are the same."""
        self.prompt_logprobs[start:] = scores

    def block_hashes(self) -> list[BlockHash]:
        """Hashes of the full blocks of all tokens so far."""
        extend_hashes(self._hashes, self.token_ids, self.items, self._cache_salt, self._block_size)
        return self._hashes

    def uncovered_items(self, num_covered_tokens: int) -> list[PromptItem]:
        """Items of which some placeholder token lies beyond the first `num_covered_tokens`."""
        return [item for item in self.items if item.placeholder.end > num_covered_tokens]

    def items_still_needed(self) -> list[PromptItem]:
        """Items with tokens that are not computed yet, or that a sibling will compute, for want of a full block."""
        num_covered_tokens = self.num_computed_tokens
        if self.has_siblings:
            num_shared_blocks = (self.num_prompt_tokens - 1) // self._block_size
            num_covered_tokens = min(num_covered_tokens, num_shared_blocks * self._block_size)
        return self.uncovered_items(num_covered_tokens)

    def fail(self, error: Exception) -> None:
        """It cannot go on."""
        self.failure = str(error)
        self.is_own_failure = isinstance(error, GrammarError)

    def set_status(self, status: Status, now: float, blocking_item: str = "") -> None:
        """Change the status; the time since the last change counts for the old one."""
        bucket = self.status if self.status in self._times_s else Status.WAITING
        self._times_s[bucket] += now - self._marked_s
        self._marked_s = now
        self.status = status
        if blocking_item:
            self._blocking_item = blocking_item

    def first_token_timing(self, now: float) -> PrefillTiming | None:
        """Where the time from submit to the first token went; None for every later token."""
        if self._timed:
            return None
        self._timed = True
        self.set_status(self.status, now)
        return PrefillTiming(
            queue_s=self._times_s[Status.WAITING],
            embed_wait_s=self._times_s[Status.WAITING_FOR_EMBEDDINGS],
            prefill_s=self._times_s[Status.RUNNING],
            blocking_item=self._blocking_item,
        )
