"""A worker's mailbox over real ZeroMQ: order, waking, the dead, and what is left on disk."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from triptych import messages
from triptych.curve import check_endpoint
from triptych.errors import ConfigError
from triptych.messages import Body, Drain, Envelope, Probe, Probed
from triptych.router.client import MOST_AT_ONCE, ZmqMailbox
from triptych.transport.mailbox import Mailbox, router_endpoint, worker_endpoint
from triptych.types import WorkerAddress

LONG_S = 20.0  # a wait that only a broken mailbox would sit through


class Post:
    """Mailboxes in one runtime directory; a socket's path must be short, and pytest's are not always."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.open: list[Mailbox] = []

    def address(self, name: str, epoch: str) -> WorkerAddress:
        return WorkerAddress(name, epoch, worker_endpoint(str(self.directory), name, epoch), "")

    def mailbox(self, name: str, epoch: str = "00000001") -> Mailbox:
        directory = str(self.directory)
        mailbox = Mailbox(name, epoch, worker_endpoint(directory, name, epoch), router_endpoint(directory))
        self.open.append(mailbox)
        return mailbox

    def close(self, mailbox: Mailbox) -> None:
        self.open.remove(mailbox)
        mailbox.close()


@pytest.fixture
def post() -> Iterator[Post]:
    with tempfile.TemporaryDirectory(prefix="tri") as directory:
        post = Post(Path(directory))
        yield post
        for mailbox in list(post.open):
            post.close(mailbox)
        assert list(post.directory.iterdir()) == [], "a socket was left behind"


def receive(mailbox: Mailbox, count: int) -> list[Envelope]:
    received: list[Envelope] = []
    while len(received) < count:
        got = mailbox.receive(LONG_S)
        assert got, "nothing came"
        received += got
    return received


def bodies(envelopes: list[Envelope]) -> list[Body]:
    return [envelope.body for envelope in envelopes]


def test_messages_arrive_in_order_with_their_sender(post: Post) -> None:
    a, b = post.mailbox("a", "0000000a"), post.mailbox("b")
    for k in range(100):
        a.to_worker(post.address("b", "00000001"), Probe(k))
    received = receive(b, 100)
    assert bodies(received) == [Probe(k) for k in range(100)]
    assert {(e.version, e.sender, e.epoch) for e in received} == {(messages.PROTOCOL_VERSION, "a", "0000000a")}


def test_what_is_sent_before_the_receiver_is_there_arrives(post: Post) -> None:
    a = post.mailbox("a")
    a.to_worker(post.address("b", "00000001"), Probe(1))
    assert bodies(receive(post.mailbox("b"), 1)) == [Probe(1)]


def test_receive_without_messages_returns_nothing(post: Post) -> None:
    assert post.mailbox("a").receive(0.0) == []


def test_wake_from_another_thread_ends_a_receive_that_waits(post: Post) -> None:
    mailbox = post.mailbox("a")
    thread = threading.Thread(target=mailbox.wake)
    thread.start()
    assert mailbox.receive(3600.0) == []  # the test's own timeout would tell
    thread.join()
    assert mailbox.receive(0.0) == []


def test_wakes_add_up_to_one(post: Post) -> None:
    mailbox = post.mailbox("a")
    for _ in range(5):
        mailbox.wake()
    mailbox.receive(3600.0)
    poller = zmq.Poller()
    poller.register(mailbox._wake_fd, zmq.POLLIN)
    assert poller.poll(0) == []


