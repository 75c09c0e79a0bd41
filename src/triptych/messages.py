"""What the router and the workers say to each other: typed, versioned, msgpack on the wire, never pickle.

A message goes one way, from one mailbox to another; answers are messages of their own. Every message about a request
carries its `request_id` and `attempt`: a request that was planned anew has a higher attempt, and what still arrives
for a lower one is dropped. `tests/messages/golden.json` holds the bytes of each message.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from triptych.types import (
    FinishReason,
    Heartbeat,
    ImageDecoding,
    ItemMetadata,
    Modality,
    PromptItem,
    SamplingParams,
    WorkerAddress,
    WorkerInfo,
)

PROTOCOL_VERSION = 2


class Message(msgspec.Struct, frozen=True, tag=True, array_like=False, omit_defaults=True):
    """Base of all messages; the tag on the wire is the class's name."""


class RequestMessage(Message, frozen=True):
    """Base of the messages about one attempt at one request."""

    request_id: str
    attempt: int


class Refusal(StrEnum):
    """Why a worker did not take a request. `retryable` says whether another worker may."""

    DRAINING = "draining"
    TOO_LONG = "too_long"
    STAGE_NOT_HOSTED = "stage_not_hosted"
    INVALID = "invalid"  # it contradicts itself, or what the model is

    @property
    def retryable(self) -> bool:
        return self not in (Refusal.TOO_LONG, Refusal.INVALID)


# -- router to encode worker, and back ---------------------------------------------------------------------------------


class ItemToEncode(msgspec.Struct, frozen=True):
    modality: Modality
    mm_hash: str
    content: bytes
    metadata: ItemMetadata
    decoding: ImageDecoding


class PrepareItems(RequestMessage, frozen=True):
    """Decode and preprocess at once; the tower waits for `EncodeItems`."""

    items: list[ItemToEncode]


class EncodeItems(RequestMessage, frozen=True):
    """Demand: publish these items to the consumer, from the cache or by a forward."""

    mm_hashes: list[str]
    consumer: WorkerAddress


class EncodeSource(StrEnum):
    """Where a published embedding came from."""

    FORWARD = "forward"
    ENCODER_CACHE = "encoder_cache"
    SINGLE_FLIGHT = "single_flight"  # another request's forward, which began after this one asked


class ItemEncoded(RequestMessage, frozen=True):
    """The item was published to its consumer. Durations are of the encode worker's clock."""

    mm_hash: str
    source: EncodeSource
    queue_s: float  # from demand to the start of the forward
    encode_s: float


class ItemFailed(RequestMessage, frozen=True):
    mm_hash: str
    message: str
    bad_media: bool  # the item's own fault: the client gets a 400. Else another encode worker may try.


# -- router to prefill and decode worker, and back ---------------------------------------------------------------------


class PromptMessage(RequestMessage, frozen=True):
    """Base of the two messages that carry a whole prompt."""

    token_ids: list[int]  # the prompt, then the tokens that earlier attempts already produced
    num_output_tokens: int  # how many of `token_ids` are output of earlier attempts
    items: list[PromptItem]
    sampling: SamplingParams
    cache_salt: str
    priority: int  # lower is sooner


class Prefill(PromptMessage, frozen=True):
    """Compute the prompt's KV and sample. The answer is `Accepted` or `Refused`."""

    decode_elsewhere: bool  # hand the KV off after the first token, else go on here
    has_siblings: bool = False  # further choices with the same prompt follow its first token


class Decode(PromptMessage, frozen=True):
    """Fetch the prompt's KV from `source` as it grows, then go on sampling."""

    source: WorkerAddress


class Accepted(RequestMessage, frozen=True):
    num_cached_tokens: int
    needed: list[str]  # mm_hashes that neither the prefix cache nor the cache of embeddings covers


class Refused(RequestMessage, frozen=True):
    reason: Refusal
    message: str


class EmbeddingsNeeded(RequestMessage, frozen=True):
    """Items that a worker needs after all: a preempted request starts over, or a transfer failed."""

    mm_hashes: list[str]


class ItemHeld(RequestMessage, frozen=True):
    """The consumer holds the embedding in its own memory; the encode worker may die now."""

    mm_hash: str
    transfer_s: float


class ItemLost(RequestMessage, frozen=True):
    """The consumer could not fetch a published embedding, and waits for one from elsewhere."""

    mm_hash: str
    owner: str  # the encode worker's name
    message: str


class PrefillTiming(msgspec.Struct, frozen=True):
    """Where the time from submit to first token went on the worker's clock; the three sum to it."""

    queue_s: float  # waiting for a place in a step, or for KV blocks
    embed_wait_s: float  # blocked on an embedding that had not arrived
    prefill_s: float
    blocking_item: str = ""  # mm_hash of the item that was waited for last


class DecodeTiming(msgspec.Struct, frozen=True):
    """Where the time from `Decode` to the decode worker's first token went, on its clock."""

    kv_transfer_s: float  # until the last KV block had arrived
    queue_s: float  # from then to the first step


class Logprobs(msgspec.Struct, frozen=True):
    """Natural log-probabilities at one place: of the token that stands there, then of the likeliest, descending."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the first, from 1


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step gave one request."""

    request_id: str
    attempt: int
    index: int  # of the first of them among all output tokens: a decode worker's can overtake the prefill worker's
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop_token_ids entry that ended it
    ends_in_text: bool = False  # it stopped because its grammar is complete: the last token is text
    prefill: PrefillTiming | None = None
    decode: DecodeTiming | None = None
    logprobs: list[Logprobs] = []  # one a token, where they were asked for
    prompt_logprobs: list[Logprobs] = []  # of the prompt's tokens but the first; with the first token


