"""One event loop in a thread of its own, for the sockets of the TCP transport: the compute thread never waits for them.

Runs in every worker that has a TCP transport; called by `tcp.py`, `tcp_server.py` and `tcp_client.py`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class IoThread:
    """Runs until `close`, which cancels what still runs and waits for its end."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(asyncio.sleep(0))  # what their ends left to do
        finally:
            self.loop.close()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin it there; may be called from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, function: Callable[[], Result]) -> Result:
        """Call it there and wait for the result; for start and end, not for the way between."""

        async def wrapped() -> Result:
            return function()

        return self.start(wrapped()).result()

    def post(self, function: Callable[[], None]) -> None:
        """Call it there, after all that was started or posted before, and do not wait."""
        self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


async def readable(sock: socket.socket) -> None:
    """Wait for bytes, or for a connection if it listens."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill the view. Raises ConnectionError when the other end stops before."""
    loop = asyncio.get_running_loop()
    at = 0
    while at < len(view):
        count = await loop.sock_recv_into(sock, view[at:])
        if count == 0:
            raise ConnectionError(f"the connection ended after {at} of {len(view)} bytes")
        at += count


async def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Raises ConnectionError when the other end stops before."""
    buffer = bytearray(num_bytes)
    await receive_into(sock, memoryview(buffer))
    return bytes(buffer)
