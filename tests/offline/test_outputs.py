"""How outputs are collected from the router's events."""

from __future__ import annotations

import pytest

from triptych.errors import EngineError
from triptych.offline.outputs import Collector, ToolCall
from triptych.types import (
    ChoiceFinished,
    Event,
    Finished,
    FinishReason,
    ScoredToken,
    Started,
    TextDelta,
    Timing,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)

END = Finished(Usage(prompt_tokens=2, completion_tokens=5), Timing(0.1, 0.2, [], [], []))


def scored(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(ScoredToken(token_id, b"x", -0.5), 1, [])


def collect(events: list[Event], num_choices: int = 1) -> Collector:
    collector = Collector(num_choices)
    for event in events:
        collector.push(event)
    return collector


def test_choices_that_run_side_by_side_are_told_apart() -> None:
    events: list[Event] = [
        Started([7, 8], prompt_logprobs=[None, scored(8)]),
        TextDelta("a", 1, [1], choice=0, logprobs=[scored(1)]),
        TextDelta("x", 1, [4], choice=1, logprobs=[scored(4)]),
        TextDelta("b", 3, [2, 3], choice=0, logprobs=[scored(2), scored(3)]),
        ChoiceFinished(0, FinishReason.STOP, "end"),
        TextDelta("y", 2, [5], choice=1, logprobs=[scored(5)]),
        ChoiceFinished(1, FinishReason.LENGTH, None),
        END,
    ]
    output = collect(events, 2).output("r", "the prompt")
    first, second = output.outputs
    assert (first.index, first.text, first.token_ids, first.finish_reason, first.stop_reason) == (
        0, "ab", (1, 2, 3), FinishReason.STOP, "end",
    )  # fmt: skip
    assert (second.index, second.text, second.token_ids, second.stop_reason) == (1, "xy", (4, 5), None)
    assert [entry.chosen.token_id for entry in first.logprobs] == [1, 2, 3]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "the prompt", (7, 8))
    assert output.prompt_logprobs == (None, scored(8))
    assert (output.usage, output.timing) == (END.usage, END.timing)


def test_a_tool_call_is_put_together_from_its_pieces() -> None:
    events: list[Event] = [
        Started([7]),
        ToolCallDelta(0, 0, "call-1", "weather", ""),
        ToolCallDelta(0, 0, "", "", '{"city":'),
        ToolCallDelta(0, 1, "call-2", "time", "{}"),
        ToolCallDelta(0, 0, "", "", ' "Oslo"}'),
        ChoiceFinished(0, FinishReason.TOOL_CALLS, None),
        END,
    ]
    (answer,) = collect(events).output("r", None).outputs
    assert answer.tool_calls == (ToolCall("call-1", "weather", '{"city": "Oslo"}'), ToolCall("call-2", "time", "{}"))


@pytest.mark.parametrize("missing", range(3))
def test_an_answer_without_its_end_is_no_answer(missing: int) -> None:
    events: list[Event] = [Started([7]), ChoiceFinished(0, FinishReason.STOP, None), END]
    del events[missing]
    with pytest.raises(EngineError, match="without a terminal event"):
        collect(events).output("r", None)
