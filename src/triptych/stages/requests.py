"""From the wire's `Prefill` or `Decode` to the engine's `RequestState`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from triptych.clock import Clock
from triptych.engine.request_state import PositionTable, RequestKey, RequestState
from triptych.messages import PromptMessage, Refusal, Refused
from triptych.stages.checks import why_impossible
from triptych.types import PromptItem

PositionRule = Callable[[list[int], list[PromptItem]], tuple["NDArray[np.int64]", int]]


class RequestFactory:
    """`positions` is the model family's rule: rotary positions [axes, n] of a prompt, and what follows it less n."""

    def __init__(self, positions: PositionRule, block_size: int, max_model_len: int, vocab: int, clock: Clock) -> None:
        self._positions = positions
        self._max_model_len = max_model_len
        self._clock = clock
        self.block_size = block_size
        self.vocab = vocab

    def accept(
        self,
        message: PromptMessage,
        *,
        decode_elsewhere: bool = False,
        kv_from_elsewhere: bool = False,
        has_siblings: bool = False,
    ) -> RequestState | Refused:
        """The request, or why it can never run here. The router checks first; this guards against drift."""
        about = message.request_id, message.attempt
        if len(message.token_ids) >= self._max_model_len:
            reason = f"{len(message.token_ids)} tokens leave no room for output in {self._max_model_len}"
            return Refused(*about, Refusal.TOO_LONG, reason)
        if reason := why_impossible(message, self.vocab):
            return Refused(*about, Refusal.INVALID, reason)
        try:
            return self._build(message, decode_elsewhere, kv_from_elsewhere, has_siblings)
        except ValueError as error:  # a grid that is not of its placeholder
            return Refused(*about, Refusal.INVALID, f"the prompt has no positions: {error}")

    def _build(
        self, message: PromptMessage, decode_elsewhere: bool, kv_from_elsewhere: bool, has_siblings: bool
    ) -> RequestState:
        num_prompt_tokens = len(message.token_ids) - message.num_output_tokens
        positions, delta = self._positions(message.token_ids[:num_prompt_tokens], message.items)
        return RequestState(
            RequestKey(message.request_id, message.attempt),
            list(message.token_ids),
            num_prompt_tokens,
            message.items,
            message.sampling,
            PositionTable(positions, delta),
            cache_salt=message.cache_salt,
            block_size=self.block_size,
            now=self._clock.now(),
            priority=message.priority,
            decode_elsewhere=decode_elsewhere,
            kv_from_elsewhere=kv_from_elsewhere,
            has_siblings=has_siblings,
        )
