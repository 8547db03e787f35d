"""Attacks on a router, in a process of its own: python -m tests.security.attacker ENDPOINT ATTACK [KEY].

Prints one line for each call: the status code and its detail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.rpc.channel import open_blocking_channel

_MEBIBYTE = 1024 * 1024
_DEADLINE_S = 60.0
_GENERATE = "/headrace.inference.v1.InferenceService/Generate"
_ROUTE = "/headrace.inference.v1.InferenceService/Route"


def _text(count: int) -> bytes:
    text = "".join(f"word{number} in the orange " for number in range(count // 20))[:count]
    return inference_pb2.GenerateRequest(text=text).SerializeToString()


def _messages(count: int) -> bytes:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * count)
    return inference_pb2.GenerateRequest(chat=chat).SerializeToString()


def _route() -> bytes:
    """A RouteRequest that asks for a ticket."""
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=range(100)))
    return inference_pb2.RouteRequest(request=request).SerializeToString()


def _stops(length: int) -> bytes:
    sampling = sampling_pb2.SamplingParams(stop=["a" * length] * 16)
    return inference_pb2.GenerateRequest(text="hi", sampling=sampling).SerializeToString()


ATTACKS: Mapping[str, Callable[[], list[bytes]]] = {
    # The first two fit the bytes of the context, so only their tokens are too many.
    "long_texts": lambda: [_text(2 * _MEBIBYTE)] * 2 + [_text(3 * _MEBIBYTE)] * 4,
    "messages": lambda: [_messages(1_000_000), _messages(3_000_000), _messages(3_000)],
    "stops": lambda: [_stops(3 * _MEBIBYTE), _stops(60_000)],
    "bodies": lambda: [bytes(60 * _MEBIBYTE)] * 6,
    "zipped_bodies": lambda: [bytes(60 * _MEBIBYTE)] * 6,
    "tickets": lambda: [_route()] * 10_000,
}
_THREADS_MAX = 8


def main(endpoint: str, attack: str, key: str = "") -> None:
    """Sends the calls of an attack at once."""
    bodies = ATTACKS[attack]()
    compression = grpc.Compression.Gzip if attack.startswith("zipped") else None
    metadata = (("x-api-key", key),) if key else ()

    def call(number: int) -> str:
        stream: Any = channel.unary_stream(_GENERATE)
        single: Any = channel.unary_unary(_ROUTE)
        options: dict[str, Any] = {
            "metadata": metadata,
            "timeout": _DEADLINE_S,
            "compression": compression,
        }
        try:
            if attack == "tickets":
                routed = inference_pb2.RouteResponse.FromString(single(bodies[number], **options))
                return "OK with a ticket" if routed.HasField("direct") else "OK"
            if number % 2:
                single(_as_route(bodies[number]), **options)
            else:
                list(stream(bodies[number], **options))
        except grpc.RpcError as error:
            status: Any = error
            return f"{status.code().name} {status.details()}"
        return "OK"

    with (
        open_blocking_channel(endpoint) as channel,
        ThreadPoolExecutor(min(len(bodies), _THREADS_MAX)) as threads,
    ):
        for line in threads.map(call, range(len(bodies))):
            print(line.replace("\n", " "))


def _as_route(body: bytes) -> bytes:
    """A RouteRequest with this GenerateRequest. Bodies of zeros stay as they are."""
    if not body[0]:
        return body
    length, prefix = len(body), bytearray(b"\x0a")
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + body


if __name__ == "__main__":
    main(*sys.argv[1:])
