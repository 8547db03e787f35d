"""Parses the requests of one HTTP connection, within bounds."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import httptools

from headrace_common.http.bounds import HEAD_BYTES_MAX, HEADERS_MAX
from headrace_common.http.exchange import HttpExchange

if TYPE_CHECKING:
    from headrace_common.http.connection import Connection

# A chunk of one byte takes six. Other bytes around a body, such as trailers, are few.
_FRAMING_PER_BODY_BYTE: Final = 8


class Refused(Exception):
    """A request that is not valid, or beyond the bounds."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class RequestParser:
    """Refuses requests beyond the bounds, and ignores upgrades such as that to h2c (RFC 9110, 7.8)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = httptools.HttpRequestParser(self)
        # A request with "connection: close" is answered, whatever follows it.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self.in_head = False
        """Whether a part of a request's headers has arrived."""
        self.in_body = False
        """Whether more of a body must arrive."""
        # What must still be parsed of the bytes that arrived, the last one first.
        self._pieces: list[bytes | memoryview] = []
        # Whether a request has ended in the piece that is parsed.
        self._ended_in_piece = False
        self._message_bytes = 0
        self._body_bytes = 0

    @property
    def head_bytes(self) -> int:
        """Bytes of incomplete headers."""
        return self._message_bytes if self.in_head else 0

    def close(self) -> None:
        """Ends its use. The parts refer to each other, and are freed without a garbage collection after it."""
        del self._parser, self._connection

    def feed(self, data: bytes) -> None:
        """Parses bytes that arrived. Raises Refused."""
        self._pieces = [data]
        while self._pieces:
            piece = self._pieces.pop()
            fitting = HEAD_BYTES_MAX - self.head_bytes
            if len(piece) > fitting:
                piece = memoryview(piece)
                self._pieces.append(piece[fitting:])
                piece = piece[:fitting]
            self._parse(piece)

    def _parse(self, piece: bytes | memoryview) -> None:
        self._ended_in_piece = False
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as stopped:
            self._ignore_upgrade(memoryview(piece)[stopped.args[0] :])
        except httptools.HttpParserError as error:
            # A callback's own error is its context.
            refused = error.__context__
            if isinstance(refused, Refused):
                raise refused from None
            raise Refused(HTTPStatus.BAD_REQUEST) from error
        else:
            if self.in_head or self.in_body:
                self._count(len(piece))

    def _count(self, size: int) -> None:
        """Counts a piece that does not end the request."""
        if self._ended_in_piece:
            # The piece has other requests too.
            headers = sum(len(name) + len(value) for name, value in self._headers)
            self._message_bytes = self._body_bytes + len(self._url) + headers
        else:
            self._message_bytes += size
        if self.in_head:
            too_long = self._message_bytes >= HEAD_BYTES_MAX
        else:
            framing = _FRAMING_PER_BODY_BYTE * self._body_bytes
            too_long = self._message_bytes > 2 * HEAD_BYTES_MAX + framing
        if too_long or len(self._headers) > HEADERS_MAX:
            raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _offers_upgrade(self) -> bool:
        return self._parser.should_upgrade() and any(
            name.lower() == b"upgrade" for name, _ in self._headers
        )

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Lets the parser, which stopped at the end of the headers, read the request without the offer and with its
        body.
        """
        if not self._offers_upgrade():
            return
        version = self._parser.get_http_version().encode()
        lines = [self._parser.get_method() + b" " + self._url + b" HTTP/" + version]
        lines += [
            name + b": " + value for name, value in self._headers if name.lower() != b"upgrade"
        ]
        self._pieces += (rest, b"\r\n".join((*lines, b"", b"")))

    def on_message_begin(self) -> None:
        """See httptools."""
        self._connection.begin_head()
        self.in_head = True
        self._message_bytes = self._body_bytes = 0
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. Trailers are among them."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """See httptools."""
        self.in_head = False
        if self._offers_upgrade():
            return
        if len(self._headers) > HEADERS_MAX:
            raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        parser = self._parser
        path: str = httptools.parse_url(self._url).path.decode("ascii")
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._headers
        }
        is_current = parser.get_http_version() == "1.1"
        exchange = HttpExchange(
            self._connection,
            parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            headers,
            chunks=is_current,
            keeps_alive=is_current and parser.should_keep_alive(),
        )
        self.in_body = True
        self._connection.start_request(exchange)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._body_bytes += len(body)
        self._connection.add_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self._offers_upgrade():
            return
        self.in_body = False
        self._ended_in_piece = True
        self._connection.end_body()
