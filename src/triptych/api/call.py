"""One checked call of the API: what the router gets, and the form that its answer takes. Made by the parsers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from triptych.api.gather import Answer
from triptych.types import Event, Request


class StreamForm(Protocol):
    """One answer as server-sent events, each given as the bytes that go out. It keeps what was sent so far."""

    def event(self, prompt: int, event: Event) -> Iterator[bytes]:
        """What the event of the prompt's request (numbered from 0) adds; the first call also opens the answer."""
        ...

    def end(self) -> Iterator[bytes]:
        """After the last event of all prompts."""
        ...

    def failed(self, error: Exception) -> Iterator[bytes]:
        """Instead of all that would have followed."""
        ...


class Form(Protocol):
    def whole(self, answers: Sequence[Answer]) -> msgspec.Struct:
        """The body of a whole answer, from what each prompt's request gave."""
        ...

    def stream(self) -> StreamForm: ...


class Call(NamedTuple):
    requests: list[Request]  # one a prompt
    form: Form
    stream: bool
    request_id: str  # goes out as `x-request-id`
