"""Every setting of Triptych, documented once, as frozen nested structs.

`cli/options.py` makes the command-line flags from these fields; `load` merges defaults, a TOML file and flags. No I/O
happens in validation, and 'auto' is resolved into a new object by whoever knows the answer (`models/registry.py`).
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from triptych.errors import ConfigError
from triptych.types import Stage

PositiveInt = Annotated[int, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]


def doc(text: str) -> Meta:
    """The one description of a field: shown by --help, by `triptych config` and in docs/configuration.md."""
    return Meta(description=text)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of settings; one flag a field."""


class ModelConfig(Section, frozen=True):
    path: Annotated[str, doc("directory of a Hugging Face checkpoint, or 'demo' for the packaged one")] = "demo"
    served_name: Annotated[str, doc("model name in the API; empty: the directory's name")] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], doc("dtype of weights, KV and embeddings; auto: the checkpoint's")
    ] = "auto"
    device: Annotated[
        str, doc("torch device of the stages: auto, cpu, cuda or cuda:N; auto: cuda where there is one")
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        doc("what runs the layers on a CPU: native is Triptych's own C++; auto: native where it was built and can run"),
    ] = "auto"
    max_model_len: Annotated[
        Count, doc("longest prompt + output in tokens; 0: what the checkpoint allows, at most what the KV blocks hold")
    ] = 0


class MediaConfig(Section, frozen=True):
    max_images: Annotated[Count, doc("images in one request, over all its messages")] = 32
    max_image_bytes: Annotated[PositiveInt, doc("encoded bytes of one image")] = 32 << 20
    max_image_pixels: Annotated[PositiveInt, doc("width x height of one image as its header gives them")] = 64_000_000
    background: Annotated[str, doc("colour under transparent pixels, as #rrggbb")] = "#ffffff"
    fetch_timeout_s: Annotated[Seconds, doc("time for one media URL, redirects included")] = 10.0
    max_redirects: Annotated[Count, doc("redirects followed for one media URL")] = 3
    allow_private_urls: Annotated[bool, doc("fetch media from loopback, link-local and private addresses")] = False
    allowed_domains: Annotated[
        str, doc("hosts that http: URLs may name, with commas between them; .example.org: all below it; empty: any")
    ] = ""
    allowed_local_media_path: Annotated[
        str, doc("directories under which file: URLs may read, with colons between them; empty: none")
    ] = ""
    max_staged_bytes: Annotated[
        PositiveInt, doc("media that all requests hold at once, URLs and contents; one more request is answered 503")
    ] = 1 << 30
    uuid_cache_bytes: Annotated[
        Count, doc("images kept by the uuid that came with them, for requests that send the uuid alone; 0: none")
    ] = 64 << 20


class EncodeConfig(Section, frozen=True):
    max_encode_embeds: Annotated[
        Count,
        doc("embeds that one forward of the tower may return; a larger item runs alone; 0: 128 on a CPU, else 1024"),
    ] = 0
    order: Annotated[
        Literal["smallest", "arrival"],
        doc("which request's items are encoded first; smallest: by arrival, with large ones put back a while"),
    ] = "smallest"
    demand: Annotated[
        Literal["needed", "eager"],
        doc("which items are encoded; needed: what prefill lacks; eager: all at once, to measure what that costs"),
    ] = "needed"
    encode_on: Annotated[
        Literal["any", "dedicated", "colocated"],
        doc("who encodes; any: whoever would finish first; dedicated: workers without prefill; colocated: with it"),
    ] = "any"
    fan_out: Annotated[
        bool, doc("spread the images of one request over encode workers; off to measure what that gains")
    ] = True
    window_embeds: Annotated[
        PositiveInt, doc("embeds that an encode worker has been given and not finished, beyond two items")
    ] = 128
    cache_bytes: Annotated[Count, doc("memory for finished embeddings on an encode worker")] = 256 << 20
    preprocess_threads: Annotated[
        PositiveInt, doc("images that are decoded and resized at once beside the tower, each in a process of its own")
    ] = 1
    decode_timeout_s: Annotated[Seconds, doc("time that decoding and resizing one image may take")] = 30.0
    decode_bytes: Annotated[PositiveInt, doc("memory that decoding and resizing one image may take")] = 2 << 30


