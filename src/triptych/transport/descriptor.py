"""Hands the descriptor of a memory pool to other processes over a unix socket, and asks for one.

The server is a small daemon thread in every worker that shares its pool; it answers once for each consumer and touches
nothing else. The asking side runs on the consumer's compute thread. Called by `ShmTransport`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

from triptych.errors import ConfigError, PeerLostError
from triptych.types import WorkerAddress

CONNECT_TIMEOUT_S = 2.0

# magic, version of this exchange, pool bytes, name and epoch of the owner in UTF-8, padded with zeros
_HEADER = struct.Struct("<4sHQ64s64s")
_MAGIC = b"TPOL"
_VERSION = 1

logger = logging.getLogger(__name__)


class Offer(NamedTuple):
    """What a server hands out. The receiver owns `fd`."""

    fd: int
    num_bytes: int


class DescriptorServer:
    """Listens on `path` until `close`. `fd` stays the caller's and must outlive the server."""

    def __init__(self, path: Path, fd: int, num_bytes: int, name: str, epoch: str) -> None:
        fields = name.encode(), epoch.encode()
        if any(len(field) > 64 for field in fields):
            raise ConfigError(f"a worker's name and epoch have at most 64 bytes each: {name!r}, {epoch!r}")
        self.path = path
        self._fd = fd
        self._header = _HEADER.pack(_MAGIC, _VERSION, num_bytes, *fields)
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(str(path))
            self._listener.listen(128)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"cannot listen on {path}: {error}") from error
        self._thread = threading.Thread(target=self._serve, name="pool-descriptor", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # Out of descriptors, or a consumer that hung up: the next one may fare better.
                logger.warning("cannot accept on %s: %s", self.path, error)
                time.sleep(0.05)
                continue
            with connection:
                if _is_same_user(connection):
                    connection.settimeout(CONNECT_TIMEOUT_S)
                    # A consumer that went away meanwhile sees to itself.
                    with contextlib.suppress(OSError):
                        socket.send_fds(connection, [self._header], [self._fd])

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self._closing = True
        # Closing a socket does not wake the thread that waits on it; shutting it down does.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def request_descriptor(owner: WorkerAddress) -> Offer:
    """Ask the owner for its pool. Raises PeerLostError when it does not answer or lives under another epoch."""
    if not owner.pool:
        raise PeerLostError(f"worker {owner.name} shares no pool with other processes")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(owner.pool)
        if not _is_same_user(connection):
            raise PeerLostError(f"{owner.pool} belongs to another user")
        data, fds, _, _ = socket.recv_fds(connection, _HEADER.size + 1, 1)
        for fd in fds:
            # Python does that for every descriptor but received ones. A child must not keep the pool alive.
            os.set_inheritable(fd, False)
        num_bytes = _read_header(data, owner, len(fds))
        return Offer(fds.pop(), num_bytes)
    except OSError as error:
        raise PeerLostError(f"worker {owner.name} does not hand out its pool: {error}") from error
    finally:
        connection.close()
        for fd in fds:
            os.close(fd)


def _read_header(data: bytes, owner: WorkerAddress, num_fds: int) -> int:
    """The size of the pool. Raises PeerLostError when this is not the owner that the caller means."""
    if len(data) != _HEADER.size or num_fds != 1:
        raise PeerLostError(f"worker {owner.name} sent {len(data)} bytes and {num_fds} descriptors for its pool")
    magic, version, num_bytes, _, epoch = _HEADER.unpack(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise PeerLostError(f"worker {owner.name} offers its pool in form {magic!r} {version}, not {_VERSION}")
    if epoch.rstrip(b"\0") != owner.epoch.encode():
        raise PeerLostError(f"worker {owner.name} has been restarted: epoch {owner.epoch} is over")
    return int(num_bytes)


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as our user, by the kernel's word (unix(7), SO_PEERCRED)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def remove_stale_sockets(paths: list[Path]) -> None:
    """Remove those of our earlier lives that were killed: nobody listens there any more."""
    for path in paths:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # not ours to judge, or gone already
