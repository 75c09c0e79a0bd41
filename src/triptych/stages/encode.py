"""The encode stage: media bytes in, leased embeddings out, each item computed once.

`PrepareItems` starts decoding at once; the vision tower runs only for `EncodeItems`. Items of several requests share
one forward, one item that several requests ask for is computed once, and what was computed stays in the encoder cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.clock import Clock
from triptych.engine.encoder_cache import EncoderCache
from triptych.engine.request_state import RequestKey
from triptych.errors import PoolExhaustedError
from triptych.handoff.embedding import EmbeddingPool, StoredEmbedding
from triptych.messages import (
    Cancel,
    EmbeddingPublished,
    EncodeItems,
    EncodeSource,
    ItemEncoded,
    ItemFailed,
    ItemToEncode,
    PrepareItems,
)
from triptych.stages.base import Mail, Routes
from triptych.stages.preprocess import Preprocessor
from triptych.types import Grid, WorkerAddress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

COUNTERS = (
    "encode_forwards_total",
    "encode_items_total",
    "encode_embeds_total",
    "encode_time_seconds_total",
    "encode_queue_time_seconds_total",
    "encode_failures_total",
    "encoder_cache_hits_total",
    "encoder_cache_misses_total",
    "encoder_cache_evictions_total",
    "encoder_cache_embeds",
)


class VisionTower(Protocol):
    """`models/vision.py` in a worker, `testing.FakeTower` in tests of what is around it."""

    num_forwards: int  # since start, those of probes not counted

    def encode(self, items: Sequence[tuple[NDArray[np.float32], Grid]]) -> list[torch.Tensor]:
        """For each item its embedding [num_embeds, hidden * (1 + deepstack layers)]."""
        ...

    def probe(self) -> None: ...


class _Prepared:
    """An item that some request brought, kept until no request that brought it is left."""

    def __init__(self, item: ItemToEncode) -> None:
        self.item = item
        self.patches: NDArray[np.float32] | None = None
        self.error = ""
        self.bad_media = False  # the error is the item's own fault
        self.submitted = False
        self.requests: set[RequestKey] = set()


class _Demand(NamedTuple):
    key: RequestKey
    mm_hash: str
    consumer: WorkerAddress
    since_s: float


class _Computed(NamedTuple):
    """A finished embedding that waits for room in the pool, and the forward that it came from."""

    embedding: torch.Tensor
    started_s: float
    duration_s: float


class _Cached:
    """An embedding in the pool, and the forward that it came from."""

    def __init__(self, stored: StoredEmbedding, computed: _Computed) -> None:
        self.stored = stored
        self.started_s = computed.started_s
        self.duration_s = computed.duration_s
        self.served = False

    def source_for(self, since_s: float) -> EncodeSource:
        """How a demand that was made at `since_s` got the item: exactly one demand pays for a forward."""
        if since_s > self.started_s + self.duration_s:
            return EncodeSource.ENCODER_CACHE
        return EncodeSource.SINGLE_FLIGHT if self.served else EncodeSource.FORWARD


class EncodeStage:
    def __init__(
        self,
        tower: VisionTower,
        preprocessor: Preprocessor,
        pool: EmbeddingPool,
        mail: Mail,
        clock: Clock,
        *,
        max_encode_embeds: int,
        cache_bytes: int,
    ) -> None:
        self._tower = tower
        self._preprocessor = preprocessor
        self._pool = pool
        self._mail = mail
        self._clock = clock
        self._max_encode_embeds = max_encode_embeds
        self._cache: EncoderCache[_Cached] = EncoderCache(cache_bytes, self._discard)
        self._num_cached_embeds = 0
        self._prepared: dict[str, _Prepared] = {}
        self._demands: list[_Demand] = []
        self._unstored: dict[str, _Computed] = {}
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)

    def routes(self) -> Routes:
        return {PrepareItems: self.prepare, EncodeItems: self.demand, Cancel: self.cancel}

    # -- messages ------------------------------------------------------------------------------------------------------

    def prepare(self, message: PrepareItems) -> None:
        key = RequestKey(message.request_id, message.attempt)
        for item in message.items:
            prepared = self._prepared.setdefault(item.mm_hash, _Prepared(item))
            prepared.requests.add(key)
            if item.mm_hash not in self._cache:
                self._submit(prepared)

    def _submit(self, prepared: _Prepared) -> None:
        if not prepared.submitted:
            prepared.submitted = True
            self._preprocessor.submit(prepared.item)

    def demand(self, message: EncodeItems) -> None:
        key = RequestKey(message.request_id, message.attempt)
        now = self._clock.now()
        for mm_hash in message.mm_hashes:
            if mm_hash not in self._prepared and mm_hash not in self._cache:
                self._fail(key, mm_hash, "the item was demanded and never brought", bad_media=False)
                continue
            hit = mm_hash in self._cache
            self.counters["encoder_cache_hits_total" if hit else "encoder_cache_misses_total"] += 1
            self._demands.append(_Demand(key, mm_hash, message.consumer, now))

    def cancel(self, message: Cancel) -> None:
        key = RequestKey(message.request_id, message.attempt)
        self._demands = [demand for demand in self._demands if demand.key != key]
        for mm_hash in [h for h, prepared in self._prepared.items() if key in prepared.requests]:
            self._prepared[mm_hash].requests.discard(key)
            if not self._prepared[mm_hash].requests:
                del self._prepared[mm_hash]

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, *, forward: bool = True) -> bool:
        """Serve what the cache holds, then run the tower once over what is demanded and preprocessed.

        Without `forward` the tower does not run: somebody else's work on this worker goes first.
        """
        self._collect_preprocessed()
        self._store_computed()
        served = self._serve_cached()
        batch = self._next_batch() if forward else []
        if batch:
            self._run(batch)
            self._store_computed()
            self._serve_cached()
        self._cache.shrink()
        return served or bool(batch)

    def _collect_preprocessed(self) -> None:
        for done in self._preprocessor.poll():
            prepared = self._prepared.get(done.mm_hash)
            if prepared is not None:
                prepared.patches, prepared.error, prepared.bad_media = done.patches, done.error, done.bad_media
                prepared.submitted = not done.error or done.bad_media  # else the next demand tries again

    def _serve_cached(self) -> bool:
        """Publish every demanded item that is in the cache, fail those that cannot be decoded."""
        waiting: list[_Demand] = []
        for demand in self._demands:
            cached = self._cache.get(demand.mm_hash)
            prepared = self._prepared.get(demand.mm_hash)
            if cached is not None:
                self._publish(demand, cached)
            elif prepared is None:
                self._fail(demand.key, demand.mm_hash, "the item is not here any more", bad_media=False)
            elif prepared.error:
                self._fail(demand.key, demand.mm_hash, prepared.error, bad_media=prepared.bad_media)
            else:
                if demand.mm_hash not in self._unstored:
                    self._submit(prepared)  # it was cached when it was brought, and evicted since
                waiting.append(demand)
        served = len(waiting) < len(self._demands)
        self._demands = waiting
        for prepared in self._prepared.values():
            if not prepared.bad_media:
                prepared.error = ""  # a failure of the tower may pass: the next demand tries again
        return served

    def _publish(self, demand: _Demand, cached: _Cached) -> None:
        source = cached.source_for(demand.since_s)
        cached.served = True
        encode_s = cached.duration_s if source is EncodeSource.FORWARD else 0.0
        queue_s = max(self._clock.now() - demand.since_s - encode_s, 0.0)
        self.counters["encode_queue_time_seconds_total"] += queue_s
        request_id, attempt = demand.key
        handle = self._pool.publish(cached.stored, demand.consumer, demand.key)
        self._mail.to_worker(demand.consumer, EmbeddingPublished(request_id, attempt, demand.mm_hash, handle))
        self._mail.to_router(ItemEncoded(request_id, attempt, demand.mm_hash, source, queue_s, encode_s))

    def _fail(self, key: RequestKey, mm_hash: str, message: str, *, bad_media: bool) -> None:
        self.counters["encode_failures_total"] += 1
        self._mail.to_router(ItemFailed(key.request_id, key.attempt, mm_hash, message, bad_media))

    def _next_batch(self) -> list[_Prepared]:
        """Distinct demanded items whose patches are ready, first come first served, within the budget of embeds."""
        batch: dict[str, _Prepared] = {}
        num_embeds = 0
        if self._unstored:
            return []  # no room for what is computed already
        for demand in self._demands:
            prepared = self._prepared[demand.mm_hash]
            if prepared.patches is None or demand.mm_hash in batch:
                continue
            num_embeds += prepared.item.metadata.num_embeds
            if batch and num_embeds > self._max_encode_embeds:
                break
            batch[demand.mm_hash] = prepared
        return list(batch.values())

    def _run(self, batch: list[_Prepared]) -> None:
        """One forward; if it fails, one an item, so that a poisoned item fails only its own requests."""
        started_s = self._clock.now()
        try:
            embeddings = self._tower.encode([(_patches(prepared), prepared.item.metadata.grid) for prepared in batch])
        except (RuntimeError, ValueError) as error:
            logger.warning("a forward over %d items failed: %s", len(batch), error)
            if len(batch) == 1:
                batch[0].error = f"the vision tower failed on this image: {error}"
            else:
                for prepared in batch:
                    self._run([prepared])
            return
        duration_s = self._clock.now() - started_s
        self.counters["encode_forwards_total"] = float(self._tower.num_forwards)
        self.counters["encode_time_seconds_total"] += duration_s
        for prepared, embedding in zip(batch, embeddings, strict=True):
            self.counters["encode_items_total"] += 1
            self.counters["encode_embeds_total"] += embedding.shape[0]
            self._unstored[prepared.item.mm_hash] = _Computed(embedding, started_s, duration_s)
            prepared.patches, prepared.submitted = None, False

    def _store_computed(self) -> None:
        """Move finished embeddings into the pool, evicting old ones; without room they wait for a lease to end."""
        for mm_hash, computed in list(self._unstored.items()):
            try:
                stored = self._store(computed.embedding)
            except PoolExhaustedError as error:
                if self._pool.num_leased:
                    return  # a lease that ends makes room
                if mm_hash in self._prepared:
                    self._prepared[mm_hash].error = f"the embedding does not fit into the encode worker's pool: {error}"
            else:
                self._cache.put(mm_hash, _Cached(stored, computed), stored.num_bytes)
                self._num_cached_embeds += stored.shape[0]
            del self._unstored[mm_hash]

    def _store(self, embedding: torch.Tensor) -> StoredEmbedding:
        while True:
            try:
                return self._pool.store(embedding)
            except PoolExhaustedError:
                if not self._cache.evict_one():
                    raise

    def _discard(self, cached: _Cached) -> None:
        self._num_cached_embeds -= cached.stored.shape[0]
        self._pool.discard(cached.stored)

    # -- life ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.counters["encoder_cache_embeds"] = float(self._num_cached_embeds)
        self.counters["encoder_cache_evictions_total"] = float(self._cache.num_evictions)

    def probe(self) -> None:
        self._tower.probe()

    @property
    def is_preprocessing(self) -> bool:
        """Whether pictures are being decoded and resized, in processes on this worker's cores."""
        return any(p.submitted and p.patches is None and not p.error for p in self._prepared.values())

    def num_live(self) -> int:
        return len(self._demands)

    def num_waiting_embeds(self) -> int:
        waiting = {demand.mm_hash for demand in self._demands}
        return sum(self._prepared[h].item.metadata.num_embeds for h in waiting if h in self._prepared)

    def num_cached_embeds(self) -> int:
        return self._num_cached_embeds

    @property
    def cached_bytes(self) -> int:
        return self._cache.used_bytes

    def check(self) -> None:
        self._cache.check()
        for mm_hash, prepared in self._prepared.items():
            assert prepared.requests, f"{mm_hash} is kept for nobody"

    def close(self) -> None:
        self._preprocessor.close()


def _patches(prepared: _Prepared) -> NDArray[np.float32]:
    assert prepared.patches is not None, "only items with patches are batched"
    return prepared.patches
