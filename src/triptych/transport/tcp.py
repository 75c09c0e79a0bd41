"""Pools over TCP: for workers of other hosts, beside shared memory for those of this one, or alone.

Runs in every worker that other hosts can reach, on its compute thread; called by `handoff/`. Which way a fetch takes is
found by trying: a pool whose socket answers here, under the owner's epoch, is on this host. A path of another host, of
another container or of another deployment does not answer so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.errors import PeerLostError
from triptych.messages import Range
from triptych.transport.base import Fetch, Slot
from triptych.transport.io_thread import IoThread
from triptych.transport.landing import LANDING_BYTES
from triptych.transport.pooled import Mapped, PooledTransport
from triptych.transport.tcp_client import PoolClient, join_endpoint
from triptych.transport.tcp_server import PATIENCE_S, PoolServer
from triptych.types import WorkerAddress


class TcpTransport:
    """Serves the pool of `local` over TCP, and fetches what `local` cannot map. It owns `local` from the start.

    `always` fetches over TCP from workers of this host too. Raises ConfigError when the address cannot be had.
    """

    def __init__(
        self,
        local: PooledTransport,
        epoch: str,
        host: str,
        port: int = 0,
        *,
        always: bool = False,
        patience_s: float = PATIENCE_S,
        landing_bytes: int = LANDING_BYTES,
    ) -> None:
        self.name = "tcp" if always else "auto"
        self.pool_path = "" if always else local.pool_path
        self._local = local
        self._epoch = epoch
        self._always = always
        self._remote: set[str] = set()  # epochs whose pool cannot be mapped here
        self._closed = False
        self._io = IoThread("transport")
        try:
            self._client = PoolClient(self._io, patience_s, landing_bytes)
            self._server = PoolServer(self._io, local.view, epoch, host, port)
        except BaseException:
            self._io.close()
            local.close()
            raise
        self.data_endpoint = join_endpoint(host, self._server.port)

    def allocate(self, num_bytes: int) -> Slot:
        return self._local.allocate(num_bytes)

    def memory(self, slot: Slot) -> memoryview:
        return self._local.memory(slot)

    def free(self, slot: Slot) -> None:
        self._local.free(slot)

    def offer(self, ranges: Sequence[Range]) -> bytes:
        self._local.offer(ranges)
        return self._server.offer(ranges)

    def withdraw(self, ticket: bytes) -> None:
        self._server.withdraw(ticket)

    def fetch(self, owner: WorkerAddress, ranges: Sequence[Range], ticket: bytes = b"") -> Fetch:
        if not ranges:
            return Mapped([])
        if owner.epoch == self._epoch:
            return self._local.fetch(owner, ranges)
        if not self._always and owner.epoch not in self._remote:
            try:
                return self._local.fetch(owner, ranges)
            except PeerLostError:
                if not owner.data:
                    raise
                self._remote.add(owner.epoch)
        if not owner.data:
            raise PeerLostError(f"worker {owner.name} serves its pool to nobody")
        return self._client.fetch(owner, ranges, ticket)

    def on_arrival(self, wake: Callable[[], None]) -> None:
        self._client.wake = wake

    def forget(self, owner_epoch: str) -> None:
        self._local.forget(owner_epoch)
        self._remote.discard(owner_epoch)
        self._client.forget(owner_epoch)

    @property
    def used_bytes(self) -> int:
        return self._local.used_bytes

    @property
    def landed_bytes(self) -> int:
        """Bytes of fetches that run or are not closed yet."""
        return self._client.landing.used_bytes

    @property
    def num_offers(self) -> int:
        return self._server.num_offers

    @property
    def counters(self) -> dict[str, float]:
        return {
            "tcp_fetches_total": float(self._client.num_fetches),
            "tcp_fetch_failures_total": float(self._client.num_failures),
            "tcp_fetched_bytes_total": float(self._client.num_bytes),
            "tcp_sent_bytes_total": float(self._server.num_bytes),
        }

    def check(self) -> None:
        self._local.check()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.close()
            self._io.close()
            self._client.landing.close()
            self._local.close()
