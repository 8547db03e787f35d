"""DecodeService.SetFirstToken: who may say it, when, and what it may be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, sampling_pb2
from headrace_common import telemetry_schema as schema
from headrace_common.errors import (
    DuplicateTransfer,
    HeadraceError,
    InvalidRequest,
    NotFound,
    StaleIncarnation,
)
from headrace_common.status import error_from_rpc
from headrace_engine.interface import DecodeEnded, DecodeTokens
from headrace_kv.transfer import Reservation
from tests.component.decode.conftest import REF, Served, request
from tests.component.decode.test_generate import PrefillRank, until

PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
# Of 40 tokens an engine would ask for all; the scripted rank counts 39.
RESERVATION = Reservation("x1", (3, 4, 5), 0, 39)


def begun(served: Served, **changes: Any) -> AsyncIterator[decode_pb2.GenerateResponse]:
    call = served.decode.Generate(request(first_token=PREFILL, **changes))
    return aiter(call)


async def tell(served: Served, token_id: int = 7, **changes: str) -> None:
    fields = {"transfer_id": "x1", "incarnation": REF.incarnation, **changes}
    await served.decode.SetFirstToken(decode_pb2.SetFirstTokenRequest(token_id=token_id, **fields))


async def refusal(served: Served, token_id: int = 7, **changes: str) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await tell(served, token_id, **changes)
    return error_from_rpc(raised.value)


async def test_the_engine_goes_on_after_the_token_that_it_is_told(served: Served) -> None:
    call = begun(served)
    served.engine.script.put_nowait(RESERVATION)
    assert (await anext(call)).HasField("reserved")
    (work,) = served.engine.works
    assert work.awaits_first_token
    assert isinstance(await refusal(served, incarnation="another"), StaleIncarnation)
    assert isinstance(await refusal(served, transfer_id="x2"), NotFound)
    await tell(served)
    assert served.engine.first_tokens == [("x1", 7)]
    assert isinstance(await refusal(served, 8), DuplicateTransfer)
    rank = PrefillRank(served)
    await rank.open()
    rank.land(0, 1)
    await until(lambda: served.engine.arrived_ids == ["x1"], "arrival")
    for event in (DecodeTokens((9,)), DecodeEnded(True, 0)):
        served.engine.script.put_nowait(event)
    events = [event async for event in call]
    assert list(events[0].tokens.token_ids) == [9]
    assert served.engine.first_tokens == [("x1", 7)]
    await until(
        lambda: (
            schema.SPAN_DECODE_TOKEN_WAIT
            in {span.name for span in served.spans.get_finished_spans()}
        ),
        "the token's span",
    )
    assert isinstance(await refusal(served), NotFound)
    rank.leave()


async def test_a_token_that_ends_the_answer_is_refused(served: Served) -> None:
    call = begun(served, stop_token_ids=[5])
    served.engine.script.put_nowait(RESERVATION)
    await anext(call)
    error = await refusal(served, 5)
    assert isinstance(error, InvalidRequest)
    assert set(error.violations) == {"token_id"}
    assert served.engine.first_tokens == []


async def test_the_only_token_of_an_answer_is_refused(served: Served) -> None:
    call = begun(served, sampling=sampling_pb2.SamplingParams(max_tokens=1))
    served.engine.script.put_nowait(RESERVATION)
    await anext(call)
    assert isinstance(await refusal(served), InvalidRequest)


async def test_a_token_before_the_reservation_is_refused(served: Served) -> None:
    call = begun(served)
    waiting = anext(call)
    await until(lambda: bool(served.engine.works), "the request")
    assert isinstance(await refusal(served), InvalidRequest)
    served.engine.script.put_nowait(RESERVATION)
    assert (await waiting).HasField("reserved")
    await tell(served)
    assert served.engine.first_tokens == [("x1", 7)]


async def test_who_makes_its_own_first_token_is_told_none(served: Served) -> None:
    call = aiter(served.decode.Generate(request()))
    served.engine.script.put_nowait(RESERVATION)
    await anext(call)
    assert isinstance(await refusal(served), NotFound)
