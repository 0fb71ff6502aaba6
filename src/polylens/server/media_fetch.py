"""Fetch pictures and videos from addresses that strangers give, without becoming their tool.

A server that fetches what it is told to can be used to reach what only it can reach: its own loopback services,
the private network, a cloud's metadata address (SSRF). So:

- nothing is fetched unless the operator asked for it, and then from listed hosts only if a list was given;
- the name is resolved here, every address it has must be public, and the connection is made to exactly the
  address that was checked (a second look-up could answer otherwise: DNS rebinding);
- redirects are followed by hand, each one checked like the first address;
- proxies and credentials of the environment are not used, no cookies are kept, and an address with a user name
  or an odd port is refused;
- the size counts as it arrives, compressed content is refused, and the whole fetch has one time limit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from polylens.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from polylens.server.options import MediaPolicy

MAX_REDIRECTS = 3
"""Hosts of pictures redirect once or twice (to a CDN, to https)."""

MAX_URL_CHARS = 8192
"""Signed addresses of object stores have up to about 2,000."""

PORTS = {"http": 80, "https": 443}
"""The only ports fetched from: others are where internal services listen."""

REDIRECTS = (301, 302, 303, 307, 308)

USER_AGENT = "polylens"

HTTPCORE_ERRORS = (
    httpcore.ConnectionNotAvailable,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.NetworkError,
)

_QUERY = "/?%:@!$&'()*+,;=~[]"
"""Characters of a query that stay as they are; whatever else (spaces, control characters) is escaped."""


class Fetcher:
    """Fetches within a policy; one connection a fetch, so nothing is shared between requests."""

    ports: Collection[int] = tuple(PORTS.values())

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy

    async def fetch(self, url: str) -> bytes:
        """The content of an address. Raises MediaError with one reason that tells nothing of the inner network."""
        if not self._policy.remote:
            raise MediaError("addresses are not fetched here; send the content as a data: URL")
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return await self._follow(url)
        except TimeoutError as error:
            raise MediaError(f"fetching took longer than {self._policy.timeout_s:g} s") from error

    async def _follow(self, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            target = self._checked(url)
            content, location = await self._get(target)
            if location is None:
                return content
            try:
                url = urljoin(url, location)
            except ValueError as error:
                raise MediaError("the address redirects to a malformed one") from error
        raise MediaError(f"the address redirects more than {MAX_REDIRECTS} times")

    def _checked(self, url: str) -> httpcore.URL:
        """The address in parts, if its form is one that is fetched. It is taken apart once, here."""
        if len(url) > MAX_URL_CHARS:
            raise MediaError(f"the address has more than {MAX_URL_CHARS} characters")
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode().rstrip(".").lower()
            port = parts.port
            target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (
                f"?{quote(parts.query, safe=_QUERY)}" * bool(parts.query)
            )
        except ValueError as error:  # of port, IDNA or brackets
            raise MediaError("the address is malformed") from error
        if parts.scheme not in PORTS or not host:
            raise MediaError("only http and https addresses are fetched")
        if parts.username is not None or parts.password is not None:
            raise MediaError("an address with a user name is not fetched")
        if port is not None and port not in self.ports:
            raise MediaError("only the usual ports of http and https are fetched from")
        if not self._listed(host):
            raise MediaError("the address is not of a host that is allowed here")
        return httpcore.URL(
            scheme=parts.scheme.encode(), host=host.encode(), port=port or PORTS[parts.scheme], target=target.encode()
        )

    def _listed(self, host: str) -> bool:
        domains = self._policy.domains
        return not domains or any(host == domain or host.endswith(f".{domain}") for domain in domains)

    async def _get(self, target: httpcore.URL) -> tuple[bytes, str | None]:
        """The content, or where a redirect points."""
        headers = [("Host", _host_header(target)), ("User-Agent", USER_AGENT), ("Accept-Encoding", "identity")]
        backend = CheckedBackend(self.is_allowed)
        try:
            async with (
                httpcore.AsyncConnectionPool(network_backend=backend) as pool,
                pool.stream("GET", target, headers=headers) as response,
            ):
                fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
                if response.status in REDIRECTS and "location" in fields:
                    return b"", fields["location"]
                if response.status != HTTPStatus.OK:
                    raise MediaError(f"the address answers with status {response.status}")
                if fields.get("content-encoding", "identity") != "identity":
                    raise MediaError("the address answers with compressed content, which was not asked for")
                return await self._content(response, fields.get("content-length", "")), None
        except (OSError, *HTTPCORE_ERRORS) as error:
            raise MediaError(f"the address cannot be fetched ({type(error).__name__})") from error

    async def _content(self, response: httpcore.Response, announced: str) -> bytes:
        limit = self._policy.max_bytes
        content = bytearray()
        if announced.isdecimal() and int(announced) > limit:
            raise MediaError(f"the file at the address is larger than {limit} bytes")
        async for piece in response.aiter_stream():
            content += piece
            if len(content) > limit:
                raise MediaError(f"the file at the address is larger than {limit} bytes")
        return bytes(content)

    def is_allowed(self, address: str) -> bool:
        """Whether an IP address may be connected to."""
        return is_public(address)


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet: not loopback, private, link-local, multicast …"""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or _nat64(ip)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _nat64(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a translator of the network would connect to."""
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to allowed addresses only: looks the name up, checks every address, connects to what it checked."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """As httpcore's; raises MediaError for a host with any address that is not allowed."""
        addresses = await _addresses_of(host, port)
        if not addresses or not all(self._is_allowed(address) for address in addresses):
            raise MediaError("the address is not of a public host")
        stream = await self._inner.connect_tcp(addresses[0], port, timeout, local_address, socket_options)
        peer = stream.get_extra_info("server_addr")
        if peer is None or not self._is_allowed(peer[0]):
            await stream.aclose()
            raise MediaError("the address is not of a public host")
        return stream

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Never: an address names no socket file."""
        raise MediaError("only http and https addresses are fetched")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


async def _addresses_of(host: str, port: int) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise MediaError("the address's host is not known") from error
    return [str(entry[4][0]) for entry in found]


def _host_header(target: httpcore.URL) -> str:
    host = target.host.decode()
    named = f"[{host}]" if ":" in host else host
    return named if target.port in (None, PORTS[target.scheme.decode()]) else f"{named}:{target.port}"
