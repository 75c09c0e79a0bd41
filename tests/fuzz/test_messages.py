"""A short run of the fuzzer on each transport, and its frames against real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from typing import Literal

import pytest
import zmq

from tests.fuzz.messages import GOLDEN, Mutator, fuzz
from triptych import messages
from triptych.messages import Envelope, Probed
from triptych.router.client import ZmqMailbox
from triptych.transport.mailbox import Mailbox, router_endpoint, worker_endpoint

NUM_FRAMES = 500


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_hostile_messages_change_no_answer_and_leave_nothing(transport: Literal["inproc", "tcp"]) -> None:
    done = fuzz(5.0, seed=11, transport=transport)
    assert sum(done.sent.values()) >= 60
    assert done.num_answers >= 5


@pytest.mark.parametrize("seed", range(3))
async def test_mailboxes_outlive_hostile_frames(seed: int) -> None:
    mutator = Mutator(random.Random(seed), [bytes.fromhex(text) for text in json.loads(GOLDEN.read_text()).values()])
    with tempfile.TemporaryDirectory(prefix="tri") as directory:
        heard: list[Envelope] = []
        router = ZmqMailbox(directory)
        router.start(heard.append)
        worker = Mailbox("w", "e", worker_endpoint(directory, "w", "e"), router_endpoint(directory))
        context = zmq.Context()
        sockets = [context.socket(zmq.PUSH) for _ in range(2)]
        for socket, endpoint in zip(sockets, (router_endpoint(directory), worker.endpoint), strict=True):
            socket.connect(endpoint)
            for _ in range(NUM_FRAMES):
                socket.send(mutator.frame("x", "y", "r")[1])
            socket.send(messages.encode(Probed(77), "x", "y"))
        last = Probed(77)
        async with asyncio.timeout(60):
            while not any(envelope.body == last for envelope in heard):
                await asyncio.sleep(0.01)
            while not any(envelope.body == last for envelope in worker.receive(0.0)):
                await asyncio.sleep(0.01)
        context.destroy(linger=0)
        worker.close()
        await router.close()
