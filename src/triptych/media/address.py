"""Which network addresses a media URL may lead to. Called by `fetch.py` in the router, for every hop.

Refuses what only this host or its network can reach, so that a client cannot read internal services through us.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

from triptych.errors import MediaError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def resolve_host(host: str, port: int) -> list[str]:
    """Addresses of a host name, in the order in which the system prefers them."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise MediaError(f"the media host {host[:80]!r} cannot be resolved") from error
    return [str(entry[4][0]) for entry in found]


async def checked_address(host: str, port: int, allow_private: bool, resolve: Resolve) -> str:
    """The address to connect to. Raises MediaError if any address of the host is not a public one."""
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in await resolve(host, port)]
    if not addresses:
        raise MediaError(f"the media host {host[:80]!r} has no address")
    if not allow_private and not all(_is_public(address) for address in addresses):
        raise MediaError(f"the media host {host[:80]!r} is at a private, local or reserved address, which is refused")
    return str(addresses[0])


def _is_public(address: IPAddress) -> bool:
    embedded = _embedded_ipv4(address) if isinstance(address, ipaddress.IPv6Address) else None
    if embedded is not None:
        return _is_public(embedded)
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one of a transition scheme really leads to."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
