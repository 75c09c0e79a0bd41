"""The workers that the router may plan with: registered, heard of lately, alike, and not suspect or leaving.

Fed by `api/admin.py` (registration and heartbeats) and by the router's probes; read by the planner.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from triptych.clock import Clock
from triptych.errors import ConfigError, NoCapacityError
from triptych.router.policy import DecodeLoad
from triptych.types import Heartbeat, Load, Stage, WorkerAddress, WorkerInfo

logger = logging.getLogger(__name__)

# Before a worker has done enough to know: what a small model takes on one core. Only their ratio matters.
SECONDS_AN_EMBED = 2e-3
SECONDS_A_PROMPT_TOKEN = 1.2e-3
LATE_S = 0.5  # between two sweeps
CUT_S = 30.0  # then a link is tried again
FRESH_S = 1.0  # that news of a link may have waited for whoever reads it


class RegisteredWorker:
    """One life of a worker as the router knows it. The planner adds and takes back what it has in flight there."""

    def __init__(self, info: WorkerInfo, now: float) -> None:
        self.info = info
        self.load = Load()
        self.counters: dict[str, float] = {}
        self.heard_s = now
        self.draining = False
        self.suspect = ""  # why the last probe failed
        self.num_inflight_requests = 0
        self.num_inflight_tokens = 0  # of prompts whose first token has not come
        self.num_kv_tokens = 0  # prompts and outputs of the requests in flight
        self.num_inflight_items = 0
        self.num_inflight_embeds = 0

    @property
    def address(self) -> WorkerAddress:
        return self.info.address

    @property
    def name(self) -> str:
        return self.info.address.name

    @property
    def seconds_an_embed(self) -> float:
        """Of the tower's time; from the worker's own counters once it has encoded something."""
        num_embeds = self.counters.get("encode_embeds_total", 0.0)
        return self.counters["encode_time_seconds_total"] / num_embeds if num_embeds else SECONDS_AN_EMBED

    @property
    def seconds_a_prompt_token(self) -> float:
        """Of the engine's time."""
        return self.load.prompt_token_s or SECONDS_A_PROMPT_TOKEN

    @property
    def decode_load(self) -> DecodeLoad:
        return DecodeLoad(self.num_inflight_requests, self.num_kv_tokens, self.load.max_kv_tokens)

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        return "suspect" if self.suspect else "live"


