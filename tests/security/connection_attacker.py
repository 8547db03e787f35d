"""Opens connections without a credential and keeps them open, in a process of its own.

python -m tests.security.connection_attacker HOST:PORT SOURCE_ADDRESS KIND COUNT

KIND is `silent`, `http2`, or the path of an RPC. With a path, each connection opens that many streams as the server
allows, and sends no message. A connection that the server closes is opened again. Prints "ready" once all were opened,
or the server accepts no more.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from contextlib import suppress

_STREAMS = 100
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
_SETTINGS_ACKNOWLEDGED = bytes.fromhex("000000040100000000")


def _headers(path: str, stream: int) -> bytes:
    """A HEADERS frame, with every field as a literal."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "attacker",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return len(block).to_bytes(3) + b"\x01\x04" + stream.to_bytes(4) + block


def _opened(target: tuple[str, int], source: str, kind: str) -> socket.socket | None:
    try:
        connection = socket.create_connection(target, timeout=2, source_address=(source, 0))
    except OSError:
        return None
    with suppress(OSError):
        if kind != "silent":
            connection.sendall(_PREFACE + _SETTINGS_ACKNOWLEDGED)
        if kind.startswith("/"):
            frames = [_headers(kind, 2 * number + 1) for number in range(_STREAMS)]
            connection.sendall(b"".join(frames))
    connection.setblocking(False)
    return connection


def main(endpoint: str, source: str, kind: str, count: str) -> None:
    """Runs until the process is killed."""
    host, _, port = endpoint.rpartition(":")
    target = (host, int(port))
    selector = selectors.DefaultSelector()
    held = attempts = 0
    ready = False
    while True:
        if held < int(count):
            connection = _opened(target, source, kind)
            attempts += 1
            if connection is None:
                time.sleep(0.01)
            else:
                held += 1
                selector.register(connection, selectors.EVENT_READ)
            if not ready and (connection is None or attempts == int(count)):
                ready = True
                print("ready", flush=True)
        for key, _ in selector.select(0 if held < int(count) else 0.1):
            assert isinstance(key.fileobj, socket.socket)
            try:
                ended = not key.fileobj.recv(65_536)
            except OSError:
                ended = True
            if ended:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                held -= 1


if __name__ == "__main__":
    main(*sys.argv[1:])
