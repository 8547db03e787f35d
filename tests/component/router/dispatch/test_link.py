"""All requests on a decode worker share one link, and its loss is the loss of a worker to each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import Cancelled, ProtocolViolation
from headrace_common.rpc.channel import open_channel
from headrace_router.decode_link.link import DecodeLink, DecodeLinks
from tests.kit.link import KeptEvents
from tests.kit.router import Rig, text_of
from tests.kit.workers import (
    TEXT,
    FakeDecode,
    Handoff,
    hang,
    recite,
    reply,
    reserved,
    sampling,
    tokens,
)
from tests.waiting import PATIENCE_S, forever, until


async def test_requests_of_a_link_that_ends_continue_and_the_next_opens_another(rig: Rig) -> None:
    async def end_links(worker: FakeDecode) -> None:
        worker.end_links()
        await forever()

    first, second = await rig.add_decodes(recite(5, end_links), recite(99))
    responses = await rig.ask(sampling=sampling())
    assert text_of(responses) == TEXT
    assert responses[-1].timing.attempts == 2
    assert (first.links, second.links) == (1, 1)
    await rig.loads_known()
    first.script = reply("abc")
    assert text_of(await rig.ask()) == "abc"
    assert first.links == 2


@pytest.fixture
async def worker() -> AsyncIterator[FakeDecode]:
    # Without a router, which calls no other RPC.
    started = await FakeDecode("d0", Handoff(), hang).start()  # type: ignore[abstract]
    yield started
    await started.kill()


@pytest.fixture
async def channel(worker: FakeDecode) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(worker.member.endpoint) as opened:
        yield opened


def opened_on(
    links: DecodeLinks, name: str = "x", deadline_s: float = 30.0
) -> tuple[DecodeLink, KeptEvents]:
    request, answer = decode_pb2.GenerateRequest(transfer_id=name), KeptEvents()
    token_ids = inference_pb2.TokenIds(ids=[1, 2])
    link = links.usable()
    link.open(request, token_ids, Deadline.after(deadline_s), {}, answer)
    return link, answer


async def kind_of(call: tuple[DecodeLink, KeptEvents]) -> str:
    event = await asyncio.wait_for(call[1].read(), PATIENCE_S)
    return type(event).__name__.lower()


async def test_a_full_or_old_link_is_replaced_and_ends_with_its_last_request(
    worker: FakeDecode, channel: grpc.aio.Channel
) -> None:
    links = DecodeLinks(lambda: channel, streams_max=2)
    calls = [opened_on(links, f"x{number}") for number in range(3)]
    assert [await kind_of(call) for call in calls] == ["reserved"] * 3
    assert (worker.links, links.count) == (2, 2)
    links_of, answers = zip(*calls, strict=True)
    links_of[0].release(answers[0])
    await until(lambda: worker.cancelled == {"x0"}, what="the cancel")
    assert worker.open_links == 2
    links_of[1].release(answers[1])
    await until(lambda: (worker.open_links, links.count) == (1, 1), what="the end of the first")
    assert "x2" not in worker.cancelled
    await links.close()
    assert links.count == 0
    with pytest.raises(Cancelled):
        await answers[2].read()

    aged = DecodeLinks(lambda: channel, age_max_s=0.0)
    one, two = opened_on(aged), opened_on(aged)
    assert [await kind_of(one), await kind_of(two)] == ["reserved"] * 2
    assert aged.count == 2
    await aged.close()


async def test_a_worker_that_breaks_the_protocol_loses_its_link(
    worker: FakeDecode, channel: grpc.aio.Channel
) -> None:
    async def flood(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        yield reserved(request)
        for link in worker._open_links:
            link.grant(1, 10_000)
        yield tokens("a" * 10_000)

    links = DecodeLinks(lambda: channel)
    worker.script = flood
    call = opened_on(links)
    assert await kind_of(call) == "reserved"
    with pytest.raises(ProtocolViolation, match="credit"):
        await asyncio.wait_for(call[1].read(), PATIENCE_S)
    await until(lambda: links.count == 0, what="the end of the link")