def test_a_dead_receiver_does_not_block_the_sender(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transport.mailbox.SEND_HIGH_WATER_MARK", 10)
    a, b = post.mailbox("a"), post.mailbox("b")
    a.to_worker(post.address("b", "00000001"), Probe(0))
    receive(b, 1)
    post.close(b)
    for k in range(1000):
        a.to_worker(post.address("b", "00000001"), Probe(k))
        a.to_router(Probed(k))  # no router was ever there
    assert a.receive(0.0) == []


def test_what_is_dropped_is_logged(
    post: Post, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triptych.transport.mailbox.SEND_HIGH_WATER_MARK", 1)
    a = post.mailbox("a")
    with caplog.at_level(logging.WARNING):
        for k in range(100):
            a.to_worker(post.address("b", "00000001"), Probe(k))
    assert "Probe" in caplog.text


def test_a_later_life_gets_only_what_was_meant_for_it(post: Post) -> None:
    a, first = post.mailbox("a"), post.mailbox("b", "00000001")
    a.to_worker(post.address("b", "00000001"), Probe(1))
    receive(first, 1)
    post.close(first)
    a.to_worker(post.address("b", "00000001"), Probe(2))
    a.to_worker(post.address("b", "00000002"), Probe(3))
    assert bodies(receive(post.mailbox("b", "00000002"), 1)) == [Probe(3)]


def test_what_is_no_message_is_dropped_and_the_next_one_arrives(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    mailbox = post.mailbox("a")
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(post.address("a", "00000001").endpoint)
    stranger.send(b"junk")
    stranger.send(msgspec.msgpack.encode([messages.PROTOCOL_VERSION, "x", "e", {"type": "Reboot"}]))
    stranger.send(messages.encode(Drain(), "x", "e"))
    assert bodies(receive(mailbox, 1)) == [Drain()]
    assert caplog.text.count("a message was dropped") == 2
    context.destroy(linger=0)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "inproc://x", "/run/x.sock", ""])
def test_nothing_is_sent_to_an_endpoint_that_others_could_write_to(
    post: Post, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"only unix sockets|on one host over ipc"):
        check_endpoint(endpoint, has_keys=False)
    post.mailbox("a").to_worker(WorkerAddress("b", "00000001", endpoint, ""), Drain())
    assert "a message was dropped: Drain for b" in caplog.text


# -- the router's own --------------------------------------------------------------------------------------------------


async def test_router_and_worker_hear_each_other(post: Post) -> None:
    heard: asyncio.Queue[Envelope] = asyncio.Queue()
    router, worker = ZmqMailbox(str(post.directory)), post.mailbox("a", "0000000a")
    router.start(heard.put_nowait)
    router.send(post.address("a", "0000000a"), Probe(1))
    assert bodies(await asyncio.to_thread(receive, worker, 1)) == [Probe(1)]
    for k in range(10):
        worker.to_router(Probed(k))
    envelopes = [await asyncio.wait_for(heard.get(), LONG_S) for _ in range(10)]
    assert bodies(envelopes) == [Probed(k) for k in range(10)]
    assert {(e.sender, e.epoch) for e in envelopes} == {("a", "0000000a")}
    await router.close()
    assert not (post.directory / "router.sock").exists()


async def test_the_router_drops_junk_and_other_versions(post: Post) -> None:
    heard: asyncio.Queue[Envelope] = asyncio.Queue()
    router = ZmqMailbox(str(post.directory))
    router.start(heard.put_nowait)
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(router_endpoint(str(post.directory)))
    stranger.send(b"junk")
    stranger.send(msgspec.msgpack.encode(Envelope(messages.PROTOCOL_VERSION + 1, "x", "e", Drain())))
    stranger.send(messages.encode(Probed(1), "x", "e"))
    assert (await asyncio.wait_for(heard.get(), LONG_S)).body == Probed(1)
    assert heard.empty()
    context.destroy(linger=0)
    await router.close()


async def test_the_router_reads_on_where_one_message_fails_and_when_many_come_at_once(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    """ZeroMQ tells once of what has come: what is left unread then would wait for the next message."""
    heard: asyncio.Queue[Envelope] = asyncio.Queue()

    def hear(envelope: Envelope) -> None:
        if envelope.body == Probed(0):
            raise RuntimeError("no good")
        heard.put_nowait(envelope)

    router, worker = ZmqMailbox(str(post.directory)), post.mailbox("a", "0000000a")
    router.start(hear)
    count = 3 * MOST_AT_ONCE
    for k in range(count):
        worker.to_router(Probed(k))
    envelopes = [await asyncio.wait_for(heard.get(), LONG_S) for _ in range(count - 1)]
    assert bodies(envelopes) == [Probed(k) for k in range(1, count)]
    assert "no good" in caplog.text
    await router.close()


async def test_the_router_does_not_block_on_the_dead(post: Post) -> None:
    router = ZmqMailbox(str(post.directory))
    router.start(lambda _: None)
    gone = post.address("gone", "00000001")
    for k in range(1000):
        router.send(gone, Probe(k))
    router.forget(gone)
    router.forget(gone)
    await router.close()
