"""Value types that cross module boundaries. Imported by every layer, imports nothing of Triptych.

All are frozen. A field's comment says its unit and who fills it when that is not plain from the name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec


class Stage(StrEnum):
    """What a worker can do with a request."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class FinishReason(StrEnum):
    """Why a choice ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ImageSize(NamedTuple):
    """Pixels after the EXIF orientation is applied."""

    width: int
    height: int


class Placeholder(NamedTuple):
    """A media item's span in the prompt, in token positions."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Grid(NamedTuple):
    """Patches of one item along time, height and width, before spatial merging."""

    t: int
    h: int
    w: int


class ItemMetadata(msgspec.Struct, frozen=True):
    """The structure of one media item, known from its header alone, without a pixel."""

    grid: Grid
    num_embeds: int  # rows that the encoder returns
    num_tokens: int  # prompt positions that the item fills


class MediaItem(msgspec.Struct, frozen=True):
    """One media input as the router holds it: the bytes and all that their header tells."""

    modality: Modality
    mm_hash: str  # 64 hex digits: content, decode and processor options, model fingerprint
    content: bytes
    metadata: ItemMetadata


class PromptItem(msgspec.Struct, frozen=True):
    """One media item at its place in a prompt. The same `mm_hash` may stand at several places."""

    modality: Modality
    mm_hash: str
    placeholder: Placeholder
    metadata: ItemMetadata


class Prompt(msgspec.Struct, frozen=True):
    """A request's tokens with every media item at its place, complete before any media is decoded."""

    token_ids: list[int]
    items: list[PromptItem] = []  # in order of their offsets


class SamplingParams(msgspec.Struct, frozen=True):
    """How the next token is drawn, and which tokens end the request.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is always set by the time a worker
    sees it, so that a request goes on with the same draws on another worker.
    """

    max_tokens: int = 1  # set by the router from the request's own limit and the room that the prompt leaves
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class WorkerAddress(msgspec.Struct, frozen=True):
    """Where one life of a worker process is reached. A restarted worker has a new epoch and new sockets."""

    name: str
    epoch: str  # random, one a process start
    endpoint: str  # ZeroMQ endpoint of its mailbox
    pool: str  # unix socket that hands out the descriptor of its memory pool; "" without one


class Load(msgspec.Struct, frozen=True):
    """What a worker has to do, sampled by itself and sent with every heartbeat."""

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not yet computed
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    num_waiting_embeds: int = 0  # demanded and not yet encoded
    cached_embeds: int = 0
    num_leases: int = 0
    prompt_token_s: float = 0.0  # of the engine's time, for one prompt token; 0: not known yet


class WeightsReport(msgspec.Struct, frozen=True):
    """What a worker read of the checkpoint."""

    shards_read: int = 0
    shards_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    load_s: float = 0.0


class WorkerInfo(msgspec.Struct, frozen=True):
    """What a worker says of itself when it registers."""

    address: WorkerAddress
    stages: list[Stage]
    version_hash: str  # model, dtype, block size, protocol: unlike workers are never paired
    model: str
    max_model_len: int
    weights: WeightsReport
    pid: int
    cores: list[int] = []
    kv_layout: str = ""  # inside a KV block; empty where no language model is hosted


class Heartbeat(msgspec.Struct, frozen=True):
    """Sent by every worker to the router; `counters` are totals since the worker's start, by metric name."""

    name: str
    epoch: str
    load: Load
    counters: dict[str, float] = {}
    draining: bool = False  # it takes no new requests and leaves when those that run are done


class ImageInput(msgspec.Struct, frozen=True):
    """An image as the client names it: `data:`, `http(s):` or `file:`."""

    url: str
    uuid: str = ""


class Request(msgspec.Struct, frozen=True):
    """One chat request, checked by the API and not yet looked into by the router."""

    request_id: str
    messages: list[dict[str, object]]  # OpenAI-like; an image part is {"type": "image"}, bound in order to `images`
    images: list[ImageInput]
    sampling: SamplingParams
    max_tokens: int | None = None  # None: as many as fit
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_generation_prompt: bool = True
    template_kwargs: dict[str, object] = {}
    cache_salt: str = ""
    priority: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # as the prefill worker saw it
    image_tokens: int = 0


class Span(msgspec.Struct, frozen=True):
    """One part of a request's critical path, or one item's way through its encode worker."""

    name: str  # fetch, plan, encode_queue, encode, embed_transfer, prefill_queue, prefill, kv_transfer, decode_queue
    start_s: float  # since the request's arrival
    duration_s: float
    detail: str = ""  # worker, or worker and item


class Timing(msgspec.Struct, frozen=True):
    """Where one request's time went. `critical_path` sums to `ttft_s` but for the hops between processes."""

    ttft_s: float
    e2e_s: float
    critical_path: list[Span]
    items: list[Span]  # every item's own spans, overlapping the critical path
    after_first_token: list[Span]  # kv_transfer and decode_queue where decode runs on another worker


class TextDelta(msgspec.Struct, frozen=True):
    """Text that became final, and how many tokens have been produced up to here. The text may be empty."""

    text: str
    num_output_tokens: int
    token_ids: list[int] = []  # the tokens that arrived with it


class Finished(msgspec.Struct, frozen=True):
    """The end of a request that was answered; every other end is an exception."""

    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token id
    usage: Usage
    timing: Timing


Event = TextDelta | Finished
