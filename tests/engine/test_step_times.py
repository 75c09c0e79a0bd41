"""How many prompt tokens fit beside decode rows."""

import pytest

from triptych.engine.step_times import FEWEST_TOKENS, FIRST_TOKENS, StepTimes


def test_before_anything_was_measured_there_is_a_guess() -> None:
    assert StepTimes().prompt_tokens_within(0.05) == FIRST_TOKENS


def test_decode_rows_are_taken_off_the_time_of_a_mixed_step() -> None:
    times = StepTimes()
    for _ in range(40):
        times.add(0, 8, 0.02)
        times.add(100, 8, 0.12)  # 1 ms a prompt token, beside 20 ms for decode rows
    assert times.prompt_tokens_within(0.05) == 50
    assert 0.0009 < times.prompt_token_s < 0.0011


def test_the_rate_follows_the_newest_steps() -> None:
    times = StepTimes()
    times.add(100, 0, 0.1)
    for _ in range(40):
        times.add(100, 0, 0.01)
    assert times.prompt_tokens_within(0.01) == 99


def test_there_is_always_some_progress_and_a_clock_that_stands_still_sets_no_limit() -> None:
    slow, still = StepTimes(), StepTimes()
    slow.add(100, 0, 10.0)
    still.add(100, 0, 0.0)
    assert slow.prompt_tokens_within(0.01) == FEWEST_TOKENS
    assert still.prompt_tokens_within(0.01) > 10**6


def test_rows_that_got_faster_leave_a_rate_and_half_of_the_time_more() -> None:
    times = StepTimes()
    times.add(0, 8, 1.0)
    times.add(100, 8, 0.1)
    assert 740 <= times.prompt_tokens_within(0.05) <= 750


def after_decoding(num_rows: int, first_s: float | None = None) -> StepTimes:
    """One slow step, then a hundred of 8 ms and 3 for each row."""
    times = StepTimes()
    times.add(0, num_rows, first_s or step_s(num_rows, 0))
    for _ in range(100):
        times.add(0, num_rows, step_s(num_rows, 0))
    return times


def step_s(num_rows: int, num_tokens: int) -> float:
    return 0.008 + 0.003 * num_rows + 0.0005 * num_tokens


@pytest.mark.parametrize("num_rows", [4, 16, 31])
def test_prompts_go_on_however_long_the_rows_take(num_rows: int) -> None:
    """Rows that take longer than the time for prompts are not taken for the prompts' own time."""
    times = after_decoding(num_rows)
    for _ in range(2000):
        num_tokens = times.prompt_tokens_within(0.03)
        times.add(num_tokens, num_rows, step_s(num_rows, num_tokens))
    assert 55 <= times.prompt_tokens_within(0.03) <= 65


@pytest.mark.parametrize("first_s", [0.3, 10.0])
def test_a_slow_first_step_is_not_the_usual_one(first_s: float) -> None:
    times = after_decoding(4, first_s)
    for _ in range(50):
        num_tokens = times.prompt_tokens_within(0.03)
        times.add(num_tokens, 4, step_s(4, num_tokens))
        assert num_tokens <= 70


def test_prompts_keep_a_part_of_their_time_when_rows_become_many() -> None:
    times = after_decoding(2)
    for _ in range(10):
        num_tokens = times.prompt_tokens_within(0.03)
        times.add(num_tokens, 2, step_s(2, num_tokens))
    times.add(30, 32, step_s(32, 30))
    assert FEWEST_TOKENS < times.prompt_tokens_within(0.03) <= 30


def test_short_prompts_alone_teach_the_rate_too() -> None:
    times = StepTimes()
    times.add(20, 0, 2.0)  # cold
    for _ in range(200):
        times.add(20, 0, 0.02)
    assert 0.001 <= times.prompt_token_s < 0.002


def test_a_time_without_end_sets_no_limit() -> None:
    times = after_decoding(4)
    times.add(30, 4, step_s(4, 30))
    assert times.prompt_tokens_within(float("inf")) > 10**6


def test_fewer_prompt_tokens_go_along_with_more_rows_than_usual() -> None:
    """A step has about the same length whatever there is to decode: each row takes 3 ms, each prompt token 2."""
    times = StepTimes()
    for num_rows in [2, 6] * 20:
        times.add(0, num_rows, 0.01 + 0.003 * num_rows)
    sizes = {}
    for num_rows in (2, 4, 6):
        for _ in range(10):
            num_tokens = sizes[num_rows] = times.prompt_tokens_within(0.03)
            times.add(num_tokens, num_rows, 0.01 + 0.003 * num_rows + 0.002 * num_tokens)
    lengths_s = [0.003 * num_rows + 0.002 * num_tokens for num_rows, num_tokens in sizes.items()]
    assert sizes[2] > sizes[4] > sizes[6]
    assert max(lengths_s) - min(lengths_s) < 0.006
