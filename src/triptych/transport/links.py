"""Whether a worker of another host can be reached, as ZeroMQ's own heartbeats and its socket monitor tell.

Used by the worker's mailbox, in its compute thread. ZeroMQ connects again by itself; what it must be asked is whether
messages may have been lost, or have been waiting for too long.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

LINK_PATIENCE_S = 4.0  # that a message may wait for its connection
HEARTBEAT_MS = 1000

_UP, _DOWN = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED


class Link:
    """Made before the socket connects."""

    def __init__(self, socket: zmq.Socket[bytes], now: float) -> None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * LINK_PATIENCE_S))
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_UP | _DOWN)
        self._is_up = False
        self._waiting_since_s: float | None = now  # a message waits for the connection

    def sent(self, now: float) -> None:
        if not self._is_up and self._waiting_since_s is None:
            self._waiting_since_s = now

    def lost(self, now: float) -> bool:
        """Whether, since the last call, messages may have been lost or one has waited for too long."""
        went_down = False
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
            except zmq.Again:
                break
            went_down |= self._is_up and event == _DOWN
            self._is_up = event == _UP
            self._waiting_since_s = None  # sent just now, or counted as lost
        if self._waiting_since_s is not None and now - self._waiting_since_s > LINK_PATIENCE_S:
            self._waiting_since_s = None
            return True
        return went_down

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
