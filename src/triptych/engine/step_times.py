"""How long steps take on this worker: how many prompt tokens go along with decode rows so that these wait about evenly.

Kept by the scheduler, fed by the engine after each step. Pure.
"""

from __future__ import annotations

FEWEST_TOKENS = 8  # of a prompt that go on in any step
FIRST_TOKENS = 64  # before anything was measured
# Of the newest step in a mean.
WEIGHT = 0.2
ROWS_WEIGHT = 0.5  # how many rows there are changes from step to step
USUAL_WEIGHT = 0.005


class StepTimes:
    """Means that forget: of a step that only decodes, of one prompt token, and of what decode rows take in any step, of
    late and usually."""

    def __init__(self) -> None:
        self._decode_s = 0.0
        self._token_s: float | None = None
        self._rows_s: float | None = None
        self._usual_rows_s = 0.0

    @property
    def prompt_token_s(self) -> float:
        """0 before anything was measured."""
        return self._token_s or 0.0

    def add(self, num_prompt_tokens: int, num_decode_rows: int, duration_s: float) -> None:
        if num_prompt_tokens == 0:
            self._decode_s = _mixed(self._decode_s or duration_s, duration_s, WEIGHT)
        elif num_prompt_tokens >= FEWEST_TOKENS:
            prompt_s = max(duration_s - self._decode_s, 0.5 * duration_s) if num_decode_rows else duration_s
            token_s = prompt_s / num_prompt_tokens
            self._token_s = _mixed(token_s if self._token_s is None else self._token_s, token_s, WEIGHT)
        if num_decode_rows:
            rows_s = max(duration_s - num_prompt_tokens * self.prompt_token_s, 0.0)
            if self._rows_s is None:
                self._rows_s = self._usual_rows_s = rows_s
            self._rows_s = _mixed(self._rows_s, rows_s, ROWS_WEIGHT)
            self._usual_rows_s = _mixed(self._usual_rows_s, rows_s, USUAL_WEIGHT)

    def prompt_tokens_within(self, time_s: float) -> int:
        """How many prompt tokens make a step `time_s` longer than its decode rows usually take: fewer where there are
        more rows than usual, so that a token does not wait for both, up to twice as many where there are fewer rows."""
        if self._token_s is None:
            return FIRST_TOKENS
        left_s = time_s + min(self._usual_rows_s - (self._rows_s or 0.0), time_s)
        return max(FEWEST_TOKENS, int(left_s / self._token_s) if self._token_s > 0 else 1 << 30)


def _mixed(mean: float, newest: float, weight: float) -> float:
    return mean + weight * (newest - mean)
