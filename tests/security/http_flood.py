"""Attacks of strangers on an HTTP or gRPC listener: python -m tests.security.http_flood ATTACK HOST:PORT COUNT.

They come from 127.0.0.2, with the priority of an idle process. The process prints a line when the attack has begun,
and ends when its input ends.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import sys
import threading

_SOURCE = "127.0.0.2"
_FIRST = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-filler: "
_FILLER = b"a" * 60_000
_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n" + bytes(
    250_000
)


def _connected(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 20, source_address=(_SOURCE, 0))


def hold_idle(address: tuple[str, int], count: int) -> None:
    """Opens connections and sends nothing. A closed one is opened again."""
    held = [_connected(address) for _ in range(count)]
    print("begun", flush=True)
    selector = selectors.DefaultSelector()
    for one in held:
        selector.register(one, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            ended = key.fileobj
            assert isinstance(ended, socket.socket)
            try:
                if ended.recv(4_096):
                    continue
            except OSError:
                pass
            selector.unregister(ended)
            ended.close()
            selector.register(_connected(address), selectors.EVENT_READ)


def send_inputs(address: tuple[str, int], count: int, start: bytes, rest: bytes) -> None:
    """Sends input without an end on connections that have had a request, and opens further ones."""
    held: list[socket.socket] = []
    print("begun", flush=True)
    while True:
        one = _connected(address)
        try:
            one.sendall(_FIRST)
            one.recv(4_096)
            one.sendall(start + rest)
        except OSError:
            pass
        held.append(one)
        if len(held) > count:
            held.pop(0).close()


def main(attack: str, endpoint: str, count: str) -> None:
    """Attacks until the input ends."""
    host, _, port = endpoint.rpartition(":")
    address = (host, int(port))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    arguments: dict[str, tuple[object, ...]] = {
        "idle": (hold_idle, address, int(count)),
        "heads": (send_inputs, address, int(count), _HEAD, _FILLER),
        "endless": (send_inputs, address, int(count), _HEAD, _FILLER * 8),
        "bodies": (send_inputs, address, int(count), _BODY, b""),
    }
    function, *values = arguments[attack]
    threading.Thread(target=function, args=values, daemon=True).start()  # type: ignore[arg-type]
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
