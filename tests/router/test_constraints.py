"""Structures, tools and bad words of a request, as grammars and tokens for workers; and calls found in the output."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.router.conftest import World
from triptych.errors import BadRequestError
from triptych.messages import TokenOutput
from triptych.prompt.detokenize import IncrementalDetokenizer
from triptych.prompt.layout import PromptBuilder
from triptych.prompt.tool_calls import ToolCallParser
from triptych.prompt.tools import ToolFormat
from triptych.prompt.vocabulary import Vocabulary
from triptych.router.constraints import bad_words, call_format, constrain
from triptych.router.output import RequestOutput
from triptych.types import Event, FinishReason, Request, SamplingParams, Structure, TextDelta, ToolCallDelta, ToolChoice

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}},
    {"type": "function", "function": {"name": "g"}},
]
WITH_CALLS = "{% if tools %}<tool_call>{'arguments'}</tool_call>{% endif %}"


@pytest.fixture(scope="module")
def builder(world: World) -> PromptBuilder:
    return PromptBuilder(world.spec.path, world.spec.family)


def request(**fields: Any) -> Request:
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    return Request("r", messages, [], SamplingParams(), chat_template=WITH_CALLS, **fields)


async def test_a_plain_request_has_no_constraints(builder: PromptBuilder) -> None:
    assert (await constrain(request(), builder)).sampling == SamplingParams()
    assert (await constrain(request(tools=TOOLS), builder)).sampling.grammar == "", "it may call, and need not"


async def test_a_structure_becomes_a_grammar(builder: PromptBuilder) -> None:
    structure = Structure("choice", '["yes", "no"]', "guided_choice")
    assert "yes" in (await constrain(request(structure=structure), builder)).sampling.grammar
    with pytest.raises(BadRequestError) as caught:
        await constrain(request(structure=msgspec.structs.replace(structure, source="[]")), builder)
    assert caught.value.param == "guided_choice"


async def test_calls_that_must_come_become_a_grammar(builder: PromptBuilder) -> None:
    required = request(tools=TOOLS, tool_choice=ToolChoice.REQUIRED)
    grammar = (await constrain(required, builder)).sampling.grammar
    forced = (await constrain(msgspec.structs.replace(required, forced_tool="g"), builder)).sampling.grammar
    assert len(forced) < len(grammar)
    single = (await constrain(msgspec.structs.replace(required, parallel_tool_calls=False), builder)).sampling.grammar
    assert single != grammar


async def test_a_model_without_a_form_of_calls_takes_no_tools(builder: PromptBuilder) -> None:
    with pytest.raises(BadRequestError, match="no form of calls") as caught:
        call_format(msgspec.structs.replace(request(tools=TOOLS), chat_template=""), builder)
    assert caught.value.param == "tools"
    assert call_format(request(tools=TOOLS), builder) is ToolFormat.JSON
    assert call_format(request(tools=TOOLS, tool_choice=ToolChoice.NONE), builder) is None
    wrong = {"type": "function", "function": {"name": "h", "parameters": {"type": "string"}}}
    with pytest.raises(BadRequestError) as caught:
        call_format(request(tools=[*TOOLS, wrong]), builder)
    assert caught.value.param == "tools.2.function.parameters"
    with pytest.raises(BadRequestError) as caught:
        call_format(request(tools=[*TOOLS, wrong], function_param=""), builder)
    assert caught.value.param == "tools.2.parameters"
    unenforced = {"type": "function", "function": {"name": "h", "parameters": {"properties": {"x": {"not": {}}}}}}
    with pytest.raises(BadRequestError) as caught:
        await constrain(request(tools=[unenforced], tool_choice=ToolChoice.REQUIRED, function_param=""), builder)
    assert caught.value.param == "tools.0.parameters"


def test_bad_words_are_forbidden_at_the_beginning_and_behind_a_space(builder: PromptBuilder) -> None:
    spelt = [builder.tokenizer.decode(ids) for ids in bad_words(["what", " is"], builder.tokenizer)]
    assert spelt == ["what", " what", " is"]
    assert bad_words([], builder.tokenizer) == []


# -- calls in the output -----------------------------------------------------------------------------------------------

CALLS = (
    'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


def output_of(builder: PromptBuilder, text: str, asked: Request, reason: FinishReason) -> tuple[list[Event], Any]:
    """The events of a text that comes token by token."""
    vocabulary = Vocabulary(builder.tokenizer, builder.vocab_size)
    parser = ToolCallParser(ToolFormat.JSON, TOOLS, choice=3)
    output = RequestOutput(asked, IncrementalDetokenizer(builder.tokenizer), vocabulary, parser, 3)
    token_ids = builder.tokenizer.encode(text, add_special_tokens=False).ids
    events: list[Event] = []
    for k, token_id in enumerate(token_ids):
        last = k == len(token_ids) - 1
        message = TokenOutput(
            request_id="r", attempt=0, index=k, token_ids=[token_id], finish_reason=reason if last else None
        )
        events += output.push(message)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [token for delta in deltas for token in delta.token_ids] == token_ids, "each token is told of once"
    assert all(event.choice == 3 for event in events if isinstance(event, TextDelta | ToolCallDelta))
    return events, output


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            names[event.index] = names.get(event.index, "") + event.name
            arguments[event.index] = arguments.get(event.index, "") + event.arguments
    return [(names[index], arguments[index]) for index in sorted(names)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_calls_are_told_apart_from_text(builder: PromptBuilder) -> None:
    events, output = output_of(builder, CALLS, request(tools=TOOLS), FinishReason.LENGTH)
    assert (text_of(events), calls_of(events)) == ("I look.", [("f", '{"a": 1}'), ("g", "{}")])
    assert output.finish_reason is FinishReason.LENGTH


def test_a_model_that_stops_after_a_call_has_called(builder: PromptBuilder) -> None:
    _, output = output_of(builder, CALLS + " ", request(tools=TOOLS), FinishReason.STOP)
    assert output.finish_reason is FinishReason.TOOL_CALLS
    _, output = output_of(builder, "No call. ", request(tools=TOOLS), FinishReason.STOP)
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_call_that_is_cut_ends_as_the_output_did(builder: PromptBuilder, reason: FinishReason) -> None:
    written = CALLS.removesuffix("}}\n</tool_call>") + '"b": "some text'
    events, output = output_of(builder, written, request(tools=TOOLS), reason)
    (first, (name, arguments)), text = calls_of(events), text_of(events)
    assert (text, first, name) == ("I look.", ("f", '{"a": 1}'), "g")
    assert arguments.startswith('{"b": "')
    assert output.finish_reason is reason
    one = request(tools=TOOLS, parallel_tool_calls=False)
    _, output = output_of(builder, written, one, FinishReason.STOP)
    assert output.finish_reason is FinishReason.TOOL_CALLS, "the one that was told of is whole"


def test_one_call_where_no_more_are_wanted(builder: PromptBuilder) -> None:
    events, _ = output_of(builder, CALLS, request(tools=TOOLS, parallel_tool_calls=False), FinishReason.LENGTH)
    assert calls_of(events) == [("f", '{"a": 1}')]
