"""How long steps take on this worker: how many prompt tokens go along with decode rows so that these wait about evenly.

Kept by the scheduler, fed by the engine after each step. Pure.
"""

from __future__ import annotations

FEWEST_TOKENS = 8  # of a prompt that go on in any step
FIRST_TOKENS = 64  # before anything was measured
FRESH_STEPS = 16  # for so long after a step without a prompt a mixed one can be compared with it
# Of the newest step in a mean.
WEIGHT = 0.2
ROWS_WEIGHT = 0.5  # how many rows there are changes from step to step
USUAL_WEIGHT = 0.005
FIRST_STEPS = 16  # that only decode: the shortest is taken for usual, for a worker's first ones are slow
LEAST_SHARE = 0.1  # of a mixed step, for its prompt tokens and for its rows
MOST_LONGER = 2.0  # times as long as usual, one step counts for no more


class StepTimes:
    """Means that forget: of a step that only decodes, of one prompt token, and of what decode rows take in any step, of
    late and usually."""

    def __init__(self) -> None:
        self._decode_s = 0.0
        self._num_mixed = FRESH_STEPS  # since the last step that only decoded
        self._token_s: float | None = None
        self._num_decode_steps = 0
        self._rows_s = 0.0
        self._usual_rows_s = 0.0

    @property
    def prompt_token_s(self) -> float:
        """0 before anything was measured."""
        return self._token_s or 0.0

    def add(self, num_prompt_tokens: int, num_decode_rows: int, duration_s: float) -> None:
        if num_prompt_tokens:
            self._learn_token(num_prompt_tokens, num_decode_rows, duration_s)
        else:
            self._decode_s = _mixed(self._decode_s or duration_s, duration_s, WEIGHT)
            self._num_mixed = 0
            self._num_decode_steps += 1
        if num_decode_rows:
            rows_s = max(duration_s - num_prompt_tokens * self.prompt_token_s, LEAST_SHARE * duration_s)
            self._rows_s = _mixed(self._rows_s or rows_s, rows_s, ROWS_WEIGHT)
            self._learn_usual(rows_s, only_decoded=num_prompt_tokens == 0)

    def _learn_token(self, num_prompt_tokens: int, num_decode_rows: int, duration_s: float) -> None:
        """The fewer tokens a step has, the more of it is for reading the weights: it counts for less."""
        prompt_s, weight = duration_s, WEIGHT * min(num_prompt_tokens / FIRST_TOKENS, 1.0)
        if num_decode_rows:
            self._num_mixed += 1
            prompt_s = max(duration_s - self._decode_s, LEAST_SHARE * duration_s)
            weight = WEIGHT if self._num_mixed <= FRESH_STEPS and num_prompt_tokens >= FEWEST_TOKENS else 0.0
        token_s = prompt_s / num_prompt_tokens
        self._token_s = token_s if self._token_s is None else _mixed(self._token_s, token_s, weight)

    def _learn_usual(self, rows_s: float, *, only_decoded: bool) -> None:
        if self._num_decode_steps > FIRST_STEPS:
            longest_s = MOST_LONGER * self._usual_rows_s
            self._usual_rows_s = _mixed(self._usual_rows_s, min(rows_s, longest_s), USUAL_WEIGHT)
        elif only_decoded:
            self._usual_rows_s = min(self._usual_rows_s or rows_s, rows_s)

    def prompt_tokens_within(self, time_s: float) -> int:
        """How many prompt tokens make a step `time_s` longer than its decode rows usually take: fewer where there are
        more rows than usual, so that a token does not wait for both; more where there are fewer. By half at most."""
        if self._token_s is None:
            return FIRST_TOKENS
        longer_s = self._rows_s - self._usual_rows_s if self._usual_rows_s else 0.0
        left_s = time_s - min(max(longer_s, -0.5 * time_s), 0.5 * time_s)
        most = 1 << 30
        return max(FEWEST_TOKENS, int(min(left_s / self._token_s, most)) if self._token_s > 0 else most)


def _mixed(mean: float, newest: float, weight: float) -> float:
    return mean + weight * (newest - mean)
