"""DecodeService.Generate over a real connection: transfers, failures, admission, status and spans."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.inference.v1 import sampling_pb2
from headrace.kv.v1 import handoff_pb2
from headrace_engine.interface import DecodeEnded, DecodeTokens
from headrace_kv.messages import Reservation
from tests.component.decode.conftest import Served, request
from tests.component.decode.prefill_rank import PIECE_BYTES, RESERVATION, PrefillRank, failure_of
from tests.waiting import let_a_wrong_step_show, until


async def test_no_token_is_sent_before_every_layer_is_counted(
    served: Served, rank: PrefillRank
) -> None:
    call = served.generate(request())
    served.engine.play(RESERVATION)
    first = await anext(aiter(call))
    assert (first.reserved.start_token, first.reserved.end_token) == (0, 39)
    await rank.open()
    rank.land(0)
    await let_a_wrong_step_show()
    assert served.engine.arrived_ids == []
    rank.land(1)
    await until(lambda: served.engine.arrived_ids == ["x1"], what="arrival")
    served.engine.play(DecodeTokens((7, 8)), DecodeTokens((9,)), DecodeEnded(True, 0))
    responses = [response async for response in call]
    assert [token for r in responses for token in r.tokens.token_ids] == [7, 8, 9]
    finished = responses[-1].finished
    assert finished.reason == sampling_pb2.FINISH_REASON_STOP
    assert (finished.transferred_tokens, finished.acknowledgement_count) == (39, 2)
    assert finished.payload_bytes == 2 * PIECE_BYTES
    assert finished.transfer_wait.ToNanoseconds() > 0
    await until(lambda: served.service.attempts.status().reserved_blocks == 0, what="the blocks")
    assert served.engine.released_ids == []


async def test_an_engine_that_generates_too_early_is_stopped(served: Served) -> None:
    call = await served.reserve()
    served.engine.play(DecodeTokens((1,)))
    error = await failure_of(call)
    assert error.reason == "INTERNAL"
    assert "before the KV cache" in error.detail
    await until(lambda: served.engine.released_ids == ["x1"], what="release")


async def test_a_lost_prefill_rank_fails_the_request_and_the_error_names_the_missing_keys(
    served: Served, rank: PrefillRank
) -> None:
    call = await served.reserve()
    await rank.open()
    rank.land(0)
    rank.leave()
    error = await failure_of(call)
    assert error.reason == "TRANSFER_FAILED"
    assert "missing" in error.detail
    assert served.engine.closed == 1
    # Not before the lease and the quarantine are over (I1).
    assert served.engine.released_ids == []
    assert served.service.attempts.status().quarantined_blocks == 3
    served.end_quarantine()
    await until(lambda: served.engine.released_ids == ["x1"], what="release")
    assert served.service.attempts.status().quarantined_blocks == 0


async def test_a_cancelled_call_stops_the_sender_at_once(served: Served, rank: PrefillRank) -> None:
    call = await served.reserve()
    await rank.open()
    call.cancel()
    cancel = await rank.receive("cancel")
    assert cancel.cancel.reason == "CANCELLED"
    await until(lambda: served.engine.closed == 1, what="the engine's abort")
    assert served.engine.released_ids == []
    rank.send(quiesced=handoff_pb2.Quiesced(transfer_id="x1"))
    await until(lambda: served.engine.released_ids == ["x1"], what="release")
    status = served.service.attempts.status()
    assert (status.reserved_blocks, status.quarantined_blocks, status.active_transfers) == (0, 0, 0)


async def test_an_empty_reservation_waits_for_nothing(served: Served) -> None:
    served.engine.play(Reservation("x1", (), 32, 32), DecodeTokens((1,)), DecodeEnded(True, 32))
    responses = [r async for r in served.generate(request())]
    assert responses[0].reserved.start_token == responses[0].reserved.end_token == 32
    assert responses[-1].finished.cached_tokens == 32
    assert served.engine.arrived_ids == served.engine.released_ids == []


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"incarnation": "ffffffffffffffff"}, "STALE_INCARNATION"),
        ({"incarnation": ""}, "STALE_INCARNATION"),
        ({"token_ids": []}, "INVALID_FIELD"),
        ({"token_ids": [1] * 256}, "INVALID_FIELD"),
        ({"token_ids": [1, 32_000, 3]}, "INVALID_FIELD"),
        ({"sampling": sampling_pb2.SamplingParams()}, "INVALID_FIELD"),
    ],
)
async def test_invalid_requests_are_refused_before_the_engine_gets_them(
    served: Served, changes: dict[str, Any], reason: str
) -> None:
    error = await failure_of(served.generate(request(**changes)))
    assert error.reason == reason
    assert served.engine.works == []


async def test_a_transfer_id_works_once(served: Served) -> None:
    served.engine.play(DecodeTokens((1,)), DecodeEnded(True, 0))
    assert [r async for r in served.generate(request(remote_prefill=False))]
    error = await failure_of(served.generate(request()))
    assert error.reason == "DUPLICATE_TRANSFER"