class EngineConfig(Section, frozen=True):
    block_size: Annotated[PositiveInt, doc("tokens in one KV block")] = 16
    num_kv_blocks: Annotated[Count, doc("KV blocks; 0: as many as kv_bytes holds")] = 0
    kv_bytes: Annotated[PositiveInt, doc("memory for KV blocks where num_kv_blocks is 0")] = 512 << 20
    max_num_batched_tokens: Annotated[PositiveInt, doc("tokens in one step, decode and prefill together")] = 512
    decode_stall_s: Annotated[
        Seconds,
        doc(
            "time that prompt tokens may add to a step beside as many decode rows as usual; less time beside more rows"
        ),
    ] = 0.025
    overlap_encode: Annotated[
        bool, doc("begin a prompt before all its embeddings are here; off to measure what that gains")
    ] = True
    overlap_kv: Annotated[
        bool, doc("hand KV blocks on while later tokens of the prompt are computed; off to measure what that gains")
    ] = True
    max_num_seqs: Annotated[PositiveInt, doc("requests in one step")] = 32
    prefix_caching: Annotated[bool, doc("reuse KV blocks of equal prefixes")] = True
    embedding_cache_bytes: Annotated[Count, doc("memory for received embeddings on a prefill worker")] = 256 << 20


class HandoffConfig(Section, frozen=True):
    transport: Annotated[
        Literal["auto", "shm", "tcp", "inproc"],
        doc(
            "how embeddings and KV move; auto: shared memory on one host, TCP between hosts; inproc only where one "
            "worker hosts every stage"
        ),
    ] = "auto"
    lease_ttl_s: Annotated[
        Seconds, doc("how long a producer keeps what it published for a consumer that does not answer")
    ] = 60.0
    transfer_timeout_s: Annotated[
        Seconds, doc("patience with a worker of another host, beside a second for each 4 MiB, before a fetch fails")
    ] = 10.0


class RouterConfig(Section, frozen=True):
    max_num_requests: Annotated[PositiveInt, doc("requests admitted at once; one more is answered 503 at once")] = 256
    max_backlog_s: Annotated[
        Seconds,
        doc("predicted time until new work would be begun, beyond which a request is answered 503 at once"),
    ] = 60.0
    deadline_s: Annotated[
        Seconds, doc("time for one request, from its arrival to its last token; a request may ask for less")
    ] = 600.0
    max_attempts: Annotated[
        PositiveInt, doc("attempts at one request, the first included, and at encoding one of its items")
    ] = 3
    capacity_wait_s: Annotated[
        Seconds, doc("how long a request whose worker was lost waits for one that can take it over")
    ] = 15.0
    heartbeat_s: Annotated[Seconds, doc("time between two heartbeats of a worker")] = 1.0
    heartbeat_ttl_s: Annotated[Seconds, doc("silence after which a worker counts as lost")] = 5.0
    probe_s: Annotated[Seconds, doc("time between two probes that do real work in every stage")] = 10.0
    probe_timeout_s: Annotated[
        Seconds, doc("a worker whose probe takes longer is taken out until one succeeds; after two it is lost")
    ] = 60.0
    control_host: Annotated[
        str, doc("IP address of this host at which workers of other hosts reach the router; empty: there are none")
    ] = ""
    control_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)], doc("port beside control_host for their messages; 0: any free one")
    ] = 0
    drain_s: Annotated[Seconds, doc("time that running requests get when a process is told to stop")] = 30.0


