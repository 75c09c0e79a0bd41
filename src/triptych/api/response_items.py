"""The items of a response while they grow: a message's text, a function call; and the events that tell of it.

The events' sequence numbers are set by the stream that sends them.
"""

from __future__ import annotations

from collections.abc import Iterator

from triptych.api.logprobs import ChatLogprob
from triptych.api.response_body import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ItemEvent,
    ItemStatus,
    OutputCall,
    OutputMessage,
    OutputText,
    PartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    TypedEvent,
)


class MessageItem:
    def __init__(self, index: int, item_id: str) -> None:
        self._index = index
        self._id = item_id
        self._text = ""
        self._logprobs: list[ChatLogprob] = []

    def opening(self) -> Iterator[TypedEvent]:
        yield ItemEvent(
            type="response.output_item.added",
            sequence_number=0,
            output_index=self._index,
            item=OutputMessage(self._id, "in_progress", []),
        )
        yield self._part("response.content_part.added", OutputText(""))

    def add(self, text: str, logprobs: list[ChatLogprob]) -> Iterator[TypedEvent]:
        """Takes the text in at once, whether or not the events are read."""
        self._text += text
        self._logprobs += logprobs
        return iter(
            [
                TextDeltaEvent(
                    type="response.output_text.delta",
                    sequence_number=0,
                    item_id=self._id,
                    output_index=self._index,
                    delta=text,
                    logprobs=logprobs,
                )
            ]
        )

    def closing(self, status: ItemStatus) -> Iterator[TypedEvent]:
        yield TextDoneEvent(
            type="response.output_text.done",
            sequence_number=0,
            item_id=self._id,
            output_index=self._index,
            text=self._text,
            logprobs=self._logprobs,
        )
        yield self._part("response.content_part.done", self._content())
        yield ItemEvent(
            type="response.output_item.done", sequence_number=0, output_index=self._index, item=self.body(status)
        )

    def body(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self._id, status, [self._content()])

    def _content(self) -> OutputText:
        return OutputText(self._text, list(self._logprobs))

    def _part(self, kind: str, part: OutputText) -> PartEvent:
        return PartEvent(type=kind, sequence_number=0, item_id=self._id, output_index=self._index, part=part)


class CallItem:
    def __init__(self, index: int, item_id: str, call_id: str, name: str) -> None:
        self._index = index
        self._id = item_id
        self._call_id = call_id
        self._name = name
        self._arguments = ""

    def opening(self) -> Iterator[TypedEvent]:
        yield ItemEvent(
            type="response.output_item.added",
            sequence_number=0,
            output_index=self._index,
            item=self.body("in_progress"),
        )

    def add(self, arguments: str) -> Iterator[TypedEvent]:
        """Takes them in at once, whether or not the events are read."""
        self._arguments += arguments
        return iter(
            [
                ArgumentsDeltaEvent(
                    type="response.function_call_arguments.delta",
                    sequence_number=0,
                    item_id=self._id,
                    output_index=self._index,
                    delta=arguments,
                )
            ]
        )

    def closing(self, status: ItemStatus) -> Iterator[TypedEvent]:
        yield ArgumentsDoneEvent(
            type="response.function_call_arguments.done",
            sequence_number=0,
            item_id=self._id,
            output_index=self._index,
            name=self._name,
            arguments=self._arguments,
        )
        yield ItemEvent(
            type="response.output_item.done", sequence_number=0, output_index=self._index, item=self.body(status)
        )

    def body(self, status: ItemStatus) -> OutputCall:
        return OutputCall(self._id, self._call_id, self._name, self._arguments, status)


Item = MessageItem | CallItem
