"""Fetches images from hosts that the settings list.

A host name is resolved once, its addresses are checked, and the connection goes to a checked one. Each redirect is
checked as the first address was.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

import httpcore2

from headrace_common.callers.bounds import FewEach, current_input
from headrace_common.errors import InvalidRequest
from headrace_common.limits import IMAGE_BYTES_MAX, IMAGES_BYTES_MAX, IMAGES_MAX
from headrace_common.version import version
from headrace_frontend.openai.messages import ImageUrlBody, MessageBody
from headrace_frontend.request.images import refusal
from headrace_text.codec import TextCodec

_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
_REDIRECTS_MAX: Final = 3
_FETCH_S: Final = 10.0
# Of the headers of one response. The parser's own bound for headers and for trailers is above it.
_HEAD_BYTES_MAX: Final = 65_536
# Between and behind the parts of a file, such as the sizes of chunks. The parser takes some 20 us for each.
_FRAMING_BYTES_MAX: Final = 131_072
# Other tasks have their turns between two reads.
_READ_BYTES: Final = 16_384
CONCURRENT_MAX: Final = 64
"""Images that one process fetches at a time."""
CONCURRENT_OF_TENANT_MAX: Final = 8
"""Images that it fetches for one tenant at a time."""
_NAT64: Final = ip_network("64:ff9b::/96")


class _NotFetched(Exception):
    """The message is the remedy."""


class ImageFetcher:
    """Fetches the images of chats. `hosts` are names or addresses, each with a port or for the default ports.

    A name must have public addresses. An address is reached as it is. One event loop owns it.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._places = asyncio.Semaphore(CONCURRENT_MAX)
        self._turns = FewEach(CONCURRENT_OF_TENANT_MAX)
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, messages: Sequence[MessageBody], codec: TextCodec, tenant: str) -> None:
        """Fetches the images of a chat that are not in it. The request must be admitted. Raises InvalidRequest."""
        remote = [(path, image) for path, image in _images(messages) if not image.data]
        if not remote:
            return
        if codec.images is None:
            raise InvalidRequest({remote[0][0]: refusal(codec)})
        if len(remote) > IMAGES_MAX:
            remedy = f"a request may have at most {IMAGES_MAX} images; leave some out"
            raise InvalidRequest({remote[IMAGES_MAX][0]: remedy})
        room = _Room(IMAGES_BYTES_MAX)
        try:
            async with asyncio.TaskGroup() as group:
                for path, image in remote:
                    group.create_task(self._fetch_one(path, image, room, tenant))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _fetch_one(self, path: str, image: ImageUrlBody, room: _Room, tenant: str) -> None:
        try:
            async with asyncio.timeout(_FETCH_S), self._turns.of(tenant), self._places:
                image.set_data(await self._get(image.url, room))
        except _NotFetched as error:
            raise InvalidRequest({path: str(error)}) from None
        except TimeoutError:
            raise InvalidRequest({path: f"did not arrive within {_FETCH_S:g} s"}) from None
        except httpcore2.ConnectError:
            remedy = "could not be fetched, since its host does not accept connections"
            raise InvalidRequest({path: remedy}) from None
        except (OSError, ValueError, httpcore2.NetworkError, httpcore2.ProtocolError):
            raise InvalidRequest({path: "could not be fetched from its host"}) from None

    async def _get(self, url: str, room: _Room) -> bytes:
        for _ in range(_REDIRECTS_MAX + 1):
            target = self._target(url)
            connection = httpcore2.AsyncHTTPConnection(
                httpcore2.Origin(target.scheme, target.host, target.port),
                ssl_context=self._context() if target.scheme == b"https" else None,
                network_backend=_PublicAddresses(),
            )
            async with (
                connection,
                connection.stream("GET", target.url, headers=target.headers) as response,
            ):
                headers = {name.lower(): value for name, value in response.headers}
                location = headers.get(b"location", b"").decode("latin-1")
                if response.status not in _REDIRECTS or not location:
                    return await _file_of(response, headers, room)
            url = urljoin(url, location)
        raise _NotFetched(f"has more than {_REDIRECTS_MAX} redirects")

    def _target(self, url: str) -> _Target:
        """Raises _NotFetched for an address that is not listed."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            raise _NotFetched("is no URL") from None
        if parts.scheme not in _PORTS or not host or parts.username is not None:
            raise _NotFetched("must be a data: URL, or one of http or https without a user")
        named = f"[{host}]" if ":" in host else host
        is_default = port == _PORTS[parts.scheme]
        if f"{named}:{port}" not in self._hosts and not (is_default and named in self._hosts):
            raise _NotFetched(
                f"the server fetches no images from {named[:128]}:{port}; send the image as a data: URL, or ask the "
                "operator to list the host in image_hosts"
            )
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
        query = quote(parts.query, safe="/?%:@!$&'()*+,;=~")
        return _Target(
            scheme=parts.scheme.encode(),
            host=host.encode("idna"),
            port=port,
            authority=named if is_default else f"{named}:{port}",
            path=f"{path}?{query}" if query else path,
        )

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


@dataclass(frozen=True, slots=True)
class _Target:
    scheme: bytes
    host: bytes
    port: int
    authority: str
    path: str

    @property
    def url(self) -> httpcore2.URL:
        return httpcore2.URL(
            scheme=self.scheme, host=self.host, port=self.port, target=self.path.encode("ascii")
        )

    @property
    def headers(self) -> Mapping[bytes | str, bytes | str]:
        return {
            "host": self.authority,
            "user-agent": f"headrace/{version()}",
            "accept": "image/*",
            "accept-encoding": "identity",
            "connection": "close",
        }


class _Room:
    """The bytes that the images of one request may have together."""

    def __init__(self, size: int) -> None:
        self._left = size

    def fill(self, size: int) -> bool:
        """False when they do not fit."""
        self._left -= size
        return self._left >= 0


async def _file_of(
    response: httpcore2.Response, headers: Mapping[bytes, bytes], room: _Room
) -> bytes:
    """Raises _NotFetched beyond the bounds, and QueueFull as RequestInput does."""
    if response.status != 200:
        raise _NotFetched(f"its host answered with status {response.status}")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise _NotFetched("its host sent it with a content-encoding")
    sent, stream = current_input(), response.extensions["network_stream"]
    stream.expect(_FRAMING_BYTES_MAX)
    file = bytearray()
    async for piece in response.aiter_stream():
        stream.expect(len(piece))
        if len(file) + len(piece) > IMAGE_BYTES_MAX or not room.fill(len(piece)):
            raise _NotFetched(
                f"has more than {IMAGE_BYTES_MAX} bytes, or more than {IMAGES_BYTES_MAX} with the other images; "
                "scale it down"
            )
        if sent is not None:
            sent.add(len(piece))
        file += piece
    return bytes(file)


class _PublicAddresses(httpcore2.AnyIOBackend):
    """Connects to the checked addresses of a host."""

    async def connect_tcp(
        self, host: str, port: int, *args: Any, **options: Any
    ) -> httpcore2.AsyncNetworkStream:
        for address in await _checked_addresses(host, port):
            with suppress(httpcore2.ConnectError):
                return _BoundedStream(await super().connect_tcp(address, port, *args, **options))
        raise httpcore2.ConnectError


class _BoundedStream(httpcore2.AsyncNetworkStream):
    """Bounds what a host sends: at first the headers."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream
        self._left_bytes = _HEAD_BYTES_MAX

    def expect(self, size: int) -> None:
        """Permits so many more bytes."""
        self._left_bytes += size

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(min(max_bytes, _READ_BYTES), timeout)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise _NotFetched(
                "its host sent too much beside the file, such as headers, tiny chunks or trailers"
            )
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        return _BoundedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


async def _checked_addresses(host: str, port: int) -> list[str]:
    """The addresses of the host. Raises _NotFetched when a name has none that is public."""
    infos = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    found = [str(info[4][0]) for info in infos]
    if found == [host]:
        return found
    public = [address for address in found if _is_public(address)]
    if not public:
        raise _NotFetched(f"the host {host} has no public address")
    return public


def _is_public(address: str) -> bool:
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        if found in _NAT64:
            return _is_public(str(ip_address(int(found) & 0xFFFF_FFFF)))
        if found.ipv4_mapped is not None:
            return _is_public(str(found.ipv4_mapped))
        if found.sixtofour is not None or found.teredo is not None:
            return False
    return found.is_global and not found.is_multicast


def has_remote_images(messages: Sequence[MessageBody]) -> bool:
    """Whether a chat has images that must be fetched."""
    return any(not image.data for _, image in _images(messages))


def _images(messages: Sequence[MessageBody]) -> Iterator[tuple[str, ImageUrlBody]]:
    for index, message in enumerate(messages):
        for number, part in enumerate(() if isinstance(message.content, str) else message.content):
            if part.image_url is not None:
                yield f"messages[{index}].content[{number}].image_url.url", part.image_url