class Registry:
    """`on_lost` is told of every life that ended, once, whatever ended it."""

    def __init__(
        self,
        version_hash: str,
        heartbeat_ttl_s: float,
        clock: Clock,
        on_lost: Callable[[WorkerAddress], None],
        on_joined: Callable[[RegisteredWorker], None] = lambda worker: None,
    ) -> None:
        self._version_hash = version_hash
        self._heartbeat_ttl_s = heartbeat_ttl_s
        self._clock = clock
        self._on_lost = on_lost
        self._on_joined = on_joined
        self._swept_s = clock.now()
        self._workers: dict[str, RegisteredWorker] = {}
        self._lost_epochs: set[str] = set()
        self._cut_until_s: dict[frozenset[str], float] = {}  # by the names of two workers

    def register(self, info: WorkerInfo) -> None:
        """Raises ConfigError for a worker that embeddings and KV must not be exchanged with, and for a life that was
        declared lost: its requests went elsewhere and its leases ended, so it has to start anew."""
        if info.max_model_len < 1:
            raise ConfigError(f"worker {info.address.name} says that it has room for {info.max_model_len} tokens")
        if info.address.epoch in self._lost_epochs:
            raise ConfigError(f"worker {info.address.name} epoch {info.address.epoch} was declared lost; start it anew")
        if info.version_hash != self._version_hash:
            raise ConfigError(
                f"worker {info.address.name} has version hash {info.version_hash}, this deployment "
                f"{self._version_hash}: model, weights, dtype, block size or protocol differ"
            )
        self._check_kv_layout(info)
        known = self._workers.get(info.address.name)
        if known is not None and known.address.epoch != info.address.epoch:
            self._lose(known, "it was restarted")
        if info.address.name not in self._workers:
            worker = self._workers[info.address.name] = RegisteredWorker(info, self._clock.now())
            logger.info("worker=%s epoch=%s joined: %s", info.address.name, info.address.epoch, ", ".join(info.stages))
            self._on_joined(worker)

    def _check_kv_layout(self, info: WorkerInfo) -> None:
        """KV moves as whole blocks: what is inside must be alike."""
        for worker in self._workers.values():
            theirs = worker.info.kv_layout
            if worker.name != info.address.name and info.kv_layout and theirs and info.kv_layout != theirs:
                raise ConfigError(
                    f"worker {info.address.name} lays KV out in {info.kv_layout}, worker {worker.name} in {theirs}: "
                    "set model.kernels to torch for both"
                )

    def heartbeat(self, beat: Heartbeat) -> bool:
        """False when this life of the worker is unknown: it must register (again)."""
        worker = self.find(beat.name, beat.epoch)
        if worker is None:
            return False
        worker.heard_s, worker.load, worker.counters = self._clock.now(), beat.load, beat.counters
        worker.draining |= beat.draining  # once told to leave, it leaves
        return True

    def leave(self, name: str, epoch: str) -> None:
        worker = self.find(name, epoch)
        if worker is not None:
            self._lose(worker, "it left", logging.INFO)

    def sweep(self) -> None:
        """Lose the workers that have been silent for too long.

        Called every moment. Where a call comes late this process was stopped or busy: it heard nobody then, and that
        is no worker's silence.
        """
        now = self._clock.now()
        deaf_s = max(now - self._swept_s - LATE_S, 0.0)
        self._swept_s = now
        for worker in list(self._workers.values()):
            worker.heard_s = min(worker.heard_s + deaf_s, now)
            if now - worker.heard_s > self._heartbeat_ttl_s:
                self._lose(worker, f"silent for {self._heartbeat_ttl_s} s")

    def lost(self, name: str) -> None:
        """The launcher saw the process die."""
        worker = self._workers.get(name)
        if worker is not None:
            self._lose(worker, "its process died")

    def hangs(self, address: WorkerAddress) -> None:
        """It heartbeats and does no work."""
        worker = self.find(address.name, address.epoch)
        if worker is not None:
            self._lose(worker, "it does not answer its probes")

    def _lose(self, worker: RegisteredWorker, reason: str, level: int = logging.WARNING) -> None:
        del self._workers[worker.name]
        self._lost_epochs.add(worker.address.epoch)
        logger.log(level, "worker=%s epoch=%s lost: %s", worker.name, worker.address.epoch, reason)
        self._on_lost(worker.address)

    def cut(self, name: str, other: str) -> None:
        """The two cannot reach each other; nothing is planned over that link for a while."""
        now = self._clock.now()
        self._cut_until_s = {pair: until_s for pair, until_s in self._cut_until_s.items() if until_s > now}
        self._cut_until_s[frozenset((name, other))] = now + CUT_S

    def reached(self, name: str, other: str) -> None:
        """Something came over the link of the two: it is whole, unless it was cut just now, after that came."""
        pair = frozenset((name, other))
        if self._cut_until_s.get(pair, math.inf) < self._clock.now() + CUT_S - FRESH_S:
            del self._cut_until_s[pair]

    def cut_off_from(self, name: str) -> dict[str, float]:
        """Workers that this one cannot reach, by name, and until when that is believed."""
        now = self._clock.now()
        cut = {pair: until_s for pair, until_s in self._cut_until_s.items() if name in pair and until_s > now}
        return {other: until_s for pair, until_s in cut.items() for other in pair - {name}}

    def find(self, name: str, epoch: str) -> RegisteredWorker | None:
        worker = self._workers.get(name)
        return worker if worker is not None and worker.address.epoch == epoch else None

    def workers(self) -> list[RegisteredWorker]:
        return list(self._workers.values())

    def require(self, stage: Stage) -> list[RegisteredWorker]:
        """As `live`; raises NoCapacityError that names the stage if there is none."""
        workers = self.live(stage)
        if not workers:
            raise NoCapacityError(f"no live worker hosts the {stage} stage")
        return workers

    def live(self, stage: Stage) -> list[RegisteredWorker]:
        """Workers that may get new work of this stage."""
        return [w for w in self._workers.values() if stage in w.info.stages and w.state == "live"]
