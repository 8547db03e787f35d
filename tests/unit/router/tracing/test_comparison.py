"""What the stored traces of other requests show of one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace_common.latency.steps import DecodeSteps
from headrace_common.telemetry import schema
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.verdict import verdict
from headrace_frontend.running.record import Gap, RequestRecord
from headrace_router.tracing.attempt_record import Move
from headrace_router.tracing.comparison import LIKE_MIN
from headrace_router.tracing.store import TraceLimits, TraceStore
from tests.unit.router.tracing.records import START_UNIX_NS, attempt, decision, ended

MS = 10**6


def store_of(*records: RequestRecord) -> TraceStore:
    store = TraceStore(TraceLimits(40))
    for record in records:
        store.start_trace(record.trace_id, record.request_id, START_UNIX_NS)
        store.end_request(record)
    return store


def record_of(name: str, *, remote: bool = True, **changes: Any) -> RequestRecord:
    number = int.from_bytes(name.encode(), "big")
    one = ended(replace(attempt(remote=remote), **changes), trace_id=number, request_id=name)
    one.prompt_tokens = 9
    return one


def test_a_trace_has_the_medians_of_like_requests() -> None:
    records = [record_of(f"r{number}", pulled=300 + number % 3) for number in range(LIKE_MIN)]
    # A local prefill is another kind of request.
    others = [record_of("local", remote=False), record_of("slow", pulled=309)]
    store = store_of(*records, *others)
    assert read_trace(store.get("slow")).usual["queue"] == 41_000
    assert not store.get("local").HasField("usual")
    assert not store_of(*records).get("r0").HasField("usual")


def running(name: str, *gaps: tuple[int, int], worker_id: str = "decode-0") -> RequestRecord:
    """A request with tokens from 1 ms to 9 s on a decode worker, and gaps between these milliseconds."""
    record = record_of(name, decision=decision(remote=True, worker_id=worker_id))
    begin, last = record.arrival_ns, record.arrival_ns + 9_000 * MS
    record.tokens_ns = (begin + MS, begin + 2 * MS, last)
    record.end_unix_ns = START_UNIX_NS + 9_000 * MS
    record.gaps = tuple(Gap(begin + start * MS, begin + end * MS, "") for start, end in gaps)
    return record


PROMPT = record_of(
    "p", remote=False, decode=DecodeSteps(1_900_000, step_start=2_100_000, first_token=4_900_000)
)
EARLIER = record_of(
    "e", remote=False, decode=DecodeSteps(900_000, step_start=900_000, first_token=2_500_000)
)
STALLED, GOING = running("s", (2_010, 5_010)), running("g", (6_000, 7_000))


@pytest.mark.parametrize(
    ("others", "detail"),
    [
        ([], ""),
        ([EARLIER, GOING, PROMPT], ": it computed 8 prompt tokens of p"),
        ([STALLED, running("t", (1_900, 5_000))], ": other requests on it without a token: 2"),
        ([GOING, EARLIER], ": other requests on it with tokens: 1"),
        ([running("o", worker_id="decode-1")], ""),
    ],
)
def test_other_requests_show_what_a_worker_did_in_a_gap(
    others: list[RequestRecord], detail: str
) -> None:
    store = store_of(*others, running("slow", (2_000, 5_000)))
    assert verdict(read_trace(store.get("slow"))) == (
        f"33 % without a token: no token came from decode-0 for 3,000 ms{detail}"
    )


async def test_an_answer_that_moves_keeps_the_tenants_before_it() -> None:
    before, slow = record_of("b"), record_of("slow", pulled=2_300)
    before.payer = ("greedy", "sim", "")
    moved = replace(attempt(remote=False), decision=decision(remote=False, worker_id="decode-1"))
    moved.moved = asyncio.get_running_loop().create_future()
    moved.moved.set_result(Move("decode-0", "decode-1", 64, 850_000, 950_000, 20_000))
    slow.attempts.append(moved)
    spans = {one.name: one for one in store_of(before, slow).get("slow").spans}
    assert spans[schema.SPAN_QUEUE].attributes[schema.ATTRIBUTE_QUEUE_TENANTS] == "greedy: 1"
    assert spans[schema.SPAN_MOVE].attributes == {
        schema.ATTRIBUTE_MOVE_SOURCE_WORKER_ID: "decode-0",
        schema.ATTRIBUTE_DECODE_WORKER_ID: "decode-1",
        schema.ATTRIBUTE_PAYLOAD_BYTES: "64",
        schema.ATTRIBUTE_MOVE_GAP_MS: "0.02",
    }


async def test_a_gap_that_a_move_caused_names_the_move() -> None:
    slow = running("slow", (2_000, 5_000))
    moved = replace(attempt(remote=False), decision=decision(remote=False, worker_id="decode-1"))
    moved.moved = asyncio.get_running_loop().create_future()
    end_ns = slow.arrival_ns + 4_999 * MS
    moved.moved.set_result(Move("decode-0", "decode-1", 64, end_ns - MS, end_ns, 3_000 * MS))
    slow.attempts.append(moved)
    assert verdict(read_trace(store_of(slow).get("slow"))).endswith(
        "for 3,000 ms: the answer moved there from decode-0"
    )