class ApiConfig(Section, frozen=True):
    host: Annotated[str, doc("address that the API listens on")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], doc("port of the API; 0: any free one")] = 8000
    max_body_bytes: Annotated[PositiveInt, doc("longest request body")] = 128 << 20
    max_reading_bytes: Annotated[
        PositiveInt, doc("bytes of all bodies that are being read; one more is answered 503")
    ] = 1 << 30
    body_timeout_s: Annotated[Seconds, doc("time in which a request body must arrive")] = 30.0
    api_keys_file: Annotated[
        str, doc("file of API keys, one a line; the variable TRIPTYCH_API_KEYS may hold more; none at all: no keys")
    ] = ""
    requests_per_minute: Annotated[
        Count, doc("requests that one key, or one address where there are no keys, may start; 0: no limit")
    ] = 0
    cors_origins: Annotated[
        str, doc("origins whose pages may call the API, separated by commas; *: all; empty: none")
    ] = ""
    trust_request_chat_template: Annotated[
        bool, doc("take `chat_template` from requests: it runs in a sandbox, but can use up memory and time")
    ] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], doc("least severe line that is logged")] = "info"


class Config(Section, frozen=True):
    """All of it; the sections are named in flags and in the TOML file."""

    model: ModelConfig = ModelConfig()
    media: MediaConfig = MediaConfig()
    encode: EncodeConfig = EncodeConfig()
    engine: EngineConfig = EngineConfig()
    handoff: HandoffConfig = HandoffConfig()
    router: RouterConfig = RouterConfig()
    api: ApiConfig = ApiConfig()


class WorkerConfig(Section, frozen=True):
    """What one worker process is told, beside the `Config` that it shares with the router."""

    name: str
    stages: list[Stage]
    router_url: str  # unused with a join file
    runtime_dir: str  # holds the unix sockets of this deployment, or of this host's part of it
    cores: list[int] = []  # empty: not pinned
    allowed_cores: list[int] = []  # where its parent is pinned: what it may use itself
    lent_cores: list[int] = []  # of other workers, to compute on while these have nothing to do
    num_threads: int = 1  # torch threads; more than one a core loses (docs/decisions/0003)
    join_file: str = ""  # of a deployment that spans hosts (`curve.Join`)
    host: str = ""  # with it: the address of this host at which the others reach the worker
    port: int = 0  # of its mailbox; 0: any free one
    data_port: int = 0  # of its memory pool; 0: any free one
    supervised: bool = False  # set by the supervisor, which starts it again


def load(file: Path | None, overrides: dict[str, dict[str, Any]]) -> Config:
    """Defaults, then `file` (TOML), then `overrides` by section and field. Raises ConfigError naming the field."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text())
        except (OSError, ValueError) as error:  # no file, no text, no TOML
            raise ConfigError(f"{file}: {error}") from error
        _converted(values, str(file))
    for section, fields in overrides.items():
        given = values.get(section, {})
        values[section] = given | fields if isinstance(given, dict) else given  # `convert` says what is wrong with it
    return _converted(values, "configuration")


def _converted(values: Mapping[str, Any], where: str) -> Config:
    """Raises ConfigError that names `where` and the field, and what the field may be."""
    try:
        return msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        allowed = _allowed(str(error))
        raise ConfigError(f"{where}: {error}" + (f"; it may be {allowed}" if allowed else "")) from error


def _allowed(message: str) -> str:
    """The values of the field that msgspec's message names, where it has a list of them."""
    match = re.search(r"at `\$\.(\w+)\.(\w+)`$", message)
    if match is None:
        return ""
    kind = get_type_hints(get_type_hints(Config)[match[1]])[match[2]]
    return ", ".join(get_args(kind)) if get_origin(kind) is Literal else ""


def by_section(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by the names of their flags, `block_size` or `engine_block_size`, as `load` takes them.

    Raises ConfigError for a name that no field has, or that two have.
    """
    places: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for section in msgspec.structs.fields(Config):
        for name in type(section.default).__struct_fields__:
            places[name].append((section.name, name))
            places[f"{section.name}_{name}"].append((section.name, name))
    found: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in places:
            near = "".join(f"; did you mean {known}?" for known in get_close_matches(name, places, 1))
            raise ConfigError(f"there is no setting {name!r}{near}", param=name)
        if len(places[name]) > 1:
            full = " or ".join(f"{section}_{field}" for section, field in places[name])
            raise ConfigError(f"{name!r} is the name of several settings: say {full}", param=name)
        ((section_name, field),) = places[name]
        found.setdefault(section_name, {})[field] = value
    return found
