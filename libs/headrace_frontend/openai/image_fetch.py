"""Fetches images from hosts that the settings list.

A host name is resolved once, its addresses are checked, and the connection goes to a checked one. Each redirect is
checked as the first address was.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import quote, urljoin, urlsplit

import httptools

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
# With what has arrived of the body in the same read.
_HEAD_BYTES_MAX: Final = 131_072
_READ_BYTES: Final = 65_536
_CONCURRENT_MAX: Final = 32
_NAT64: Final = ip_network("64:ff9b::/96")


class _NotFetched(Exception):
    """The message is the remedy."""


class ImageFetcher:
    """Fetches the images of chats. `hosts` are names or addresses, each with a port or for the default ports.

    A name must have public addresses. An address is reached as it is. One event loop owns it.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._places = asyncio.Semaphore(_CONCURRENT_MAX)
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, messages: Sequence[MessageBody], codec: TextCodec) -> None:
        """Fetches the images of a chat that are not in it. Raises InvalidRequest."""
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
                    group.create_task(self._fetch_one(path, image, room))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _fetch_one(self, path: str, image: ImageUrlBody, room: _Room) -> None:
        try:
            async with asyncio.timeout(_FETCH_S), self._places:
                image.set_data(await self._get(image.url, room))
        except _NotFetched as error:
            raise InvalidRequest({path: str(error)}) from None
        except TimeoutError:
            raise InvalidRequest({path: f"did not arrive within {_FETCH_S:g} s"}) from None
        except (OSError, ValueError, httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise InvalidRequest({path: "could not be fetched from its host"}) from None

    async def _get(self, url: str, room: _Room) -> bytes:
        for _ in range(_REDIRECTS_MAX + 1):
            target = self._target(url)
            response = await self._request(target, room)
            location = response.headers.get("location", "")
            if response.status not in _REDIRECTS or not location:
                return response.file
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
            host=host,
            port=port,
            is_tls=parts.scheme == "https",
            authority=named if is_default else f"{named}:{port}",
            path=f"{path}?{query}" if query else path,
        )

    async def _request(self, target: _Target, room: _Room) -> _Response:
        reader, writer = await self._connect(target)
        try:
            writer.write(target.request)
            response = _Response(room)
            while not response.complete and (data := await reader.read(_READ_BYTES)):
                response.feed(data)
            response.end()
            return response
        finally:
            writer.close()

    async def _connect(self, target: _Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for address in await _checked_addresses(target):
            with suppress(OSError):
                return await asyncio.open_connection(
                    address,
                    target.port,
                    ssl=self._context() if target.is_tls else None,
                    server_hostname=target.host if target.is_tls else None,
                )
        raise _NotFetched("could not be fetched, since its host does not accept connections")

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


@dataclass(frozen=True, slots=True)
class _Target:
    host: str
    port: int
    is_tls: bool
    authority: str
    path: str

    @property
    def request(self) -> bytes:
        lines = (
            f"GET {self.path} HTTP/1.1",
            f"host: {self.authority}",
            f"user-agent: headrace/{version()}",
            "accept: image/*",
            "accept-encoding: identity",
            "connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode("ascii")


class _Room:
    """The bytes that the images of one request may have together."""

    def __init__(self, size: int) -> None:
        self._left = size

    def fill(self, size: int) -> bool:
        """False when they do not fit."""
        self._left -= size
        return self._left >= 0


class _Response:
    """Parses one response. The parser calls the methods `on_...`."""

    def __init__(self, room: _Room) -> None:
        self.headers: dict[str, str] = {}
        self.complete = False
        self._room = room
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._has_head = False
        self._fits = True
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def file(self) -> bytes:
        if self.status != 200:
            raise _NotFetched(f"its host answered with status {self.status}")
        if self.headers.get("content-encoding", "identity") != "identity":
            raise _NotFetched("its host sent it with a content-encoding")
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> None:
        """Raises _NotFetched beyond the bounds."""
        if not self._has_head:
            self._head_bytes += len(data)
        self._parser.feed_data(data)
        if self._head_bytes > _HEAD_BYTES_MAX:
            raise _NotFetched("its host sent headers that are too long")
        if not self._fits:
            raise _NotFetched(
                f"has more than {IMAGE_BYTES_MAX} bytes, or more than {IMAGES_BYTES_MAX} with the other images; "
                "scale it down"
            )

    def end(self) -> None:
        """The connection has ended. Raises _NotFetched for a part of a response."""
        ends_by_close = not self.headers.keys() & {"content-length", "transfer-encoding"}
        if not self.complete and not (self._has_head and ends_by_close):
            raise _NotFetched("could not be fetched from its host")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        self._fits = self._fits and self._size <= IMAGE_BYTES_MAX and self._room.fill(len(data))
        if self._fits:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


async def _checked_addresses(target: _Target) -> list[str]:
    """The addresses of the host. Raises _NotFetched when a name has none that is public."""
    infos = await asyncio.get_running_loop().getaddrinfo(
        target.host, target.port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    found = [str(info[4][0]) for info in infos]
    if found == [target.host]:
        return found
    public = [address for address in found if _is_public(address)]
    if not public:
        raise _NotFetched(f"the host {target.host} has no public address")
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
