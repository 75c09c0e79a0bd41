"""The pools of other workers that this one has mapped: the consumer's half of every transport.

Runs in every worker, on its compute thread; called by the transports, which know how to map.
"""

from __future__ import annotations

from collections.abc import Callable

from triptych.transport.pool import unmap
from triptych.types import WorkerAddress


class MappedPeers:
    """One read-only view a peer, made by `map_pool` at the first use of its epoch."""

    def __init__(self, map_pool: Callable[[WorkerAddress], memoryview]) -> None:
        self._map_pool = map_pool
        self._views: dict[str, memoryview] = {}  # by epoch
        self._epochs: dict[str, str] = {}  # by name: a later life takes the place of an earlier one

    def view(self, owner: WorkerAddress) -> memoryview:
        """All of the owner's pool. Raises what `map_pool` raises, PeerLostError."""
        view = self._views.get(owner.epoch)
        if view is None:
            view = self._map_pool(owner)
            # Nobody else may tell us that the earlier life is over, and its mapping holds all of its memory.
            self.forget(self._epochs.get(owner.name, ""))
            self._views[owner.epoch] = view
            self._epochs[owner.name] = owner.epoch
        return view

    def forget(self, epoch: str) -> None:
        view = self._views.pop(epoch, None)
        if view is not None:
            unmap(view)
            self._epochs = {name: known for name, known in self._epochs.items() if known != epoch}

    def check(self) -> None:
        """Raises AssertionError unless each name has one epoch and each epoch one view."""
        if sorted(self._epochs.values()) != sorted(self._views):
            raise AssertionError(f"views of {sorted(self._views)} for epochs {self._epochs}")

    def close(self) -> None:
        for epoch in list(self._views):
            self.forget(epoch)
