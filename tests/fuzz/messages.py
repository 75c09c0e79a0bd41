"""Hostile messages for a router and its workers: random bytes, broken frames, well-formed ones with odd values.

`python -m tests.fuzz.messages --seconds N --seed S`. After every volley the deployment must answer a real request
right, and hold nothing. Messages that mean what they say (leave, your peer is dead) are left out: members are trusted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tests.cluster.chaos import Pictures, assert_nothing_held, make_pictures
from triptych import messages
from triptych.config import Config, EncodeConfig, EngineConfig, HandoffConfig, MediaConfig, ModelConfig, RouterConfig
from triptych.errors import TriptychError
from triptych.models.registry import ModelSpec, open_model
from triptych.testing import ROUTER, Cluster, fake_output
from triptych.testing_checkpoints import make_checkpoint
from triptych.types import ImageInput, Request, SamplingParams, TextDelta

GOLDEN = Path(__file__).parent.parent / "messages" / "golden.json"
VOLLEY = 60  # messages between two real requests
MEANT = {"Drain", "PeerLost", "LinkLost", "BlocksChanged"}  # true or not, they are to be believed
INTEGERS = [-(2**63), -(2**31), -17, -1, 0, 1, 2, 3, 7, 16, 255, 4096, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1]
FLOATS = [math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-300, 0.5, 1e308]
TEXTS = [
    "",
    "x",
    "\0",
    "ä" * 50,
    "float32",
    "int8",
    "bfloat16",
    "image",
    "stop",
    "../../etc",
    "tcp://127.0.0.1:1",
    "a" * 5000,
]


class Mutator:
    """Frames made from `corpus`, bytes of real messages."""

    def __init__(self, rng: random.Random, corpus: list[bytes]) -> None:
        self._rng = rng
        self.corpus = corpus

    def frame(self, sender: str, epoch: str, request_id: str) -> tuple[str, bytes]:
        """What kind of frame, and the frame."""
        kind = self._rng.choice(("noise", "broken", "odd", "odd", "odd", "odd", "replayed"))
        base = self._rng.choice(self.corpus)
        if kind == "noise":
            return kind, self._rng.randbytes(self._rng.choice((0, 1, 7, 100, 5000)))
        if kind == "broken":
            return kind, self._broken(base)
        version, _, _, body = msgspec.msgpack.decode(base)
        if kind == "odd":
            for _ in range(self._rng.choice((1, 1, 2, 5))):
                body = self._odd(body)
        if isinstance(body, dict) and isinstance(body.get("request_id"), str) and self._rng.random() < 0.9:
            body["request_id"], body["attempt"] = request_id, self._rng.choice((0, 0, 1, 2))
        if self._rng.random() < 0.02:
            version = self._rng.choice((0, 1, 99, "2", None))
        return kind, msgspec.msgpack.encode([version, sender, epoch, body])

    def _broken(self, base: bytes) -> bytes:
        data = bytearray(base)
        for _ in range(self._rng.choice((1, 1, 3, 20))):
            action = self._rng.randrange(4)
            at = self._rng.randrange(len(data) + 1)
            if action == 0 and at < len(data):
                data[at] = self._rng.randrange(256)
            elif action == 1:
                del data[at : at + self._rng.randrange(1, 40)]
            elif action == 2:
                data[at:at] = self._rng.randbytes(self._rng.randrange(1, 9))
            else:
                data[at:at] = data[at // 2 : at]
        return bytes(data)

    def _odd(self, value: Any) -> Any:
        """The value with one place of it changed to another of its kind."""
        if isinstance(value, dict) and value:
            key = self._rng.choice([k for k in value if k != "type"] or list(value))
            return {**value, key: self._odd(value[key])}
        if isinstance(value, list) and value and self._rng.random() < 0.7:
            at = self._rng.randrange(len(value))
            return [*value[:at], self._odd(value[at]), *value[at + 1 :]]
        if isinstance(value, list):
            return self._rng.choice(([], value * 2, value[::-1], value * 50, value[:1]))
        if isinstance(value, bool) or value is None:
            return self._rng.choice((True, False, None, 3))
        if isinstance(value, int):
            return self._rng.choice((*INTEGERS, min(value + 1, 2**63), max(value - 1, -(2**63)), value // 2))
        if isinstance(value, float):
            return self._rng.choice(FLOATS)
        if isinstance(value, bytes):
            return self._rng.choice((b"", value[:-1], value + b"\0", self._rng.randbytes(max(len(value), 1))))
        if isinstance(value, str):
            return self._rng.choice((*TEXTS, value + "x", value[:-1]))
        return value


class Fuzz:
    def __init__(self, spec: ModelSpec, pictures: Pictures, seed: int, transport: str) -> None:
        self._spec = spec
        self._pictures = pictures
        self._rng = random.Random(seed)
        self._transport = transport
        self.sent: Counter[str] = Counter()
        self.num_answers = 0
        self._num_attacks = 0

    async def run(self, seconds: float) -> None:
        config = Config(
            engine=EngineConfig(num_kv_blocks=60, block_size=4, max_num_batched_tokens=64, max_num_seqs=8),
            encode=EncodeConfig(cache_bytes=1 << 20),
            handoff=HandoffConfig(transport=self._transport, transfer_timeout_s=0.5),  # type: ignore[arg-type]
            media=MediaConfig(allowed_local_media_path=str(self._pictures.directory)),
            router=RouterConfig(heartbeat_ttl_s=1e6, deadline_s=30.0),
        )
        end_s = time.monotonic() + seconds
        async with Cluster(self._spec, config, "1E/1P/1D", fake=True, seed=self._rng.randrange(2**32)) as cluster:
            mutator = Mutator(self._rng, await self._record(cluster))
            while time.monotonic() < end_s:
                names = {f"fuzz{self._rng.randrange(4)}" for _ in range(4)}
                for _ in range(VOLLEY):
                    self._shoot(cluster, mutator, self._rng.choice(sorted(names)))
                    if self._rng.random() < 0.2:
                        await asyncio.sleep(0)
                await asyncio.sleep(self._rng.choice((0.0, 0.01)))
                self._cancel(cluster, names)
                await self._still_right(cluster)
                await self._attack_a_request(cluster, mutator)
                await self._still_right(cluster)

    async def _record(self, cluster: Cluster) -> list[bytes]:
        """One of each message, and all that a few real requests lead to."""
        corpus = [bytes.fromhex(text) for text in json.loads(GOLDEN.read_text()).values()]
        post, network = cluster.network.post, cluster.network

        def recording(epoch: str, body: messages.Body, sender: str, sender_epoch: str) -> None:
            corpus.append(messages.encode(body, sender, sender_epoch))
            post(epoch, body, sender, sender_epoch)

        network.post = recording  # type: ignore[method-assign]
        for _ in range(3):
            await self._ask(cluster)
        network.post = post  # type: ignore[method-assign]
        return [frame for frame in corpus if msgspec.msgpack.decode(frame)[3]["type"] not in MEANT]

    def _shoot(self, cluster: Cluster, mutator: Mutator, request_id: str) -> None:
        epochs = {name: local.address.epoch for name, local in cluster.workers.items()}
        sender = self._rng.choice([*epochs, "router", "nobody"])
        kind, frame = mutator.frame(sender, epochs.get(sender, ""), request_id)
        self.sent[kind] += 1
        for _ in range(self._rng.choice((1, 1, 1, 2))):
            cluster.network.deliver(self._rng.choice([*epochs.values(), ROUTER]), frame, epochs.get(sender, ""))

    async def _attack_a_request(self, cluster: Cluster, mutator: Mutator) -> None:
        """Lies about a request that runs: it may end in any way that a client understands, and the router lives."""
        self._num_attacks += 1
        request_id = f"victim{self._num_attacks}"
        body: list[dict[str, object]] = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
        ]
        image = ImageInput((self._pictures.directory / f"{self._num_attacks % len(self._pictures.items)}.png").as_uri())
        request = Request(request_id, body, [image], SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=8)

        async def answer() -> None:
            with contextlib.suppress(TriptychError):
                async for _ in cluster.router.handle(request):
                    pass

        task = asyncio.create_task(answer())
        for _ in range(VOLLEY // 4):
            self._shoot(cluster, mutator, request_id)
            await asyncio.sleep(0)
        await asyncio.wait({task}, timeout=0.5)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self._cancel(cluster, {request_id})

    def _cancel(self, cluster: Cluster, request_ids: set[str]) -> None:
        """As the router does with each request that it knows."""
        held = {(*key,) for local in cluster.workers.values() for key in keys_of(local.worker)}
        for request_id, attempt in held | {(name, attempt) for name in request_ids for attempt in (0, 1, 2)}:
            for local in cluster.workers.values():
                cluster.network.post(local.address.epoch, messages.Cancel(request_id, attempt), "router", "")

    async def _still_right(self, cluster: Cluster) -> None:
        await self._ask(cluster)
        async with asyncio.timeout(20):
            while any(local.worker.num_live() for local in cluster.workers.values()):
                for local in cluster.workers.values():
                    for lease_id in list(local.leases._leases):  # of consumers that were never there
                        local.leases.release(lease_id)
                self._cancel(cluster, set())  # what was still on its way
                await self._alive(cluster)
                await asyncio.sleep(0.005)
        cluster.check()
        assert_nothing_held(cluster)

    async def _alive(self, cluster: Cluster) -> None:
        assert cluster._pump is not None
        if cluster._pump.done():
            await cluster._pump  # raises what killed it

    async def _ask(self, cluster: Cluster) -> None:
        """A real request, whose every token is known by formula."""
        self.num_answers += 1
        chosen = [self._rng.randrange(len(self._pictures.items)) for _ in range(self._rng.choice((0, 1, 2)))]
        content = [*({"type": "image"} for _ in chosen), {"type": "text", "text": f"what is {self.num_answers}"}]
        body: list[dict[str, object]] = [{"role": "user", "content": content}]
        images = [ImageInput((self._pictures.directory / f"{k}.png").as_uri()) for k in chosen]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        request = Request(f"real{self.num_answers}", body, images, sampling, max_tokens=5)
        token_ids: list[int] = []

        async def answer() -> None:
            async for event in cluster.router.handle(request):
                if isinstance(event, TextDelta):
                    token_ids.extend(event.token_ids)

        task = asyncio.create_task(answer())
        while not task.done():
            await self._alive(cluster)
            await asyncio.wait({task}, timeout=0.05)
        await task
        prompt = cluster.builder.build(body, [self._pictures.items[k] for k in chosen])
        features = {str(k): feature for k, feature in enumerate(self._pictures.features)}
        assert token_ids == fake_output(prompt, features, 5, self._spec.family.text.vocab)


def keys_of(worker: Any) -> list[tuple[str, int]]:
    """Requests of which the worker holds anything, whoever asked for them."""
    language, encode = worker.stages.language, worker.stages.encode
    keys: list[tuple[str, int]] = []
    if language is not None:
        keys += [request.key for request in language._engine._requests()]
        for half in (language._prefill, language._decode):
            keys += list(getattr(half, "_exports", getattr(half, "_imports", {})))
    if encode is not None:
        keys += [demand.key for demand in encode._demands]
        keys += [key for prepared in encode._prepared.values() for key in prepared.requests]
    return keys


def fuzz(seconds: float, seed: int, transport: str = "inproc") -> Fuzz:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        make_checkpoint("qwen3_vl", path / "model")
        spec = open_model(str(path / "model"), ModelConfig())
        (path / "pictures").mkdir()
        run = Fuzz(spec, make_pictures(spec, path / "pictures"), seed, transport)
        asyncio.run(run.run(seconds))
        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=["inproc", "tcp"], default="inproc")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    done = fuzz(args.seconds, args.seed, args.transport)
    print(f"{sum(done.sent.values())} messages {dict(done.sent)}, {done.num_answers} right answers, seed {args.seed}")


if __name__ == "__main__":
    main()
