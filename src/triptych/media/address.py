"""Which network addresses a media URL may lead to. Called by `http_fetch.py` in the router, for every hop.

Refuses what only this host or its network can reach, so that a client cannot read internal services through us.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from triptych.errors import MediaError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # nothing outside of it is a host on the internet
# Which old versions of the library take for public.
_SPECIAL = tuple(ipaddress.IPv4Network(text) for text in ("192.0.0.0/24", "192.88.99.0/24"))
_LOOK_UP_THREADS = 16


class SystemResolver:
    """The system's look-up of names, on threads of its own.

    A client can name hosts whose servers answer late, and a look-up cannot be cancelled: on the event loop's own few
    threads such names would hold up everything else that runs there.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOK_UP_THREADS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Addresses of a host name, in the order in which the system prefers them. Raises MediaError."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        except (OSError, UnicodeError) as error:
            raise MediaError(f"the media host {host[:80]!r} cannot be resolved") from error
        return [str(entry[4][0]) for entry in found]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


async def checked_address(host: str, port: int, allow_private: bool, resolve: Resolve) -> str:
    """The address to connect to. Raises MediaError if any address of the host is not a public one."""
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in await resolve(host, port)]
    if not addresses:
        raise MediaError(f"the media host {host[:80]!r} has no address")
    if not allow_private and not all(_is_public(address) for address in addresses):
        why = "is at a private, local or reserved address, which is refused (setting media.allow_private_urls)"
        raise MediaError(f"the media host {host[:80]!r} {why}")
    return str(addresses[0])


def _is_public(address: IPAddress) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded_ipv4(address)
        if embedded is not None:
            return _is_public(embedded)
        if address not in _GLOBAL_UNICAST:
            return False
    elif any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one of a transition scheme really leads to."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
