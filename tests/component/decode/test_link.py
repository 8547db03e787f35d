"""DecodeService.Link over a real connection: many requests on one stream, each with its own end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ProtocolViolation,
    QueueFull,
    TransferFailed,
)
from headrace_common.rpc.status import error_from_rpc, error_from_status
from headrace_decode.link import session
from headrace_engine.interface import DecodeEnded, DecodeTokens
from headrace_kv.messages import Reservation
from tests.component.decode.conftest import Served, request
from tests.component.decode.prefill_rank import PrefillRank
from tests.component.decode.scripted_engine import REF
from tests.waiting import PATIENCE_S, until


class LinkClient:
    """A router's end of one link. Collects what arrives by request."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = decode_pb2_grpc.DecodeServiceStub(channel).Link()
        self._stream_id = 0
        self.messages: list[decode_pb2.LinkResponse] = []
        self.reserved: dict[int, decode_pb2.Reserved] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, decode_pb2.Finished] = {}
        self.failures: dict[int, HeadraceError] = {}
        self.end: grpc.aio.AioRpcError | None = None
        self.ended = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def open(
        self, asked: decode_pb2.GenerateRequest, *, credit: int = 100, **fields: Any
    ) -> int:
        """Returns the id of the request."""
        self._stream_id += 1
        opened = decode_pb2.LinkOpen(
            stream_id=self._stream_id, request=asked, credit_tokens=credit, **fields
        )
        await self.write(opens=[opened])
        return self._stream_id

    async def write(self, **fields: Any) -> None:
        await self._call.write(decode_pb2.LinkRequest(**fields))

    def cancel(self) -> None:
        self._call.cancel()

    async def failure(self, stream_id: int) -> HeadraceError:
        await until(lambda: stream_id in self.failures, what="the failure")
        return self.failures[stream_id]

    async def error(self) -> HeadraceError:
        """The error with which the link ended."""
        await asyncio.wait_for(self.ended.wait(), PATIENCE_S)
        assert self.end is not None, "the link ended without an error"
        return error_from_rpc(self.end)

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.messages.append(message)
                self._sort(message)
        except grpc.aio.AioRpcError as error:
            self.end = error
        finally:
            self.ended.set()

    def _sort(self, message: decode_pb2.LinkResponse) -> None:
        self.reserved |= {one.stream_id: one.reserved for one in message.reserved}
        left = list(message.tokens.token_ids)
        columns = message.tokens
        for stream_id, count in zip(columns.stream_ids, columns.token_counts, strict=True):
            self.tokens.setdefault(stream_id, []).extend(left[:count])
            del left[:count]
        self.finished |= {one.stream_id: one.finished for one in message.finished}
        for one in message.failures:
            self.failures[one.stream_id] = error_from_status(one.status)


@pytest.fixture
async def link(served: Served) -> AsyncIterator[LinkClient]:
    client = LinkClient(served.channel)
    yield client
    client.cancel()


def _has_tokens(link: LinkClient, stream_id: int, count: int) -> bool:
    return len(link.tokens.get(stream_id, ())) == count


def local(name: str, **changes: Any) -> decode_pb2.GenerateRequest:
    return request(name, remote_prefill=False, **changes)


async def freed(served: Served) -> None:
    await until(lambda: served.service.attempts.status().reserved_blocks == 0, what="the blocks")


