"""The answers of the Responses API, whole and as typed events with sequence numbers. Built from router events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from triptych.api.errors import error_body
from triptych.api.gather import Answer
from triptych.api.logprobs import ChatLogprob, chat_logprobs
from triptych.api.response_body import (
    IncompleteDetails,
    InputTokensDetails,
    NamedFunction,
    OutputItem,
    ResponseBody,
    ResponseError,
    ResponseEvent,
    ResponseFunction,
    ResponseUsage,
    TextBody,
)
from triptych.api.response_items import CallItem, Item, MessageItem
from triptych.api.sse import typed
from triptych.types import ChoiceFinished, Event, Finished, FinishReason, TextDelta, TokenLogprobs, ToolCallDelta, Usage


class ResponseForm(msgspec.Struct, frozen=True, kw_only=True):
    """What the request fixes of its response."""

    response_id: str
    model: str
    created_at: int  # seconds of the epoch
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: TextBody
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[ResponseFunction]
    top_logprobs: int
    user: str | None
    logprobs: bool

    def whole(self, answers: Sequence[Answer]) -> ResponseBody:
        (answer,) = answers
        (choice,) = answer.choices
        items: list[Item] = []
        if choice.text or not choice.calls:
            message = MessageItem(0, self.item_id(0))
            message.add(choice.text, self.scored(choice.logprobs))
            items.append(message)
        for call in choice.calls.values():
            item = CallItem(len(items), self.item_id(len(items)), call.id, call.name)
            item.add(call.arguments)
            items.append(item)
        *done, last = items
        output: list[OutputItem] = [*(item.body("completed") for item in done), last.body(_status(choice.end))]
        return self.ended(output, choice.end, answer.end.usage)

    def stream(self) -> ResponseStream:
        return ResponseStream(self)

    def item_id(self, index: int) -> str:
        return f"item_{self.response_id.removeprefix('resp_')}_{index}"

    def scored(self, logprobs: Sequence[TokenLogprobs]) -> list[ChatLogprob]:
        return chat_logprobs(logprobs, False).content if self.logprobs else []

    def ended(self, output: list[OutputItem], end: ChoiceFinished, usage: Usage) -> ResponseBody:
        status = _status(end)
        return msgspec.structs.replace(
            self.body("completed" if status == "completed" else "incomplete", output),
            completed_at=int(time.time()),
            incomplete_details=None if status == "completed" else IncompleteDetails(),
            usage=ResponseUsage(
                usage.prompt_tokens,
                InputTokensDetails(usage.cached_tokens),
                usage.completion_tokens,
                usage.prompt_tokens + usage.completion_tokens,
            ),
        )

    def body(
        self, status: Literal["in_progress", "completed", "incomplete", "failed"], output: list[OutputItem]
    ) -> ResponseBody:
        fields = {
            name: getattr(self, name) for name in self.__struct_fields__ if name not in ("response_id", "logprobs")
        }
        return ResponseBody(id=self.response_id, status=status, output=output, **fields)


def _status(end: ChoiceFinished) -> Literal["completed", "incomplete"]:
    return "incomplete" if end.finish_reason is FinishReason.LENGTH else "completed"


class ResponseStream:
    """One item is open at a time: the message's text, or a call."""

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        self._sequence_number = 0
        self._items: list[Item] = []
        self._is_open = False  # the last item
        self._output: list[OutputItem] = []  # items that are done
        self._end: ChoiceFinished | None = None
        self._usage = Usage(0, 0)

    def event(self, prompt: int, event: Event) -> Iterator[bytes]:
        if self._sequence_number == 0:
            for kind in ("response.created", "response.in_progress"):
                yield self._response(kind, self._form.body("in_progress", []))
        match event:
            case TextDelta() if event.text or (event.logprobs and self._form.logprobs):
                message = self._items[-1] if self._is_open else None
                if not isinstance(message, MessageItem):
                    yield from self._close()
                    message = MessageItem(len(self._items), self._form.item_id(len(self._items)))
                    yield from self._open(message)
                yield from self._numbered(message.add(event.text, self._form.scored(event.logprobs)))
            case ToolCallDelta():
                if event.name:
                    yield from self._close()
                    index = len(self._items)
                    yield from self._open(CallItem(index, self._form.item_id(index), event.id, event.name))
                call = self._items[-1]
                assert isinstance(call, CallItem), "a call begins with its name"
                if event.arguments:
                    yield from self._numbered(call.add(event.arguments))
            case ChoiceFinished():
                self._end = event
            case Finished():
                self._usage = event.usage

    def end(self) -> Iterator[bytes]:
        assert self._end is not None, "only a finished stream ends"
        if not self._items:
            yield from self._open(MessageItem(0, self._form.item_id(0)))
        yield from self._close(_status(self._end))
        body = self._form.ended(self._output, self._end, self._usage)
        yield self._response(f"response.{body.status}", body)

    def failed(self, error: Exception) -> Iterator[bytes]:
        reason = ResponseError(error_body(error).error.message)
        body = msgspec.structs.replace(self._form.body("failed", self._output), error=reason)
        yield self._response("response.failed", body)

    def _open(self, item: Item) -> Iterator[bytes]:
        self._items.append(item)
        self._is_open = True
        yield from self._numbered(item.opening())

    def _close(self, status: Literal["completed", "incomplete"] = "completed") -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            item = self._items[-1]
            yield from self._numbered(item.closing(status))
            self._output.append(item.body(status))

    def _response(self, kind: str, body: ResponseBody) -> bytes:
        return self._number(ResponseEvent(type=kind, sequence_number=0, response=body))

    def _numbered(self, events: Iterator[msgspec.Struct]) -> Iterator[bytes]:
        for event in events:
            yield self._number(event)

    def _number(self, event: msgspec.Struct) -> bytes:
        numbered = msgspec.structs.replace(event, sequence_number=self._sequence_number)
        self._sequence_number += 1
        return typed(getattr(event, "type"), numbered)  # noqa: B009
