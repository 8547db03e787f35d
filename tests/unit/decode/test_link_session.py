"""The worker's side of a link, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.decode.v1 import decode_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import QueueFull
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.link.session import LinkSession


@pytest.mark.parametrize(("interval_us", "sent"), [(2_000, [1, 1]), (3_000, [2])])
async def test_only_what_goes_to_a_busy_router_waits_for_what_follows(
    interval_us: int, sent: list[int]
) -> None:
    messages: list[decode_pb2.LinkResponse] = []

    async def start(_: decode_pb2.GenerateRequest, __: Deadline) -> DecodeAttempt:
        raise QueueFull("full")

    async def write(message: decode_pb2.LinkResponse) -> None:
        messages.append(message)

    async def requests() -> AsyncIterator[decode_pb2.LinkRequest]:
        yield decode_pb2.LinkRequest(token_interval_us=interval_us)
        await asyncio.sleep(1)
        for number in (1, 2):
            opened = decode_pb2.LinkOpen(stream_id=number, credit_tokens=1)
            yield decode_pb2.LinkRequest(opens=[opened])
            await asyncio.sleep(0.001)

    await LinkSession(start, write, 1.0).run(requests())
    assert [len(message.failures) for message in messages] == sent
