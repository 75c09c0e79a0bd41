"""How long steps take on this worker: how many prompt tokens fit beside decode rows into a given time.

Kept by the scheduler, fed by the engine after each step. Pure.
"""

from __future__ import annotations

FEWEST_TOKENS = 16  # of a prompt that go on in any step: fewer waste the pass over the weights
FIRST_TOKENS = 64  # before anything was measured
WEIGHT = 0.2  # of the newest step in a mean


class StepTimes:
    """Means that forget: of a step that only decodes, and of one prompt token."""

    def __init__(self) -> None:
        self._decode_s = 0.0
        self._token_s: float | None = None

    @property
    def prompt_token_s(self) -> float:
        """0 before anything was measured."""
        return self._token_s or 0.0

    def add(self, num_prompt_tokens: int, num_decode_rows: int, duration_s: float) -> None:
        if num_prompt_tokens == 0:
            self._decode_s = _mixed(self._decode_s or duration_s, duration_s)
        elif num_prompt_tokens >= FEWEST_TOKENS:
            prompt_s = max(duration_s - self._decode_s, 0.5 * duration_s) if num_decode_rows else duration_s
            token_s = prompt_s / num_prompt_tokens
            self._token_s = _mixed(token_s if self._token_s is None else self._token_s, token_s)

    def prompt_tokens_within(self, time_s: float) -> int:
        """How many prompt tokens a step takes in about `time_s`, decode rows not counted."""
        if self._token_s is None:
            return FIRST_TOKENS
        most = int(time_s / self._token_s) if self._token_s > 0 else 1 << 30
        return max(FEWEST_TOKENS, most // 8 * 8)


def _mixed(mean: float, newest: float) -> float:
    return mean + WEIGHT * (newest - mean)
