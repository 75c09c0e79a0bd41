"""Stages of one worker with mail that only records: what each message leads to, without a network or a model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.clock import ManualClock
from triptych.config import EngineConfig
from triptych.engine.batch import Drawn, SampleRow, SequenceChunk, StepLogits
from triptych.engine.engine import Engine
from triptych.engine.grammar import GrammarVocabulary
from triptych.engine.kv_blocks import KVBlockPool
from triptych.engine.matchers import Matchers
from triptych.engine.request_state import RequestState
from triptych.errors import MediaError
from triptych.handoff.embedding import EmbeddingPool
from triptych.handoff.kv import KVLayout, KVMemory, KVProducer
from triptych.handoff.leases import Leases
from triptych.messages import (
    Body,
    Cancel,
    Decode,
    EmbeddingPublished,
    EmbeddingsNeeded,
    EncodeItems,
    ItemToEncode,
    LeaseReleased,
    Prefill,
    PrepareItems,
)
from triptych.stages.decode import DecodeStage
from triptych.stages.encode import EncodeStage
from triptych.stages.language import LanguageStage
from triptych.stages.prefill import PrefillStage
from triptych.stages.preprocess import InlinePreprocessor
from triptych.stages.requests import RequestFactory
from triptych.testing import FakeRunner
from triptych.transport.inproc import InProcTransport
from triptych.types import (
    Grid,
    ImageDecoding,
    ImageSize,
    ItemMetadata,
    Modality,
    Placeholder,
    PromptItem,
    Rgb,
    SamplingParams,
    Stage,
    WorkerAddress,
)

TTL_S = 60.0
BLOCK_SIZE = 4
VOCAB = 200
MAX_MODEL_LEN = 100
WIDTH = 16  # float32: an embed is one cache line of a pool
EMBED_BYTES = WIDTH * 4
POOL_EMBEDS = 64  # a page

Kind = TypeVar("Kind")


class RecordingMail:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Body]] = []  # receiver's name and message

    def to_router(self, body: Body) -> None:
        self.sent.append(("router", body))

    def to_worker(self, address: WorkerAddress, body: Body) -> None:
        self.sent.append((address.name, body))

    def take(self) -> list[tuple[str, Body]]:
        sent, self.sent = self.sent, []
        return sent

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [body for _, body in self.sent if isinstance(body, kind)]


class Node:
    """One worker's life: its memory, leases and mail."""

    def __init__(self, name: str, pool_bytes: int, clock: ManualClock) -> None:
        epoch = uuid.uuid4().hex
        self.address = WorkerAddress(name, epoch, "", "")
        self.transport = InProcTransport(epoch, pool_bytes)
        self.clock = clock
        self.leases = Leases(clock, TTL_S)
        self.mail = RecordingMail()

    def close(self) -> None:
        self.transport.close()


# -- encode ------------------------------------------------------------------------------------------------------------


def item_to_encode(mm_hash: str, num_embeds: int = 4, content: bytes = b"\x05") -> ItemToEncode:
    metadata = ItemMetadata(Grid(1, 2, 2 * num_embeds), num_embeds, num_embeds)
    decoding = ImageDecoding(ImageSize(1, 1), Rgb(255, 255, 255))
    return ItemToEncode(Modality.IMAGE, mm_hash, content, metadata, decoding)


BAD = b"bad"  # the content of an item that cannot be decoded
POISON = b"\xff"  # the content of an item on which the tower fails


