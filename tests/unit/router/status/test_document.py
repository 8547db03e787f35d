"""The status document: what it counts, and its bounds."""

from __future__ import annotations

import json
import math

from headrace_common.trace_view.model import Link, TraceView
from headrace_router.status.document import (
    READY,
    UNREACHABLE,
    WORKERS_MAX,
    DeploymentState,
    RequestDigest,
    WorkerRow,
    status_document,
)


def worker(number: int, state: str = READY, requests: int = 3) -> WorkerRow:
    return WorkerRow(
        *("decode", f"decode-{number:04}", f"10.0.{number // 250}.{number % 250}:7053", "m", state),
        requests=requests,
        max_requests=64,
        held_tokens=1_000,
        total_tokens=100_000,
    )


def link(number: int) -> Link:
    destination, moving_ns = f"decode-{number}", 1_000_000 * (number + 1)
    return Link("prefill-0", 0, destination, 0, "tcp", "", 1_000_000, moving_ns)


def digest(number: int) -> RequestDigest:
    parts = {f"part {n}": 1_000_000 * n for n in range(13)}
    view = TraceView(
        *(f"{number:032x}", "i" * 500, 1_700_000_000 * 10**9, True),
        ttft_ns=78_000_000,
        total_ns=90_000_000,
        parts=parts,
        links=(),
        steps=(),
    )
    return RequestDigest(view, "")


def state(workers: list[WorkerRow], links: int = 3, requests: int = 1) -> DeploymentState:
    slowest_first = [link(number) for number in reversed(range(links))]
    return DeploymentState(
        unix_ns=1_700_000_000 * 10**9,
        router_id="router-0",
        version="1",
        workers=workers,
        queue={"depth": 2, "wait_s": math.inf},
        admission={"requests": 5},
        policy={},
        requests=[digest(number) for number in range(requests)],
        links=slowest_first,
        traffic={},
    )


def test_beyond_the_bound_the_totals_count_all_and_the_rows_are_those_that_matter() -> None:
    workers = [worker(n, requests=n % 7) for n in range(4_000)]
    workers[3_777] = worker(3_777, UNREACHABLE)
    made = status_document(state(workers))
    assert len(made["workers"]) == WORKERS_MAX
    assert made["workers_left_out"] == 3_000
    assert made["totals"]["decode"]["members"] == 4_000
    assert made["totals"]["decode"]["ready"] == 3_999
    assert made["totals"]["decode"]["requests"] == sum(row.requests for row in workers)
    ids = [row["id"] for row in made["workers"]]
    assert "decode-3777" in ids
    assert ids == sorted(ids)
    assert min(row["requests"] for row in made["workers"]) >= 3


def test_the_load_is_the_larger_of_requests_and_blocks() -> None:
    held = WorkerRow("decode", "d", "", "", READY, 1, 10, 900, 1_000)
    asked = WorkerRow("decode", "d", "", "", READY, 99, 10, 0, 0)
    assert held.load == 0.9
    assert asked.load == 1.0
    assert WorkerRow("router", "r", "", "", READY).load == 0.0


def test_json_has_no_infinity_and_long_names_are_cut() -> None:
    made = status_document(state([worker(0)]))
    assert made["queue"] == {"depth": 2, "wait_s": None}
    json.dumps(made, allow_nan=False)
    assert len(made["requests"][0]["request_id"]) == 128
    assert sum(ms for _, ms in made["requests"][0]["parts"]) == made["requests"][0]["ttft_ms"]


def test_a_link_counts_as_slow_below_half_of_the_median_and_from_16_mb_on() -> None:
    sent = [(15_999_999, 64), (16_000_000, 64), (64_000_000, 64), (64_000_000, 60)]
    links = [
        Link("p", number, "d", 0, "tcp", "", payload_bytes, 1_000_000 * busy_ms)
        for number, (payload_bytes, busy_ms) in enumerate(sent)
    ]
    links.append(Link("p", 4, "d", 0, "tcp", "", 64_000_000, 50_000_000))
    links.append(Link("unknown speed", 0, "d", 0, "tcp", "", 10, 0))
    made = status_document(DeploymentState(0, "", "", [], {}, {}, {}, [], links, {}))
    assert made["links_median_gb_s"] == 1.0
    assert [one["name"] for one in made["links"] if one["slow"]] == ["p/r1 -> d/r0"]
    assert made["links"][-1]["gb_s"] is None
