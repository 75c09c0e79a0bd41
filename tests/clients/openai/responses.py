"""The responses API: text and pictures in, whole and streamed, instructions, usage, structured output."""

from __future__ import annotations

from typing import Any

from tests.clients.openai.connect import connect
from tests.clients.openai.structured import Finding
from tests.clients.script import JSON_TOKENS, MAX_TOKENS, Server, data_url, questions
from triptych.demo.pages import Question


def response_input(question: Question) -> list[Any]:
    content: list[Any] = [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": data_url(part), "detail": "auto"}
        for part in question.parts
    ]
    return [{"role": "user", "content": content}]


def response_of_text(server: Server) -> None:
    answer = connect(server).responses.create(
        model=server.model, input="Count from 2 to 7.", temperature=0, max_output_tokens=MAX_TOKENS
    )
    assert (answer.object, answer.status, answer.error) == ("response", "completed", None), answer
    assert answer.output_text == "2 3 4 5 6 7", answer
    (message,) = answer.output
    assert message.type == "message", answer
    assert message.role == "assistant", answer
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens, usage
    assert usage.output_tokens > 0, usage
    cut = connect(server).responses.create(model=server.model, input="Count from 0 to 9.", max_output_tokens=3)
    assert cut.status == "incomplete", cut
    assert cut.incomplete_details is not None, cut
    assert cut.incomplete_details.reason == "max_output_tokens", cut


def response_about_pictures(server: Server) -> None:
    client = connect(server)
    for question in questions(4):
        answer = client.responses.create(
            model=server.model, input=response_input(question), temperature=0, max_output_tokens=MAX_TOKENS
        )
        assert answer.output_text == question.answer, (question.text, question.answer, answer.output_text)
    told = client.responses.create(
        model=server.model,
        instructions="Answer in one word.",
        input=response_input(questions(1)[0]),
        temperature=0,
        max_output_tokens=MAX_TOKENS,
    )
    assert told.instructions == "Answer in one word.", told
    assert told.output_text, told


def response_stream(server: Server) -> None:
    (question,) = questions(1)
    events = list(
        connect(server).responses.create(
            model=server.model,
            input=response_input(question),
            temperature=0,
            max_output_tokens=MAX_TOKENS,
            stream=True,
        )
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] == "response.completed", kinds
    for kind in ("response.output_item.added", "response.content_part.added", "response.output_text.done"):
        assert kinds.count(kind) == 1, kinds
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == question.answer, (text, question.answer)
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == question.answer, last
    assert last.response.usage is not None, last


def response_stream_events(server: Server) -> None:
    """The SDK's own reading of the stream."""
    (question,) = questions(1)
    with connect(server).responses.stream(
        model=server.model, input=response_input(question), temperature=0, max_output_tokens=MAX_TOKENS
    ) as events:
        last = events.get_final_response()
    assert last.output_text == question.answer, last


def response_parse(server: Server) -> None:
    answer = connect(server).responses.parse(
        model=server.model,
        input=response_input(questions(1)[0]),
        temperature=0,
        max_output_tokens=JSON_TOKENS,
        text_format=Finding,
    )
    assert isinstance(answer.output_parsed, Finding), answer


CHECKS = (response_of_text, response_about_pictures, response_stream, response_stream_events, response_parse)
