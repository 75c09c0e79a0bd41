"""Keys of a deployment that spans hosts, and what a ZeroMQ socket needs to be encrypted and authenticated (CURVE).

The router has a key pair; so has the mailbox of each worker, made anew at each start. Whoever connects proves that it
holds the deployment's member key, which the join file carries to the workers of other hosts. Used by both mailboxes
and by registration.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import zmq
import zmq.utils.z85

from triptych.errors import ConfigError

logger = logging.getLogger(__name__)

JOIN_FILE, KEY_FILE = "join.json", "keys.json"
HANDSHAKE_MS = 10_000
_ZAP = "inproc://zeromq.zap.01"  # fixed by the protocol, rfc.zeromq.org/spec/27
_DOMAIN = b"triptych"


class KeyPair(NamedTuple):
    """CURVE keys as Z85 text of 40 characters."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The join file. Whoever has it can register a worker, and so read every prompt: it is as secret as a password."""

    router: str  # tcp://host:port of the router's mailbox
    router_key: str  # public
    member: KeyPair
    version: Literal[1] = 1


class RouterKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stays with the router, so that workers find the same router after its restart."""

    router: KeyPair
    member: KeyPair

    @classmethod
    def load_or_make(cls, directory: str) -> RouterKeys:
        """Raises ConfigError when the file is there and no good."""
        path = Path(directory, KEY_FILE)
        if path.exists():
            return _read_secret(path, cls)
        keys = cls(KeyPair.new(), KeyPair.new())
        write_secret(path, keys)
        return keys


def load_join(path: str) -> Join:
    """Raises ConfigError when the file cannot be used, and when others on this machine could read it."""
    return _read_secret(Path(path), Join)


def write_secret(path: Path, content: msgspec.Struct) -> None:
    """For our user's eyes only, from the first moment, and never half written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    beside.replace(path)


Kind = TypeVar("Kind", bound=msgspec.Struct)


def _read_secret(path: Path, kind: type[Kind]) -> Kind:
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"{path} holds a secret and others may read it: chmod 600 {path}")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a file of keys: {error}") from error


def tcp_endpoint(host: str, port: int) -> str:
    """Where to bind; port 0 is any free one. Raises ConfigError unless `host` is one address that others can name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{host} is not an IP address") from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(f"{host} is not an address at which others reach this process: name the one they use")
    return f"tcp://{f'[{host}]' if address.version == 6 else host}:{port or '*'}"


def check_endpoint(endpoint: str, has_keys: bool) -> str:
    """Raises ConfigError for an endpoint that others could read or write: TCP without keys, and what is neither."""
    if endpoint.startswith("tcp://") and has_keys:
        return endpoint
    if endpoint.startswith("ipc://") and not has_keys:
        return endpoint
    if endpoint.startswith("tcp://"):
        raise ConfigError(
            f"endpoint {endpoint}: without keys only unix sockets (ipc://) are safe; join with a join file"
        )
    raise ConfigError(f"endpoint {endpoint}: between hosts messages go over tcp://, on one host over ipc://")


def bind_with(socket: zmq.Socket[Any], own: KeyPair, endpoint: str) -> str:
    """Listen there, with a `Guard` in the socket's context; where it is in the end. Raises ConfigError."""
    socket.curve_secretkey = own.secret.encode()
    socket.curve_publickey = own.public.encode()
    socket.curve_server = True
    socket.zap_domain = _DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a guard nobody gets in, rather than everybody
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {endpoint}: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_with(socket: zmq.Socket[Any], member: KeyPair, server_key: str, endpoint: str) -> None:
    """Raises ConfigError for what is no key or no address."""
    try:
        socket.curve_serverkey = server_key.encode()
    except (zmq.ZMQError, UnicodeError):
        raise ConfigError(f"{server_key!r} is not a CURVE key") from None
    socket.curve_publickey = member.public.encode()
    socket.curve_secretkey = member.secret.encode()
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {endpoint}: {error}") from error


class Guard:
    """Lets into the CURVE sockets of one context only who holds the member key. A thread, until the context ends."""

    def __init__(self, context: zmq.Context[Any], member_public: str) -> None:
        self._allowed = zmq.utils.z85.decode(member_public.encode())
        # Its own view of the context, which a `destroy` of the other does not close under the thread's hands.
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._thread = threading.Thread(target=self._run, name="curve-guard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart()
                self._socket.send_multipart(self._answer(frames))
            except zmq.ContextTerminated:
                self._socket.close(linger=0)
                return

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request_id, _, address, _, mechanism, *credentials = frames
        allowed = mechanism == b"CURVE" and any(hmac.compare_digest(key, self._allowed) for key in credentials)
        if not allowed:
            logger.warning("%s is not a member of this deployment", address.decode(errors="replace"))
        status, text = (b"200", b"OK") if allowed else (b"400", b"not a member")
        return [version, request_id, status, text, b"", b""]
