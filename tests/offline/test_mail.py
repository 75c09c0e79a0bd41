"""The mailboxes between the event loop and the compute thread."""

from __future__ import annotations

import asyncio
import threading
import time

from triptych.messages import Cancel, Drain, Envelope, LeaseReleased, Probe, Probed
from triptych.offline.mail import ComputeMailbox, LoopMailbox
from triptych.types import WorkerAddress

ADDRESS = WorkerAddress("epd-0", "epoch", "local://epoch", "")


def connected() -> tuple[LoopMailbox, ComputeMailbox]:
    router = LoopMailbox()
    return router, ComputeMailbox(ADDRESS, router)


def test_messages_to_the_worker_come_in_order_from_router_and_from_itself() -> None:
    router, worker = connected()
    router.send(ADDRESS, Cancel("r", 0))
    worker.to_worker(ADDRESS, LeaseReleased(7))
    router.send(ADDRESS, Drain())
    received = worker.receive(0.0)
    assert [(envelope.sender, envelope.body) for envelope in received] == [
        ("router", Cancel("r", 0)),
        ("epd-0", LeaseReleased(7)),
        ("router", Drain()),
    ]
    assert worker.receive(0.0) == []


def test_a_wait_ends_with_a_message_and_with_wake() -> None:
    router, worker = connected()
    for send in (lambda: router.send(ADDRESS, Drain()), worker.wake):
        threading.Timer(0.02, send).start()
        began_s = time.monotonic()
        received = worker.receive(30.0)
        assert time.monotonic() - began_s < 20
        assert [envelope.body for envelope in received] in ([Drain()], [])
    assert worker.receive(0.01) == []


async def test_messages_to_the_router_are_delivered_in_its_loop() -> None:
    router, worker = connected()
    got: asyncio.Queue[tuple[Envelope, threading.Thread]] = asyncio.Queue()
    router.start(lambda envelope: got.put_nowait((envelope, threading.current_thread())))

    def send() -> None:
        for k in range(3):
            worker.to_router(Probed(k, ""))

    thread = threading.Thread(target=send)
    thread.start()
    for k in range(3):
        envelope, where = await got.get()
        assert (envelope.sender, envelope.epoch, envelope.body) == ("epd-0", "epoch", Probed(k, ""))
        assert where is threading.current_thread()
    thread.join()


async def test_after_the_end_messages_go_nowhere() -> None:
    router, worker = connected()
    got: list[Envelope] = []
    router.start(got.append)
    await router.close()
    worker.to_router(Probed(1, ""))
    router.send(ADDRESS, Probe(2))
    await asyncio.sleep(0)
    assert got == []
    assert worker.receive(0.0) == []
