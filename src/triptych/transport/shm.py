"""Shared memory between the workers of one host: one sealed memfd a process, mapped once by each consumer.

Runs in every worker, on its compute thread; called by `handoff/`. After the first fetch from an epoch a fetch is a
slice: no system call, no copy. A memfd has no name to leak and lives as long as its last holder. Linux 5.1 or later.
"""

from __future__ import annotations

import fcntl
import glob
import mmap
import os
from pathlib import Path

from triptych.errors import ConfigError, PeerLostError
from triptych.transport.descriptor import DescriptorServer, remove_stale_sockets, request_descriptor
from triptych.transport.pool import map_size
from triptych.transport.pooled import PooledTransport
from triptych.types import WorkerAddress

# A pool that could be cut short would kill its readers by SIGBUS.
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Only the mapping that exists when it is set may write (linux/fcntl.h; missing in Python's fcntl).
_F_SEAL_FUTURE_WRITE = 0x10


class ShmTransport(PooledTransport):
    """The worker's own pool behind a unix socket in `runtime_dir`, and the mapped pools of others by epoch.

    `prefault` takes all memory at once: the first touch of a page costs twenty times its copy. Raises ConfigError
    when the memory or the socket cannot be had.
    """

    name = "shm"

    def __init__(
        self, address_name: str, epoch: str, pool_bytes: int, runtime_dir: str | Path, prefault: bool = True
    ) -> None:
        num_bytes = map_size(pool_bytes)
        self._fd, mapping = _create_pool(f"triptych-{address_name}", num_bytes, prefault)
        super().__init__(epoch, mapping, _map_peer)
        directory = Path(runtime_dir).absolute()  # peers may run in another directory
        remove_stale_sockets(list(directory.glob(f"{glob.escape(address_name)}.*.pool")))
        # The epoch is part of the path: an earlier life that still winds down removes its own socket, not ours.
        path = directory / f"{address_name}.{epoch[:16]}.pool"
        try:
            self._server = DescriptorServer(path, self._fd, num_bytes, address_name, epoch)
        except ConfigError:
            self._close_pool()
            os.close(self._fd)
            raise
        self.pool_path = str(path)

    def close(self) -> None:
        if self._close_pool():
            self._server.close()
            os.close(self._fd)


def _create_pool(label: str, num_bytes: int, prefault: bool) -> tuple[int, mmap.mmap]:
    """A memfd and the one mapping of it that may write. The caller owns both."""
    # The kernel promises a memfd any size, and kills a process when it cannot keep that.
    if num_bytes > _available_bytes():
        raise ConfigError(f"a memory pool of {num_bytes} bytes; the machine has {_available_bytes()} available")
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"cannot get a memory pool of {num_bytes} bytes: {error}") from error
    return fd, mapping


def _available_bytes() -> int:
    """Memory that can be had without swapping, by the kernel's estimate (proc_meminfo(5))."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _map_peer(owner: WorkerAddress) -> memoryview:
    """Map the owner's pool for reading. Raises PeerLostError when it is gone or offers memory that could be cut."""
    fd, num_bytes = request_descriptor(owner)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS or os.fstat(fd).st_size != num_bytes:
            raise PeerLostError(f"worker {owner.name} offers a pool that is not sealed at {num_bytes} bytes")
        return memoryview(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ))
    except OSError as error:
        raise PeerLostError(f"cannot map the pool of worker {owner.name}: {error}") from error
    finally:
        os.close(fd)