async def test_further_tokens_wait_for_the_interval_and_nothing_else_does(
    served: Served, link: LinkClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LINK_TOKEN_INTERVAL_MAX_US", 2**32)
    await link.write(token_interval_us=3_600_000_000)
    for name in ("a", "b"):
        served.engine.play_for(name)
    a, b = [await link.open(local(name)) for name in ("a", "b")]
    await until(lambda: len(link.reserved) == 2, what="Reserved")
    # The second token begins an interval. The third one waits for its end.
    for token in (1, 2):
        served.engine.play_for("a", DecodeTokens((token,)))
        await until(partial(_has_tokens, link, a, token), what="a token")
    served.engine.play_for("a", DecodeTokens((3,)))
    served.engine.play_for("b", DecodeTokens((7,)), DecodeTokens((8,)), DecodeEnded(False, 0))
    await until(lambda: b in link.finished, what="the end of the other request")
    assert link.tokens == {a: [1, 2], b: [7, 8]}
    await link.write(token_interval_us=1_000)
    await until(lambda: link.tokens[a] == [1, 2, 3], what="the end of the interval")
    served.engine.play_for("a", DecodeEnded(False, 0))
    await until(lambda: a in link.finished, what="the end")


async def test_a_router_that_asks_for_a_long_interval_loses_its_link(
    served: Served, link: LinkClient
) -> None:
    await link.write(token_interval_us=100_001)
    error = await link.error()
    assert isinstance(error, ProtocolViolation)
    assert "token_interval_us must be at most 100000" in error.detail


async def test_a_request_with_a_field_beyond_its_bound_is_refused_alone(
    served: Served, link: LinkClient
) -> None:
    served.engine.play_for("good", DecodeTokens((1,)), DecodeEnded(False, 0))
    bad = local("bad", stop_token_ids=range(1_025))
    opens = [
        decode_pb2.LinkOpen(stream_id=number, request=asked, credit_tokens=100)
        for number, asked in enumerate((bad, local("good")), start=1)
    ]
    await link.write(opens=opens)
    await until(lambda: 2 in link.finished, what="the end of the other request")
    refused = await link.failure(1)
    assert isinstance(refused, InvalidRequest)
    assert list(refused.violations) == ["stop_token_ids"]


async def test_a_client_without_credit_blocks_only_itself(served: Served, link: LinkClient) -> None:
    for name in ("slow", "fast"):
        served.engine.play_for(name, *(DecodeTokens((n,)) for n in range(8)), DecodeEnded(False, 0))
    slow = await link.open(local("slow"), credit=3)
    fast = await link.open(local("fast"))
    await until(lambda: fast in link.finished, what="the end of the fast one")
    assert link.tokens[fast] == list(range(8))
    assert link.tokens[slow] == [0, 1, 2]
    assert slow not in link.finished
    # Both have given back their blocks: the engine has ended both.
    await freed(served)
    await link.write(credits=[decode_pb2.LinkCredit(stream_id=slow, credit_tokens=2)])
    await until(lambda: len(link.tokens[slow]) == 5, what="more tokens")
    assert slow not in link.finished
    await link.write(credits=[decode_pb2.LinkCredit(stream_id=slow, credit_tokens=90)])
    await until(lambda: slow in link.finished, what="the end of the slow one")
    assert link.tokens[slow] == list(range(8))


@pytest.mark.parametrize(
    "failure,kind,why",
    [
        (TransferFailed("the engine lost it"), TransferFailed, "the engine lost it"),
        (ValueError("a bug"), InternalError, "a bug in"),
        (None, InternalError, "without a reason"),
    ],
)
async def test_an_error_of_the_engine_follows_its_tokens(
    served: Served,
    link: LinkClient,
    failure: Exception | None,
    kind: type[HeadraceError],
    why: str,
) -> None:
    served.engine.play(DecodeTokens((1,)), failure)
    one = await link.open(local("x1"))
    error = await link.failure(one)
    assert type(error) is kind
    assert link.tokens[one] == [1]
    assert why in error.detail
    await freed(served)


async def test_a_cancel_frees_the_blocks_and_nothing_follows_it(
    served: Served, link: LinkClient
) -> None:
    served.engine.play_for("x1", DecodeTokens((1,)))
    one = await link.open(local("x1"))
    await until(lambda: one in link.tokens, what="tokens")
    await link.write(cancelled_stream_ids=[one, 77])
    await freed(served)
    assert served.engine.closed == 1
    served.engine.play_for("x2", DecodeTokens((2,)), DecodeEnded(False, 0))
    two = await link.open(local("x2"))
    await until(lambda: two in link.finished, what="another request")
    assert link.failures == {}
    assert one not in link.finished


async def test_a_link_that_breaks_ends_its_requests(
    served: Served, rank: PrefillRank, link: LinkClient
) -> None:
    served.engine.play_for("x1", Reservation("x1", (3, 4, 5), 0, 39))
    served.engine.play_for("x2", DecodeTokens((1,)))
    one = await link.open(request("x1"))
    two = await link.open(local("x2"))
    await until(lambda: one in link.reserved and two in link.tokens, what="both")
    await rank.open()
    link.cancel()
    assert (await rank.receive("cancel")).cancel.reason == "CANCELLED"
    await until(lambda: served.engine.closed == 2, what="the engine's aborts")


async def test_a_deadline_travels_with_its_open(served: Served, link: LinkClient) -> None:
    served.engine.play_for("x1", DecodeTokens((1,)))
    served.engine.play_for("x2")
    one = await link.open(local("x1"), timeout=duration_from_seconds(0.2))
    two = await link.open(local("x2"), timeout=duration_from_seconds(60.0))
    error = await link.failure(one)
    assert isinstance(error, DeadlineExceeded)
    assert error.metadata == {"waited_for": "engine"}
    assert link.tokens[one] == [1]
    assert two not in link.failures
    passed = await link.failure(await link.open(local("x3"), timeout=duration_from_seconds(0.0)))
    assert passed.metadata == {"waited_for": "admission"}


async def test_a_draining_worker_ends_what_runs_and_then_the_link(
    served: Served, link: LinkClient
) -> None:
    served.engine.play_for("x1", DecodeTokens((1,)))
    one = await link.open(local("x1"))
    await until(lambda: one in link.tokens, what="tokens")
    served.service.attempts.start_drain(0.0)
    refused = await link.failure(await link.open(local("x2")))
    assert isinstance(refused, Draining)
    served.engine.play_for("x1", DecodeTokens((2,)))
    await until(lambda: link.tokens[one] == [1, 2], what="a token during the drain")
    await asyncio.wait_for(served.service.finish_drain(Deadline.after(0.1)), PATIENCE_S)
    assert isinstance(await link.error(), Draining)
    assert isinstance(link.failures[one], Draining)
    assert link.failures[one].metadata == {"worker_id": REF.worker_id}
    assert served.engine.closed == 1


async def test_a_stream_id_that_was_used_ends_the_link(served: Served, link: LinkClient) -> None:
    one = await link.open(local("x1"))
    await until(lambda: one in link.reserved, what="Reserved")
    again = decode_pb2.LinkOpen(stream_id=one, request=local("x2"), credit_tokens=1)
    await link.write(opens=[again])
    assert isinstance(await link.error(), ProtocolViolation)
    await freed(served)


async def test_opens_are_bounded_and_need_credit(
    served: Served, link: LinkClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LINK_STREAMS_MAX", 1)
    without = await link.failure(await link.open(local("x0"), credit=0))
    assert isinstance(without, InvalidRequest)
    assert without.violations == {"credit_tokens": "must be 1 or more"}
    one = await link.open(local("x1"))
    await until(lambda: one in link.reserved, what="Reserved")
    assert isinstance(await link.failure(await link.open(local("x2"))), QueueFull)
    await link.write(cancelled_stream_ids=[one])
    three = await link.open(local("x3"))
    await until(lambda: three in link.reserved, what="Reserved")


async def test_a_router_that_floods_a_link_loses_it(
    served: Served, link: LinkClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LINK_STREAMS_MAX", 2)
    opens = [
        decode_pb2.LinkOpen(stream_id=number, request=local(f"x{number}"), credit_tokens=1)
        for number in range(1, 20)
    ]
    await link.write(opens=opens)
    assert isinstance(await link.error(), ProtocolViolation)
    await freed(served)
