"""Attacks on a router, in a process of its own: python -m tests.security.attacker ENDPOINT ATTACK [KEY [repeated]].

Prints one line for each call: the status code and its detail. A repeated attack has the priority of an idle process.
It prints a line when its bodies are made. Then it reads numbers of seconds, one a line. For that time it attacks
without a pause. Then it prints the number of calls by status code as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.rpc.channel import open_blocking_channel

_MEBIBYTE = 1024 * 1024
_DEADLINE_S = 60.0
_GENERATE = "/headrace.inference.v1.InferenceService/Generate"


def _text(count: int) -> bytes:
    text = "".join(f"word{number} in the orange " for number in range(count // 20))[:count]
    return inference_pb2.GenerateRequest(text=text).SerializeToString()


def _messages(count: int) -> bytes:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * count)
    return inference_pb2.GenerateRequest(chat=chat).SerializeToString()


def _stops(length: int) -> bytes:
    sampling = sampling_pb2.SamplingParams(stop=["a" * length] * 16)
    return inference_pb2.GenerateRequest(text="hi", sampling=sampling).SerializeToString()


def _wrong_texts(count: int) -> bytes:
    """Messages of which only the last is no UTF-8."""
    messages = b"\x0a\x03\x12\x01a" * (count - 1) + b"\x0a\x03\x12\x01\xff"
    return _in_field(3, messages)


def _schema(schema: Any) -> bytes:
    outputs = sampling_pb2.StructuredOutputs(json=json.dumps(schema, separators=(",", ":")))
    sampling = sampling_pb2.SamplingParams(structured_outputs=outputs, max_tokens=1)
    return inference_pb2.GenerateRequest(text="hi", sampling=sampling).SerializeToString()


def _schemas() -> list[bytes]:
    """Schemas that a validator compares member by member, or takes a millisecond for each part of."""
    draft = "http://json-schema.org/draft-04/schema#"
    members = [{"a": number} for number in range(4_900)]
    compared = _schema({"$schema": draft, "enum": members})
    return [*[compared] * 4, *[_schema({"allOf": [{}] * 480})] * 24]


ATTACKS: Mapping[str, Callable[[], list[bytes]]] = {
    # The first two fit the bytes of the context, so only their tokens are too many.
    "long_texts": lambda: [_text(2 * _MEBIBYTE)] * 2 + [_text(3 * _MEBIBYTE)] * 4,
    "messages": lambda: [_messages(1_000_000), _messages(2_000_000), _messages(3_000)],
    "stops": lambda: [_stops(3 * _MEBIBYTE), _stops(60_000)],
    "bodies": lambda: [bytes(60 * _MEBIBYTE)] * 6,
    "zipped_bodies": lambda: [bytes(60 * _MEBIBYTE)] * 6,
    # These reach the checks of the router, which compressing makes cheap to send.
    "zipped_texts": lambda: [_text(4 * _MEBIBYTE)] * 6,
    "fields": lambda: [_messages(8_000)] * 2 + [_wrong_texts(4_000)] * 4,
    "schemas": _schemas,
}
_THREADS_MAX = 8


class Attack:
    """One body for each of several callers."""

    def __init__(self, channel: grpc.Channel, attack: str, key: str) -> None:
        self._stream: Any = channel.unary_stream(_GENERATE)
        self._bodies = ATTACKS[attack]()
        self.callers = range(len(self._bodies))
        self._options: dict[str, Any] = {
            "metadata": (("x-api-key", key),) if key else (),
            "timeout": _DEADLINE_S,
            "compression": grpc.Compression.Gzip if attack.startswith("zipped") else None,
        }

    def call(self, caller: int) -> tuple[str, str]:
        """Calls Generate. Returns the status code and its detail."""
        try:
            for _ in self._stream(self._bodies[caller], **self._options):
                pass
        except grpc.RpcError as error:
            status: Any = error
            return status.code().name, status.details() or ""
        return "OK", ""

    def call_until(self, caller: int, end_s: float) -> Counter[str]:
        """Calls without a pause. Returns the number of calls by status code."""
        codes: Counter[str] = Counter()
        while time.monotonic() < end_s:
            codes[self.call(caller)[0]] += 1
        return codes


def main(endpoint: str, attack: str, key: str = "", repeated: str = "") -> None:
    """Sends the calls of an attack at once, or in periods."""
    if repeated:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with open_blocking_channel(endpoint) as channel:
        calls = Attack(channel, attack, key)
        with ThreadPoolExecutor(min(len(calls.callers), _THREADS_MAX)) as threads:
            if repeated:
                _attack_in_periods(calls, threads)
                return
            for code, detail in threads.map(calls.call, calls.callers):
                print(f"{code} {detail}".replace("\n", " ").strip())


def _attack_in_periods(calls: Attack, threads: ThreadPoolExecutor) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        ends_s = itertools.repeat(time.monotonic() + float(line))
        codes: Counter[str] = Counter()
        for found in threads.map(calls.call_until, calls.callers, ends_s):
            codes.update(found)
        print(json.dumps(codes), flush=True)


def _in_field(number: int, content: bytes) -> bytes:
    """A message with the content in one field."""
    length, head = len(content), bytearray([number << 3 | 2])
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + content


if __name__ == "__main__":
    main(*sys.argv[1:])
