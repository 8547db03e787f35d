"""A worker that computes a prompt itself fetches what another one has of it, and a failure of that costs time only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2
from headrace.kv.v1 import prefix_pb2_grpc
from headrace_common.errors import DeadlineExceeded
from headrace_common.telemetry import schema
from headrace_decode import prefix_service
from headrace_engine.sim.engine import SimEngine
from headrace_router.dispatch import prefix_fetch
from headrace_router.placement import KvAware
from headrace_router.prefix_cache.cached_prompts import CachedPrompts
from tests.component.worker.serving import Workers, running
from tests.component.worker.test_both_roles import CLOSED_FORM, LOCAL
from tests.suite.deployment import greedy, prompt_of
from tests.waiting import until

ANSWER_TOKENS = 40
BLOCK_TOKENS = 32


class Conversation:
    """Turns on the workers that a test names. `fetches` has the worker, reason and tokens of each fetch."""

    def __init__(self, pair: Workers, place: Callable[[int], None]) -> None:
        self.pair, self._place = pair, place
        self.names = sorted(pair.engines)
        self.prompt: list[int] = []
        self.fetches: list[tuple[str, str, int]] = []
        pair.rig.router.fetches.rule.gain = 0.0
        pair.rig.router.fetches.count = lambda *one: self.fetches.append(one)

    async def turn(self, row: int) -> inference_pb2.GenerateResponse:
        """The last message of the next turn, computed and answered by worker `row`. Its tokens must be the model's."""
        self._place(row)
        self.prompt += prompt_of(90, len(self.prompt))
        request = greedy(self.prompt, ANSWER_TOKENS, LOCAL, request_id=f"r{len(self.prompt)}")
        tokens: list[int] = []
        last = inference_pb2.GenerateResponse()
        async for last in self.pair.rig.stub.Generate(request, timeout=30):
            tokens += last.token_ids
        assert tuple(tokens) == CLOSED_FORM.expected_tokens(self.prompt, ANSWER_TOKENS)
        assert last.timing.decode_worker_id == self.names[row]
        whole = (len(self.prompt) + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.prompt += tokens
        await self.pair.wait_idle()
        await until(lambda: self._cached(row) >= whole)
        return last

    def _cached(self, row: int) -> int:
        """Tokens of the worker's cache that the router has events of."""
        router = self.pair.rig.router
        refs = [one.ref for one in router.workers.table("sim").workers]
        (ref,) = [one for one in refs if one.worker_id == self.names[row]]
        return router.prefixes.cached.cached_refs("sim", self.prompt, "", [ref]).get(ref, 0)


@asynccontextmanager
async def conversation(
    monkeypatch: pytest.MonkeyPatch, both_roles: bool = True
) -> AsyncIterator[Conversation]:
    rows: list[int] = [0]
    monkeypatch.setattr(KvAware, "_draw", lambda *_: rows[0])
    async with running(roles={"both" if both_roles else "decode": 2}) as pair:
        yield Conversation(pair, lambda row: rows.__setitem__(0, row))


@pytest.mark.parametrize("both_roles", [True, False], ids=["both roles", "decode"])
async def test_a_worker_that_computes_fetches_what_another_one_has(
    monkeypatch: pytest.MonkeyPatch, both_roles: bool
) -> None:
    async with conversation(monkeypatch, both_roles) as turns:
        await turns.turn(0)
        known = len(turns.prompt) - 1
        last = await turns.turn(1)
        fetched = known // BLOCK_TOKENS * BLOCK_TOKENS
        assert turns.fetches == [(turns.names[1], "", fetched)]
        assert last.usage.decode_cached_tokens == fetched
        (link,) = last.usage.receipt.links
        assert (link.source_worker_id, link.destination_worker_id) == tuple(turns.names)
        assert link.payload_bytes > 0
        trace = await turns.pair.rig.trace_of(f"r{len(turns.prompt) - ANSWER_TOKENS}")
        (span,) = [one for one in trace.spans if one.name == schema.SPAN_PREFIX_FETCH]
        assert span.attributes[schema.ATTRIBUTE_TOKENS] == str(fetched)
        # What each worker lacks is fetched from the other one.
        await turns.turn(0)
        assert turns.fetches[1:] == [(turns.names[0], "", 96 + 32)]


async def _never(*_: object) -> Any:
    await asyncio.Event().wait()


def _refuses(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(prefix_service, "SENDS_MAX", 0)
    return prefix_fetch.REFUSED


def _has_evicted(monkeypatch: pytest.MonkeyPatch) -> str:
    found = CachedPrompts.cached_tokens

    def beyond(*args: Any, pooled: bool = True) -> Any:
        tokens = found(*args, pooled=pooled)
        return tokens if pooled else tokens + BLOCK_TOKENS * (tokens > 0)

    monkeypatch.setattr(CachedPrompts, "cached_tokens", beyond)
    return prefix_fetch.REFUSED


def _is_late(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(SimEngine, "prefill", _never)
    monkeypatch.setattr(prefix_fetch, "FETCH_S", 0.2)
    return DeadlineExceeded.reason


def _has_a_closed_channel(monkeypatch: pytest.MonkeyPatch) -> str:
    closed = mock.Mock(side_effect=grpc.aio.UsageError("the channel is closed"))
    stub = mock.Mock(return_value=mock.Mock(SendPrefix=closed))
    monkeypatch.setattr(prefix_pb2_grpc, "PrefixServiceStub", stub)
    return prefix_fetch.REFUSED


@pytest.mark.parametrize("fault", [_refuses, _has_evicted, _is_late, _has_a_closed_channel])
async def test_a_source_that_does_not_send_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], str]
) -> None:
    async with conversation(monkeypatch) as turns:
        await turns.turn(0)
        reason = fault(monkeypatch)
        last = await turns.turn(1)
        assert turns.fetches == [(turns.names[1], reason, 0)]
        assert last.usage.decode_cached_tokens == 0


async def test_a_lost_source_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with conversation(monkeypatch) as turns:
        await turns.turn(0)

        async def dies(*_: object) -> Any:
            turns.pair.serving[turns.names[0]].cancel()
            await _never()

        monkeypatch.setattr(turns.pair.engines[turns.names[0]].engine, "prefill", dies)
        await turns.turn(1)
        ((worker_id, reason, tokens),) = turns.fetches
        assert (worker_id, tokens) == (turns.names[1], 0)
        assert reason
