"""What the API needs of the router, as protocols: the router is handed in, and tests hand in a small fake.

Runs in the router process. `router.router.Router` satisfies it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from triptych.observe.metrics import WorkerView
from triptych.types import Event, Heartbeat, Prompt, Request, WorkerInfo


class RegistryLike(Protocol):
    def register(self, info: WorkerInfo) -> None:
        """Raises ConfigError when the worker is unlike those that serve already."""
        ...

    def heartbeat(self, beat: Heartbeat) -> bool:
        """False: unknown here, register again."""
        ...

    def leave(self, name: str, epoch: str) -> None: ...

    def lost(self, name: str) -> None:
        """The launcher saw the process die."""
        ...

    def workers(self) -> Sequence[WorkerView]: ...


class VocabularyLike(Protocol):
    @property
    def size(self) -> int: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def name(self, token_id: int) -> str:
        """As the tokenizer's file spells it."""
        ...


class RouterLike(Protocol):
    @property
    def registry(self) -> RegistryLike: ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocabulary(self) -> VocabularyLike: ...

    @property
    def num_running(self) -> int: ...

    def admit(self) -> None:
        """Raises OverloadedError where one more request would be refused, before its body is read."""
        ...

    def handle(self, request: Request) -> AsyncIterator[Event]:
        """The events in the order of `types.Event`, or a TriptychError. Closing it cancels the request."""
        ...

    async def lay_out(self, request: Request) -> Prompt:
        """The request's prompt, its images' headers read, without running it. Raises as `handle` does."""
        ...

    def drain(self, name: str) -> bool:
        """Tell a worker to finish what it has and leave. False: there is none of this name."""
        ...

    def ready(self) -> bool:
        """Every stage has a live worker."""
        ...

    async def health(self) -> dict[str, str]:
        """Probes every worker with real work: "" or what is wrong, by worker name."""
        ...