class StepOutput(Message, frozen=True):
    """Outputs of all requests of one step, in one message."""

    outputs: list[TokenOutput]


class AttemptFailed(RequestMessage, frozen=True):
    """The worker gave this attempt up and freed all of it."""

    message: str
    retryable: bool  # a lost peer or a failed transfer: another plan may succeed
    bad_grammar: bool = False  # what the client wants the output to match is at fault: it gets a 400


class Cancel(RequestMessage, frozen=True):
    """Stop and free everything of this attempt, at whatever stage. Harmless when there is nothing."""


# -- worker to worker: hand-off ----------------------------------------------------------------------------------------


class Range(NamedTuple):
    """Bytes in the owner's memory pool."""

    offset: int
    num_bytes: int


class EmbeddingHandle(msgspec.Struct, frozen=True):
    """A leased embedding: [num_embeds, hidden * (1 + deepstack layers)], rows contiguous."""

    lease_id: int
    owner: WorkerAddress
    range: Range
    shape: tuple[int, int]
    dtype: str
    checksum: int  # xxh3_64 of the bytes
    ticket: bytes = b""  # opens the range to a fetch over TCP for as long as the lease lasts; see `transport/wire.py`


class EmbeddingPublished(RequestMessage, frozen=True):
    mm_hash: str
    handle: EmbeddingHandle


class FetchKV(RequestMessage, frozen=True):
    """The decode worker wants the request's KV, as it is computed."""

    consumer: WorkerAddress


class KVHandle(msgspec.Struct, frozen=True):
    """Leased KV blocks `first_block`... of a request, each [layers, 2, kv_heads, block_size, head_dim]."""

    lease_id: int
    owner: WorkerAddress
    first_block: int
    blocks: list[Range]
    checksums: list[int]
    ticket: bytes = b""


class KVPublished(RequestMessage, frozen=True):
    """Blocks whose tokens are computed, of a prompt that the prefill worker is sure to finish.

    The last one carries the first token that the prefill worker sampled.
    """

    handle: KVHandle
    num_tokens: int  # tokens of the request whose KV is published up to here
    first_token_id: int | None = None  # set on the last message


class KVRefused(RequestMessage, frozen=True):
    """The prefill worker does not have the request (any more)."""

    message: str


class LeaseReleased(Message, frozen=True):
    lease_id: int


# -- health ------------------------------------------------------------------------------------------------------------


class Probe(Message, frozen=True):
    """Do a small piece of real work in every stage."""

    probe_id: int


class Probed(Message, frozen=True):
    probe_id: int
    error: str = ""


class PeerLost(Message, frozen=True):
    """A worker's life is over: end the leases it held, let go of its memory."""

    name: str
    epoch: str


class LinkLost(Message, frozen=True):
    """The sender cannot reach this worker, or has lost its connection to it: what it sent there may not arrive."""

    name: str
    epoch: str


class Drain(Message, frozen=True):
    """Take no new requests; leave when those that run are done."""


# -- prefix caches -----------------------------------------------------------------------------------------------------


class ListBlocks(Message, frozen=True):
    """Say which KV blocks can be found in the prefix cache: the router has just come to know the worker."""


class BlocksChanged(Message, frozen=True):
    """Hashes of KV blocks that entered the prefix cache of a prefill worker, and of those that left it."""

    stored: list[bytes]
    removed: list[bytes]
    is_all: bool = False  # the answer to `ListBlocks`: what is not in `stored` is not cached


# -- a worker of another host and the router; workers of the router's own host say the same over HTTP ------------------


class Register(Message, frozen=True):
    info: WorkerInfo


class Beat(Message, frozen=True):
    heartbeat: Heartbeat


class Leave(Message, frozen=True):
    name: str
    epoch: str


class Answer(Message, frozen=True):
    """The router's word on one of these three, with HTTP's numbers: 200, 404 register (again), 409 not wanted."""

    status: int
    message: str = ""


Body = (
    PrepareItems | EncodeItems | ItemEncoded | ItemFailed
    | Prefill | Decode | Accepted | Refused | EmbeddingsNeeded | ItemHeld | ItemLost | StepOutput
    | AttemptFailed | Cancel
    | EmbeddingPublished | FetchKV | KVPublished | KVRefused | LeaseReleased
    | Probe | Probed | PeerLost | LinkLost
    | Drain | ListBlocks | BlocksChanged
    | Register | Beat | Leave | Answer
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One message with who sent it. A receiver drops other protocol versions and epochs that it knows to be over."""

    version: int
    sender: str
    epoch: str
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def version_hash(fingerprint: str, block_size: int) -> str:
    """Equal for workers that may exchange embeddings and KV. `fingerprint` covers weights, processor and dtype."""
    return blake2b(f"{PROTOCOL_VERSION}\0{fingerprint}\0{block_size}".encode(), digest_size=8).hexdigest()


def encode(body: Body, sender: str, epoch: str) -> bytes:
    return _encoder.encode(Envelope(PROTOCOL_VERSION, sender, epoch, body))


def decode(frame: bytes) -> Envelope:
    """Raises msgspec.DecodeError on anything that is not an envelope of this protocol."""
    try:
        return _decoder.decode(frame)
    except RecursionError:
        raise msgspec.DecodeError("the frame is nested too deep") from None
