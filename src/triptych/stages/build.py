"""From configuration to loaded stages: what a worker does once, at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.clock import Clock
from triptych.config import Config
from triptych.engine.engine import Engine, Runner
from triptych.engine.grammar import GrammarVocabulary
from triptych.engine.kv_blocks import KVBlockPool
from triptych.engine.matchers import Matchers
from triptych.engine.request_state import RequestState
from triptych.engine.runner import ModelRunner
from triptych.engine.sampler import sample
from triptych.errors import ConfigError
from triptych.handoff.embedding import EmbeddingPool
from triptych.handoff.kv import KVLayout, KVMemory, KVProducer
from triptych.handoff.leases import Leases
from triptych.media.decode import DecodeJob
from triptych.media.decode_process import Decode, DecodeLimits, DecodeProcesses
from triptych.messages import EmbeddingsNeeded, ItemToEncode
from triptych.models.registry import ModelSpec
from triptych.models.vision import VisionRunner
from triptych.models.weights import Progress, resolve_device, torch_dtype
from triptych.stages.base import Mail
from triptych.stages.decode import DecodeStage
from triptych.stages.encode import EncodeStage, VisionTower
from triptych.stages.language import LanguageStage
from triptych.stages.prefill import PrefillStage
from triptych.stages.preprocess import Preprocessor, ThreadedPreprocessor, ToPatches
from triptych.stages.requests import RequestFactory
from triptych.transport.base import Transport
from triptych.types import Stage, WeightsReport, WorkerAddress

CPU_FORWARD_EMBEDS, FORWARD_EMBEDS = 128, 1024  # a CPU gains nothing from larger batches, and ends items later
LEAST_EMBED_POOL_BYTES = 32 << 20  # room for what is published and not yet fetched, whatever the cache keeps
PACKED_WIDTH = 512  # hidden size
STAGING_BYTES = 64 << 20  # for KV blocks of a device that other workers cannot map


@dataclass(frozen=True)
class WorkerParts:
    """What every stage of one worker shares, made by the worker before its stages."""

    config: Config
    spec: ModelSpec
    transport: Transport
    leases: Leases
    address: WorkerAddress
    mail: Mail
    clock: Clock

    @property
    def max_model_len(self) -> int:
        """What the model allows and the KV blocks hold, in tokens."""
        blocks = num_kv_blocks(self.config, self.spec) - 1  # one is scratch
        return min(self.spec.max_model_len, blocks * self.config.engine.block_size)


def num_kv_blocks(config: Config, spec: ModelSpec) -> int:
    """Raises ConfigError when that is not even one block beside the scratch block."""
    engine = config.engine
    blocks = engine.num_kv_blocks or engine.kv_bytes // spec.kv_block_bytes(engine.block_size)
    if blocks < 2:
        raise ConfigError(
            f"kv_bytes={engine.kv_bytes} hold {blocks} KV blocks; two is the least", param="engine.kv_bytes"
        )
    return blocks


def pool_bytes(config: Config, spec: ModelSpec, stages: Sequence[Stage]) -> int:
    """Memory to register at start: finished embeddings, and the KV blocks where they lie in host memory."""
    total = 0
    if Stage.ENCODE in stages:
        total += max(config.encode.cache_bytes, LEAST_EMBED_POOL_BYTES)
    if Stage.PREFILL in stages or Stage.DECODE in stages:
        if resolve_device(spec.device).type == "cpu":
            total += num_kv_blocks(config, spec) * spec.kv_block_bytes(config.engine.block_size)
        else:
            total += STAGING_BYTES
    return total + (1 << 20)  # alignment


def to_patches(spec: ModelSpec, decode: Decode) -> ToPatches:
    family = spec.family

    def patches(item: ItemToEncode) -> NDArray[np.float32]:
        pixels = decode(DecodeJob(item.content, item.decoding, *family.resizing(item.metadata)))
        return family.patches(pixels, item.metadata)

    return patches


class LoadedEncode(NamedTuple):
    stage: EncodeStage
    report: WeightsReport
    is_native: bool  # its blocks are run by `triptych.kernels`


def load_encode(parts: WorkerParts, wake: Callable[[], None], progress: Progress) -> LoadedEncode:
    """`wake` is called from other threads whenever an image is preprocessed."""
    media, encode = parts.config.media, parts.config.encode
    limits = DecodeLimits(media.max_image_pixels, encode.decode_bytes, encode.decode_timeout_s)
    decode = DecodeProcesses(limits, encode.preprocess_threads)  # they start while the weights are read
    patches = to_patches(parts.spec, decode)
    preprocessor = ThreadedPreprocessor(patches, encode.preprocess_threads, wake, decode.close)
    try:
        tower = VisionRunner.load(parts.spec, progress=progress)
        decode.wait_ready()
    except BaseException:  # the process may live on without this worker
        preprocessor.close()
        raise
    return LoadedEncode(build_encode(parts, preprocessor, tower), tower.report, tower.is_native)


def build_encode(parts: WorkerParts, preprocessor: Preprocessor, tower: VisionTower) -> EncodeStage:
    is_cpu = resolve_device(parts.spec.device).type == "cpu"
    return EncodeStage(
        tower,
        preprocessor,
        EmbeddingPool(parts.transport, parts.leases, parts.address),
        parts.mail,
        parts.clock,
        max_encode_embeds=parts.config.encode.max_encode_embeds or (CPU_FORWARD_EMBEDS if is_cpu else FORWARD_EMBEDS),
        cache_bytes=parts.config.encode.cache_bytes,
    )


def kv_memory(parts: WorkerParts) -> KVMemory:
    text = parts.spec.family.text
    block_size = parts.config.engine.block_size
    blocks = num_kv_blocks(parts.config, parts.spec)
    layout = KVLayout(blocks, text.num_layers, text.num_kv_heads, block_size, text.head_dim, torch_dtype(parts.spec))
    return KVMemory(parts.transport, layout, resolve_device(parts.spec.device))


class LoadedLanguage(NamedTuple):
    stage: LanguageStage
    report: WeightsReport
    is_native: bool
    kv_layout: str  # inside a block, see `ModelRunner.kv_layout`


def load_language(parts: WorkerParts, stages: Sequence[Stage], progress: Progress) -> LoadedLanguage:
    memory = kv_memory(parts)
    # Without kernels, packed weights are private copies that pay for the few rows of decode, from about this width on;
    # only in bfloat16 are they bit for bit what plain ones give (docs/decisions/0003).
    pack = Stage.DECODE in stages and parts.spec.dtype == "bfloat16" and parts.spec.family.text.hidden >= PACKED_WIDTH
    runner = ModelRunner.load(parts.spec, memory.tensor, pack_linears=pack, progress=progress)
    stage = build_language(parts, stages, memory, runner, runner.probe)
    return LoadedLanguage(stage, runner.report, runner.is_native, runner.kv_layout)


def build_language(
    parts: WorkerParts, stages: Sequence[Stage], memory: KVMemory, runner: Runner, probe: Callable[[], None]
) -> LanguageStage:
    config, text = parts.config, parts.spec.family.text
    pool = KVBlockPool(memory.layout.num_blocks, config.engine.prefix_caching)

    def demand(request: RequestState, mm_hashes: list[str]) -> None:
        parts.mail.to_router(EmbeddingsNeeded(*request.key, mm_hashes=mm_hashes))

    vocabulary = GrammarVocabulary(parts.spec.path / "tokenizer.json", text.vocab, text.eos_token_ids)
    engine = Engine(
        config.engine,
        runner,
        partial(sample, eos_token_ids=text.eos_token_ids),
        Matchers(vocabulary),
        pool,
        text.eos_token_ids,
        parts.max_model_len,
        parts.clock,
        demand,
    )
    requests = RequestFactory(
        parts.spec.family.positions, config.engine.block_size, parts.max_model_len, text.vocab, parts.clock
    )
    prefill = decode = None
    if Stage.PREFILL in stages:
        kv = KVProducer(memory, parts.leases, parts.address)
        prefill = PrefillStage(
            engine, requests, kv, parts.mail, parts.clock, config.handoff.lease_ttl_s, overlap=config.engine.overlap_kv
        )
    if Stage.DECODE in stages:
        decode = DecodeStage(engine, requests, memory, parts.address, parts.mail, parts.clock)
    return LanguageStage(
        engine,
        prefill,
        decode,
        parts.transport,
        parts.mail,
        parts.clock,
        probe,
        memory.layout.num_bytes,
        parts.spec.embed_width,
    )
