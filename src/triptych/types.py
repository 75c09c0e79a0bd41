"""Value types that cross module boundaries. Imported by every layer, imports nothing of Triptych.

All are frozen. A field's comment says its unit and who fills it when that is not plain from the name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, NamedTuple

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
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


class ImageSize(NamedTuple):
    """Pixels after the EXIF orientation is applied."""

    width: int
    height: int


class PixelLimits(NamedTuple):
    """Areas in pixels between which an image is scaled."""

    min_pixels: int
    max_pixels: int


class Rgb(NamedTuple):
    """A colour in sRGB, levels from 0 to 255."""

    red: int
    green: int
    blue: int


class ImageDecoding(NamedTuple):
    """How the bytes of an image become pixels, apart from the size to which its metadata's grid scales them."""

    size: ImageSize  # as its header tells; pixels of another size are refused
    background: Rgb  # under transparent pixels


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
    decoding: ImageDecoding = ImageDecoding(ImageSize(1, 1), Rgb(255, 255, 255))
    param: str = "messages"  # where the request has it, for errors


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

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the other penalties 0 are
    off. `seed` is always set by the time a worker sees it, so that a request goes on with the same draws on another
    worker.
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
    presence_penalty: float = 0.0  # taken off the logit of every token that the output has
    frequency_penalty: float = 0.0  # the same, as often as the output has it
    repetition_penalty: float = 1.0  # divides positive logits of tokens of prompt and output, multiplies negative ones
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []  # empty: all
    bad_words: list[list[int]] = []  # token sequences that the output must not have; set by the router
    num_logprobs: int | None = None  # None: no log-probabilities; k: the chosen token's and those of the k likeliest
    num_prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    grammar: str = ""  # what the output must match, in the form of `prompt/grammar.py`; set by the router


class WorkerAddress(msgspec.Struct, frozen=True):
    """Where one life of a worker process is reached. A restarted worker has a new epoch and new sockets."""

    name: str
    epoch: str  # random, one a process start
    endpoint: str  # ZeroMQ endpoint of its mailbox: a unix socket, or TCP
    pool: str  # unix socket that hands out the descriptor of its memory pool; "" without one
    data: str = ""  # host:port where its pool is served over TCP; "" without one
    key: str = ""  # CURVE public key of its mailbox, Z85; "" on a unix socket


class Load(msgspec.Struct, frozen=True):
    """What a worker has to do, sampled by itself and sent with every heartbeat."""

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not yet computed
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    max_kv_tokens: int = 0  # that all blocks hold
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
    kernels: dict[str, str] = {}  # what runs the layers of each part, "native" or "torch", by "vision" and "language"
    supervised: bool = False  # the router's process starts it again when it leaves


class Heartbeat(msgspec.Struct, frozen=True):
    """Sent by every worker to the router; `counters` are totals since the worker's start, by metric name."""

    name: str
    epoch: str
    load: Load
    counters: dict[str, float] = {}
    draining: bool = False  # it takes no new requests and leaves when those that run are done


class ImageInput(msgspec.Struct, frozen=True):
    """An image as the client names it: `data:`, `http(s):` or `file:`; without a URL the last one sent with `uuid`."""

    url: str
    uuid: str = ""
    param: str = "messages"  # where the request has it, for errors


class Structure(msgspec.Struct, frozen=True):
    """What the output must match; `kind` says how `source` is read."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
    source: str  # the schema as JSON text, the expression, a JSON list of choices, or the grammar
    param: str = "structured_outputs"  # where the request has it, for errors
    # Of JSON, at each place where it may be: an expression, "" for the one form that json.dumps writes, None for ours.
    whitespace: str | None = None


class ToolChoice(StrEnum):
    """Whether the model may, must not or must call tools. One tool by name is `Request.forced_tool`."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class Request(msgspec.Struct, frozen=True):
    """One request for `n` answers to a prompt, checked by the API and not yet looked into by the router."""

    request_id: str
    messages: list[dict[str, object]]  # OpenAI-like; an image part is {"type": "image"}, bound in order to `images`
    images: list[ImageInput]
    sampling: SamplingParams
    max_tokens: int | None = None  # None: as many as fit
    max_tokens_param: str = "max_tokens"  # the field that has it
    messages_param: str = "messages"  # the field that has messages and images
    function_param: str = "function."  # what comes before the fields of a tool's function
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_generation_prompt: bool = True
    template_kwargs: dict[str, object] = {}
    cache_salt: str = ""
    priority: int = 0  # lower is sooner
    deadline_s: float | None = None  # from arrival to the last token; None: the server's
    n: int = 1
    stream: bool = False  # whether the answer is read while it comes
    prompt: str | list[int] | None = None  # instead of `messages`: text or tokens that no template touches
    add_special_tokens: bool | None = None  # whether the tokenizer adds its own; None: as the template wants it
    continue_final_message: bool = False
    chat_template: str = ""  # instead of the checkpoint's
    documents: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str = ""  # the name of the one tool that must be called
    parallel_tool_calls: bool = True
    structure: Structure | None = None
    bad_words: list[str] = []
    truncate_prompt_tokens: int | None = None  # keep so many
    truncation_side: Literal["left", "right"] = "left"  # where the tokens go that are too many
    processor_options: dict[str, Any] = {}  # `mm_processor_kwargs`
    media_options: dict[str, Any] = {}  # `media_io_kwargs`
    session_id: str = ""  # requests of one session go to one prefill worker where that is no worse
    client: str = ""  # who asks; what one client named by `uuid` is not another's


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


class ScoredToken(NamedTuple):
    token_id: int
    content: bytes  # UTF-8; half a character where the token is one
    logprob: float  # natural, over the whole vocabulary, before temperature and filters


class TokenLogprobs(msgspec.Struct, frozen=True):
    """A token with its log-probability, and the likeliest tokens at its place in descending order."""

    chosen: ScoredToken
    rank: int  # of the chosen token, from 1
    top: list[ScoredToken]


class Started(msgspec.Struct, frozen=True):
    """The first event: the prompt as the model reads it. It comes together with the first token."""

    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # as the prefill worker saw it
    num_image_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = []  # one a token where they were asked for; the first has none


class TextDelta(msgspec.Struct, frozen=True):
    """Text of one choice that became final, and how many tokens it has up to here. The text may be empty."""

    text: str
    num_output_tokens: int
    token_ids: list[int] = []  # the tokens that arrived with it
    choice: int = 0
    logprobs: list[TokenLogprobs] = []  # one a token where they were asked for


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of a tool call of one choice: the first has id and name, the arguments of all together are JSON."""

    choice: int
    index: int  # of the call within its choice
    id: str
    name: str
    arguments: str


class ChoiceFinished(msgspec.Struct, frozen=True):
    """One choice is complete."""

    choice: int
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token id


class Finished(msgspec.Struct, frozen=True):
    """The end of a request that was answered, after that of every choice; every other end is an exception."""

    usage: Usage
    timing: Timing


Event = Started | TextDelta | ToolCallDelta | ChoiceFinished | Finished