class RecordingTower:
    """Embeddings whose every number is the item's first byte; `poisoned` makes it fail on POISON."""

    def __init__(self, clock: ManualClock) -> None:
        self.num_forwards = 0
        self.batches: list[list[int]] = []  # embeds of each item of each forward, those that failed included
        self.num_forwards = 0
        self.poisoned = True
        self._clock = clock

    def encode(self, items: Sequence[tuple[NDArray[np.float32], Grid]]) -> list[torch.Tensor]:
        self._clock.advance(1.0)
        self.batches.append([len(patches) // 4 for patches, _ in items])
        if self.poisoned and any(patches[0, 0] == POISON[0] for patches, _ in items):
            raise RuntimeError("CUDA error: an illegal memory access")
        self.num_forwards += 1
        self.num_forwards += 1
        return [torch.full((len(patches) // 4, WIDTH), float(patches[0, 0])) for patches, _ in items]

    def probe(self) -> None:
        return None


class EncodeNode(Node):
    def __init__(self, *, cache_embeds: int = POOL_EMBEDS, max_encode_embeds: int = 16) -> None:
        super().__init__("encode-0", POOL_EMBEDS * EMBED_BYTES, ManualClock())
        self.preprocessed: list[str] = []
        self.tower = RecordingTower(self.clock)
        self.pool = EmbeddingPool(self.transport, self.leases, self.address)
        self.stage = EncodeStage(
            self.tower,
            InlinePreprocessor(self._to_patches),
            self.pool,
            self.mail,
            self.clock,
            max_encode_embeds=max_encode_embeds,
            cache_bytes=cache_embeds * EMBED_BYTES,
        )
        self.consumer = Node("prefill-0", 4096, self.clock)

    def _to_patches(self, item: ItemToEncode) -> NDArray[np.float32]:
        self.preprocessed.append(item.mm_hash)
        if item.content == BAD:
            raise MediaError("the image is broken")
        return np.full((4 * item.metadata.num_embeds, 8), item.content[0], dtype=np.float32)

    def prepare(self, request_id: str, *items: ItemToEncode) -> None:
        self.stage.prepare(PrepareItems(request_id, 0, list(items)))

    def demand(self, request_id: str, *mm_hashes: str) -> None:
        self.stage.demand(EncodeItems(request_id, 0, list(mm_hashes), self.consumer.address))

    def ask(self, request_id: str, *items: ItemToEncode) -> None:
        self.prepare(request_id, *items)
        self.demand(request_id, *(item.mm_hash for item in items))

    def cancel(self, request_id: str) -> None:
        self.stage.cancel(Cancel(request_id, 0))

    def run(self) -> None:
        """Step until there is nothing to do, and once more: what a step submits is preprocessed in the next."""
        idle = 0
        for _ in range(50):
            idle = 0 if self.stage.step() else idle + 1
            self.stage.check()
            if idle == 2:
                return
        raise AssertionError("the stage finds work for ever")

    def release_all(self) -> None:
        for published in self.mail.of(EmbeddingPublished):
            self.leases.release(published.handle.lease_id)

    def close(self) -> None:
        self.stage.check()
        self.pool.check()
        self.stage.close()
        self.consumer.close()
        super().close()


# -- prefill and decode ------------------------------------------------------------------------------------------------


class FailingRunner:
    """A runner that can be told to fail."""

    def __init__(self, runner: FakeRunner) -> None:
        self.error: Exception | None = None
        self._runner = runner

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepLogits:
        if self.error is not None:
            raise self.error
        return self._runner.forward(chunks)


class LanguageNode(Node):
    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        clock: ManualClock,
        *,
        num_blocks: int = 40,
        max_num_batched_tokens: int = 64,
        embedding_cache_bytes: int = 1 << 20,
        overlap: bool = True,
    ) -> None:
        layout = KVLayout(num_blocks + 1, 1, 1, BLOCK_SIZE, 1, torch.float32)
        super().__init__(name, layout.num_bytes + 4096, clock)
        memory = KVMemory(self.transport, layout, "cpu")
        self.memory = memory
        self.runner = FailingRunner(FakeRunner(memory.tensor, VOCAB))
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=max_num_batched_tokens,
            embedding_cache_bytes=embedding_cache_bytes,
        )
        self.engine = Engine(
            config,
            self.runner,
            _greedy,
            Matchers(GrammarVocabulary(Path("none"), VOCAB, [])),
            KVBlockPool(layout.num_blocks),
            [],
            MAX_MODEL_LEN,
            clock,
            self._demand,
        )
        requests = RequestFactory(_positions, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB, clock)
        prefill = decode = None
        if Stage.PREFILL in stages:
            kv = KVProducer(memory, self.leases, self.address)
            prefill = PrefillStage(self.engine, requests, kv, self.mail, clock, TTL_S, overlap=overlap)
        if Stage.DECODE in stages:
            decode = DecodeStage(self.engine, requests, memory, self.address, self.mail, clock)
        self.stage = LanguageStage(
            self.engine, prefill, decode, self.transport, self.mail, clock, lambda: None, layout.num_bytes, WIDTH
        )
        self._routes = self.stage.routes()

    def _demand(self, request: RequestState, mm_hashes: list[str]) -> None:
        self.mail.to_router(EmbeddingsNeeded(*request.key, mm_hashes=mm_hashes))

    def receive(self, body: Body) -> None:
        if isinstance(body, LeaseReleased):
            self.leases.release(body.lease_id)
        else:
            self._routes[type(body)](body)

    @property
    def num_free_blocks(self) -> int:
        return self.engine.pool.num_free

    def assert_nothing_held(self) -> None:
        self.stage.check()
        assert self.stage.num_live() == 0
        assert len(self.leases) == 0
        assert self.num_free_blocks == self.engine.pool.num_blocks

    def close(self) -> None:
        self.stage.check()
        self.transport.check()
        super().close()


def _greedy(logits: torch.Tensor, rows: list[SampleRow]) -> list[Drawn]:
    return [Drawn(token) for token in logits.argmax(-1).tolist()]


def _positions(token_ids: list[int], items: list[PromptItem]) -> tuple[NDArray[np.int64], int]:
    return np.broadcast_to(np.arange(len(token_ids), dtype=np.int64), (3, len(token_ids))), 0


def deliver(*nodes: LanguageNode) -> list[Body]:
    """Carry what the nodes sent to each other, until nothing is under way; returns what the router got."""
    to_router: list[Body] = []
    by_name: dict[str, Callable[[Any], None]] = {node.address.name: node.receive for node in nodes}
    while any(node.mail.sent for node in nodes):
        for node in nodes:
            for receiver, body in node.mail.take():
                if receiver == "router":
                    to_router.append(body)
                elif receiver in by_name:
                    by_name[receiver](body)
    return to_router


def prompt_item(mm_hash: str, offset: int, length: int) -> PromptItem:
    return PromptItem(
        Modality.IMAGE, mm_hash, Placeholder(offset, length), ItemMetadata(Grid(1, 2, 2 * length), length, length)
    )


def prefill(
    request_id: str,
    token_ids: list[int],
    items: Sequence[PromptItem] = (),
    *,
    max_tokens: int = 5,
    decode_elsewhere: bool = False,
    num_output_tokens: int = 0,
) -> Prefill:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Prefill(request_id, 0, token_ids, num_output_tokens, list(items), sampling, "", 0, decode_elsewhere)


def decode(
    request_id: str,
    token_ids: list[int],
    source: WorkerAddress,
    items: Sequence[PromptItem] = (),
    *,
    max_tokens: int = 5,
) -> Decode:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Decode(request_id, 0, token_ids, 0, list(items), sampling, "", 0, source)
