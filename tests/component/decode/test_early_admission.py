"""A prefill that begins once its request is admitted, while the engine allocates the blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import TransferFailed
from headrace_engine.interface import DecodeEnded, DecodeTokens
from headrace_kv.messages import Reservation
from tests.component.decode.conftest import Served, request
from tests.component.decode.prefill_rank import RESERVATION, PrefillRank, failure_of, ticket_of
from tests.linked_call import LinkedCall
from tests.waiting import until


async def admitted(served: Served, rank: PrefillRank) -> LinkedCall:
    """A request that is admitted and opened, without blocks."""
    call = served.generate(request(early_admission=True))
    first = (await anext(aiter(call))).reserved
    assert (first.start_token, first.end_token, first.admitted) == (0, 39, True)
    rank.send(open=handoff_pb2.Open(transfer_id="x1", ticket=ticket_of("x1")))
    await until(lambda: bool(served.receiver._expected["x1"]), what="the Open")
    return call


async def test_an_open_waits_for_the_blocks(served: Served, rank: PrefillRank) -> None:
    call = await admitted(served, rank)
    served.engine.play(RESERVATION)
    second = (await anext(aiter(call))).reserved
    assert (second.start_token, second.end_token, second.admitted) == (0, 39, False)
    await rank.receive("reservation")
    rank.land(0, 1)
    await until(lambda: served.engine.arrived_ids == ["x1"], what="arrival")
    served.engine.play(DecodeTokens((7,)), DecodeEnded(True, 0))
    assert [token for r in [r async for r in call] for token in r.tokens.token_ids] == [7]
    assert served.receiver._expected == {}


async def fail_engine(served: Served, call: LinkedCall) -> None:
    served.engine.play(TransferFailed("no blocks"))
    assert (await failure_of(call)).reason == "TRANSFER_FAILED"


async def cancel_call(served: Served, call: LinkedCall) -> None:
    call.cancel()


async def find_everything_cached(served: Served, call: LinkedCall) -> None:
    served.engine.play(Reservation("x1", (), 39, 39))
    assert (await anext(aiter(call))).reserved.start_token == 39


@pytest.mark.parametrize("end", [fail_engine, cancel_call, find_everything_cached])
async def test_an_open_without_blocks_ends_with_the_need_for_it(
    served: Served, rank: PrefillRank, end: Any
) -> None:
    call = await admitted(served, rank)
    await end(served, call)
    assert (await rank.receive("cancel")).cancel.transfer_id == "x1"
    assert served.receiver._expected == {}
    assert served.receiver.count_states()["open"] == 0


@pytest.mark.parametrize("end", ["quiesced", "leave"])
async def test_a_rank_that_ends_before_the_blocks_is_no_writer(
    served: Served, rank: PrefillRank, end: str
) -> None:
    """I1: nothing would end its part in the transfer."""
    call = await admitted(served, rank)
    if end == "leave":
        rank.leave()
    else:
        rank.send(quiesced=handoff_pb2.Quiesced(transfer_id="x1"))
    await until(lambda: not served.receiver._expected["x1"], what="its end")
    served.engine.play(RESERVATION)
    await anext(aiter(call))
    assert served.receiver.lease_count == 0
    call.cancel()
    await until(lambda: served.engine.released_ids == ["x1"], what="release")


async def test_no_more_streams_wait_for_the_blocks_than_a_worker_has_ranks(
    served: Served, rank: PrefillRank
) -> None:
    call = await admitted(served, rank)
    (peer,) = served.receiver._expected["x1"]
    opened = handoff_pb2.HandoffRequest(open=handoff_pb2.Open(transfer_id="x1", ticket=b"any"))
    for _ in range(peer.layout.rank_count):
        served.receiver.handle(replace(peer, end=lambda _: None), opened)
    assert len(served.receiver._expected["x1"]) == peer.layout.rank_count
    # A repeated Open of one that waits is not too many.
    served.receiver.handle(peer, opened)
    assert served.receiver._expected["x1"][peer] == b"any"
    call.cancel()


async def test_an_open_before_the_blocks_needs_a_ticket(served: Served, rank: PrefillRank) -> None:
    await anext(aiter(served.generate(request(early_admission=True))))
    rank.send(open=handoff_pb2.Open(transfer_id="x1"))
    await until(lambda: bool(served.receiver._expected["x1"]), what="the Open")
    served.engine.play(RESERVATION)
    assert (await rank.receive("cancel")).cancel.refused_claim == "missing"
    assert served.receiver.lease_count == 0


async def test_without_remote_prefill_nothing_is_admitted_early(served: Served) -> None:
    served.engine.play(DecodeTokens((1,)), DecodeEnded(False, 16))
    asked = request(remote_prefill=False, early_admission=True)
    assert not (await anext(aiter(served.generate(asked)))).reserved.admitted


@pytest.mark.parametrize(
    ("able", "token", "end_token"), [(True, 32, 32), (True, 31, 39), (False, 32, 39)]
)
async def test_the_reservation_states_whether_decode_computes_beside_prefill(
    served: Served, able: bool, token: int, end_token: int
) -> None:
    """Only from the first token of a block on, with an engine that can."""
    served.engine.computes_beside = able
    call = served.generate(request(early_admission=True, computes_from=token))
    first = (await anext(aiter(call))).reserved
    assert (first.end_token, first.admitted) == (end_token, True)
    call.cancel()
