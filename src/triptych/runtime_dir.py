"""The private directory of one deployment's unix sockets, and whether the router process that owns it lives.

The owner holds a lock on it, which ends with the process however it ends; orphaned workers ask for that lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from triptych.errors import ConfigError

LOCK = "lock"
TRIES = 20
TRY_S = 0.05
LONGEST_TEMP = 40  # unix socket paths may have 108 bytes


class RuntimeDir:
    """Made, locked and, where it was made here, removed by its owner. Raises ConfigError when another owns it."""

    def __init__(self, path: str = "") -> None:
        self._temporary = not path
        if self._temporary:
            temp = tempfile.gettempdir()
            path = tempfile.mkdtemp(prefix="tri-", dir=temp if len(temp) <= LONGEST_TEMP else "/tmp")
        else:
            os.makedirs(path, mode=0o700, exist_ok=True)
        self.path = path
        self._lock = os.open(Path(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"the runtime directory {path} is in use by another router") from None

    def close(self) -> None:
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_if_orphaned(path: str) -> bool:
    """Called by a worker that lost its parent. False while the owner lives: only the fork server between them died."""
    try:
        lock = os.open(Path(path, LOCK), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        for _ in range(TRIES):  # a dying process gives its pipes back a moment before its locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(TRY_S)
            else:
                shutil.rmtree(path, ignore_errors=True)
                return True
        return False
    finally:
        os.close(lock)
