"""Which encode worker gets which item, and when: decided late, as workers become free, over all requests at once.

Pure: it reads the registry, and knows no clock. Every attempt of the router brings its demands here and is called
back with a worker for each. An item that is on its way to somebody is not queued again, and one that a worker has
encoded before goes to that worker, whose cache may still hold it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.config import EncodeConfig
from triptych.router.policy import rendezvous_order
from triptych.router.registry import RegisteredWorker, Registry
from triptych.types import Stage

AttemptKey = tuple[str, int]  # request_id, attempt

MIN_WINDOW_ITEMS = 2  # a worker has its next item at hand when one is done
EVEN_EMBEDS = 1024  # of a request: up to these all are alike, and go in order of arrival
MAX_HOMES = 200_000  # items whose worker is remembered: more than any encoder cache holds


class EncodeJob(NamedTuple):
    """One item that one attempt needs."""

    key: AttemptKey
    mm_hash: str
    num_embeds: int
    consumer: str  # worker's name
    avoid: Sequence[str]  # workers that failed it, or that its consumer cannot reach; once for each reason
    start: Callable[[RegisteredWorker], None]  # send it there
    prompt_tokens: Callable[[], int]  # of the attempt, that its consumer has in flight
    priority: int = 0  # lower is sooner


@dataclass
class _Waiting:
    """The jobs of one attempt that no worker has got, in the order of the prompt."""

    arrival: int
    given_before: int  # embeds of all attempts, when it came
    priority: int
    consumer: str
    prompt_tokens: Callable[[], int]
    num_embeds: int = 0  # that it has demanded
    jobs: OrderedDict[str, EncodeJob] = field(default_factory=OrderedDict)  # by mm_hash

    @property
    def place(self) -> int:
        """In line, in embeds: a large one is put back by what it has beyond `EVEN_EMBEDS`."""
        return self.given_before + max(self.num_embeds - EVEN_EMBEDS, 0)


@dataclass
class _Running:
    """An item that a worker has and that has not been published yet."""

    worker: RegisteredWorker
    num_embeds: int
    keys: set[AttemptKey]


class EncodeQueue:
    def __init__(self, registry: Registry, config: EncodeConfig) -> None:
        self._registry = registry
        self._config = config
        self._waiting: OrderedDict[AttemptKey, _Waiting] = OrderedDict()
        self._running: dict[str, _Running] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()  # epoch of the worker that encoded an item last
        self._num_arrivals = 0
        self._num_given = 0  # embeds so far

    def is_new(self, mm_hash: str) -> bool:
        """Nobody can hold the item: no worker has encoded it, and none does."""
        return mm_hash not in self._homes and mm_hash not in self._running

    def demand(self, jobs: Iterable[EncodeJob]) -> None:
        """Call `start` of each with a worker, now or when one is free."""
        for job in jobs:
            running = self._running.get(job.mm_hash)
            home = self._home(job.mm_hash)
            if running is not None and running.worker.name not in job.avoid and self._is_live(running.worker):
                running.keys.add(job.key)
                job.start(running.worker)
            elif home is not None and home.name not in job.avoid:
                self._give(job, home)
            else:
                self._wait(job)
        self.pump()

    def _wait(self, job: EncodeJob) -> None:
        if job.key not in self._waiting:
            self._num_arrivals += 1
            self._waiting[job.key] = _Waiting(
                self._num_arrivals, self._num_given, job.priority, job.consumer, job.prompt_tokens
            )
        waiting = self._waiting[job.key]
        if job.mm_hash not in waiting.jobs:  # it may be demanded again while it waits
            waiting.num_embeds += job.num_embeds
        waiting.jobs[job.mm_hash] = job

    def encoded(self, mm_hash: str, worker: RegisteredWorker) -> None:
        """The worker published the item; later demands for it go there too."""
        self._homes[mm_hash] = worker.address.epoch
        self._homes.move_to_end(mm_hash)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        self._end(mm_hash)
        self.pump()

    def failed(self, mm_hash: str, key: AttemptKey) -> None:
        """The worker that had the item does not go on with it for this attempt."""
        self._leave(mm_hash, key)
        self.pump()

    def cancel(self, key: AttemptKey) -> None:
        """The attempt is over: nothing of it starts any more."""
        self._waiting.pop(key, None)
        for mm_hash in [m for m, running in self._running.items() if key in running.keys]:
            self._leave(mm_hash, key)
        self.pump()

    def _leave(self, mm_hash: str, key: AttemptKey) -> None:
        running = self._running.get(mm_hash)
        if running is not None:
            running.keys.discard(key)
            if not running.keys:
                self._end(mm_hash)

    def _end(self, mm_hash: str) -> None:
        running = self._running.pop(mm_hash, None)
        if running is not None:
            running.worker.num_inflight_embeds -= running.num_embeds
            running.worker.num_inflight_items -= 1

    # -- who gets what -------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Give out what a worker should begin or have at hand now.

        List scheduling: in order, each item is meant for the worker that would finish it first, counting what is
        before it there. It is given out if that worker has room; else it waits, and later items may overtake it only
        to other workers. A worker that hosts prefill too counts its prompts, so it helps when the others are behind:
        those up to the item's own, for it reads later ones after the item. If all counted, it would be taken for busy
        and get items of requests that are far behind, which nobody waits for yet.
        """
        workers = self._workers()
        full = {worker.name for worker in workers if self._is_full(worker)}
        if len(full) == len(workers):
            return  # the usual case under load: not worth an order
        by_name = {worker.name: worker for worker in workers}
        free_s = {worker.name: self._backlog_s(worker) for worker in workers}
        for waiting in self._waiting.values():
            self._count_prompt(waiting, by_name, free_s, -1)
        for waiting in self._in_order():
            self._count_prompt(waiting, by_name, free_s, 1)
            for job, worker in self._planned(list(waiting.jobs.values()), workers, free_s):
                if worker.name in full:
                    continue
                for same in self._same_items(job.mm_hash):
                    self._give(same, worker)
                if self._is_full(worker):
                    full.add(worker.name)
            if len(full) == len(workers):
                return

    @staticmethod
    def _count_prompt(
        waiting: _Waiting, workers: Mapping[str, RegisteredWorker], free_s: dict[str, float], times: int
    ) -> None:
        if consumer := workers.get(waiting.consumer):
            free_s[consumer.name] += times * waiting.prompt_tokens() * consumer.seconds_a_prompt_token

    def _planned(
        self, jobs: Sequence[EncodeJob], workers: Sequence[RegisteredWorker], free_s: dict[str, float]
    ) -> list[tuple[EncodeJob, RegisteredWorker]]:
        """The worker that each job of one attempt is meant for; `free_s` counts them then.

        The consumer's share is the first items of the prompt: it would only wait for them, while later ones come to it
        in time for their prefill.
        """
        chosen: list[RegisteredWorker] = []
        for job in jobs:
            same = None if self._config.fan_out else chosen[-1] if chosen else self._at_work_for(job.key)
            worker = self._first_to_finish(job, workers, free_s, same)
            free_s[worker.name] += job.num_embeds * worker.seconds_an_embed
            chosen.append(worker)
        if not any(job.avoid for job in jobs):
            chosen.sort(key=lambda worker: worker.name != jobs[0].consumer)
        return list(zip(jobs, chosen, strict=True))

    def _in_order(self) -> list[_Waiting]:
        """Lower priorities first, then by arrival, and where asked for large ones later."""
        puts_back = self._config.order == "smallest"

        def urgency(waiting: _Waiting) -> tuple[int, int, int]:
            return waiting.priority, waiting.place if puts_back else 0, waiting.arrival

        return sorted(self._waiting.values(), key=urgency)

    def _first_to_finish(
        self,
        job: EncodeJob,
        workers: Sequence[RegisteredWorker],
        free_s: dict[str, float],
        same: RegisteredWorker | None,
    ) -> RegisteredWorker:
        """`same` if that is one of those to choose from."""
        fewest = min(job.avoid.count(worker.name) for worker in workers)
        allowed = [worker for worker in workers if job.avoid.count(worker.name) == fewest]
        allowed = [worker for worker in allowed if worker is same] or allowed
        rank = {name: i for i, name in enumerate(rendezvous_order(job.mm_hash, [w.name for w in allowed]))}

        def finish(worker: RegisteredWorker) -> tuple[float, bool, int]:
            finish_s = free_s[worker.name] + job.num_embeds * worker.seconds_an_embed
            return finish_s, worker.name != job.consumer, rank[worker.name]

        return min(allowed, key=finish)

    def _at_work_for(self, key: AttemptKey) -> RegisteredWorker | None:
        return next((running.worker for running in self._running.values() if key in running.keys), None)

    def _same_items(self, mm_hash: str) -> list[EncodeJob]:
        """Take the item out of all attempts' queues: one forward serves all."""
        jobs = [waiting.jobs[mm_hash] for waiting in self._waiting.values() if mm_hash in waiting.jobs]
        for job in jobs:
            self._unqueue(job)
        return jobs

    def _unqueue(self, job: EncodeJob) -> None:
        waiting = self._waiting[job.key]
        del waiting.jobs[job.mm_hash]
        if not waiting.jobs:
            del self._waiting[job.key]

    def _give(self, job: EncodeJob, worker: RegisteredWorker) -> None:
        running = self._running.get(job.mm_hash)
        if running is None or running.worker is not worker:
            self._end(job.mm_hash)
            running = self._running[job.mm_hash] = _Running(worker, job.num_embeds, set())
            worker.num_inflight_embeds += job.num_embeds
            worker.num_inflight_items += 1
            self._num_given += job.num_embeds
        running.keys.add(job.key)
        job.start(worker)

    def _is_full(self, worker: RegisteredWorker) -> bool:
        return (
            worker.num_inflight_items >= MIN_WINDOW_ITEMS and worker.num_inflight_embeds >= self._config.window_embeds
        )

    def _workers(self) -> list[RegisteredWorker]:
        """Those that may get an item that no worker has encoded."""
        workers = self._registry.live(Stage.ENCODE)
        if self._config.encode_on == "any":
            return workers
        colocated = self._config.encode_on == "colocated"
        return [worker for worker in workers if (Stage.PREFILL in worker.info.stages) == colocated] or workers

    def backlog_s(self) -> float:
        """Predicted time until a new item would be begun, if what waits were spread evenly."""
        workers = self._workers()
        if not workers:
            return 0.0
        waiting_embeds = sum(job.num_embeds for waiting in self._waiting.values() for job in waiting.jobs.values())
        speed = sum(1 / worker.seconds_an_embed for worker in workers)  # embeds a second of all of them
        return min(map(self._backlog_s, workers)) + waiting_embeds / speed

    def _backlog_s(self, worker: RegisteredWorker) -> float:
        prompts_s = worker.num_inflight_tokens * worker.seconds_a_prompt_token
        return prompts_s + worker.num_inflight_embeds * worker.seconds_an_embed

    def _home(self, mm_hash: str) -> RegisteredWorker | None:
        epoch = self._homes.get(mm_hash)
        if epoch is None:
            return None
        workers = self._registry.live(Stage.ENCODE)
        return next((worker for worker in workers if worker.address.epoch == epoch), None)

    def _is_live(self, worker: RegisteredWorker) -> bool:
        return self._registry.find(worker.name, worker.address.epoch) is not None

    def check(self) -> None:
        """Raise AssertionError if anything is left; for when no request is."""
        assert not self._waiting, f"{len(self._waiting)} attempts wait for encode workers"
        assert not self._running, f"{len(self._running)} items are with encode workers"
