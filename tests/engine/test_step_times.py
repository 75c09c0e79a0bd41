"""How many prompt tokens fit beside decode rows."""

from triptych.engine.step_times import FEWEST_TOKENS, FIRST_TOKENS, StepTimes


def test_before_anything_was_measured_there_is_a_guess() -> None:
    assert StepTimes().prompt_tokens_within(0.05) == FIRST_TOKENS


def test_decode_rows_are_taken_off_the_time_of_a_mixed_step() -> None:
    times = StepTimes()
    for _ in range(40):
        times.add(0, 8, 0.02)
        times.add(100, 8, 0.12)  # 1 ms a prompt token, beside 20 ms for decode rows
    assert 47 <= times.prompt_tokens_within(0.05) <= 53
    assert 0.0009 < times.prompt_token_s < 0.0011


def test_the_rate_follows_the_newest_steps() -> None:
    times = StepTimes()
    times.add(100, 0, 0.1)
    for _ in range(40):
        times.add(100, 0, 0.01)
    assert 95 <= times.prompt_tokens_within(0.01) <= 100


def test_there_is_always_some_progress_and_a_clock_that_stands_still_sets_no_limit() -> None:
    slow, still = StepTimes(), StepTimes()
    slow.add(100, 0, 10.0)
    still.add(100, 0, 0.0)
    assert slow.prompt_tokens_within(0.01) == FEWEST_TOKENS
    assert still.prompt_tokens_within(0.01) > 10**6


def test_a_stall_that_decode_steps_explain_away_leaves_a_rate() -> None:
    times = StepTimes()
    times.add(0, 8, 1.0)
    times.add(100, 8, 0.1)
    assert 100 <= times.prompt_tokens_within(0.05) <= 200  # though the rows took a second before


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
