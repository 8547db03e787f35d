"""The status page in a real browser, with as many workers as a large deployment has."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from headrace_router.status.digests import LinkSum, RequestDigest
from headrace_router.status.document import (
    DRAINING,
    READY,
    UNREACHABLE,
    DeploymentState,
    WorkerRow,
    status_document,
)
from tests.browser import browse
from tests.component.router.status.test_app import served

WORKERS = 500
PARTS = (
    *("admission", "tokenize", "route", "reserve", "queue", "batch wait", "prefill"),
    *("transfer exposed", "decode wait", "first step", "network", "unaccounted"),
)


def fake_state() -> DeploymentState:
    """200 prefill and 300 decode workers, two of which are not ready."""
    chance = random.Random(15)
    workers = [
        WorkerRow("prefill", f"prefill-{n}", f"10.0.0.{n}:7052", "m", READY, chance.randrange(9), 8)
        for n in range(200)
    ]
    for n in range(300):
        state = {7: UNREACHABLE, 19: DRAINING}.get(n, READY)
        load = chance.random()
        workers.append(
            WorkerRow(
                *("decode", f"decode-{n}", f"10.0.1.{n % 256}:7053", "m", state, int(64 * load)),
                *(64, int(90_000 * load), 100_000),
            )
        )
    links = [
        LinkSum(
            *(f"prefill-{n}/r0 -> decode-{n}/r0", f"prefill-{n}", f"decode-{n}", "mooncake/rdma"),
            *(3, 400_000_000, int(400_000_000 / (0.3 if n == 3 else 2 + chance.random()))),
        )
        for n in range(150)
    ]
    requests = [
        fake_request(n, [int(chance.expovariate(1 / 8e6)) for _ in PARTS]) for n in range(50)
    ]
    return DeploymentState(
        *(1_760_000_010_000_000_000, "router-0", "0.1.0", workers),
        queue={"depth": 12, "limit": 1_024, "tokens": 48_000, "oldest_age_s": 0.4, "wait_s": 0.61},
        admission={
            "requests": 700,
            "max_requests": 1_024,
            "slots": 19_000,
            "used_slots": 9_000,
            "waiting": 4,
            "queued_tokens": 90_000,
            "max_queued_tokens": 4_194_304,
        },
        policy={"overlap_weight": 4.0, "retry_budget": 2},
        requests=requests,
        links=sorted(links, key=lambda link: link.gb_s),
    )


def fake_request(number: int, times_ns: list[int]) -> RequestDigest:
    return RequestDigest(
        trace_id=f"{number:032x}",
        request_id=f"request-{number}",
        start_unix_ns=1_760_000_000 * 10**9,
        complete=True,
        ttft_ns=sum(times_ns),
        total_ns=2 * sum(times_ns),
        prompt_tokens=4_096,
        parts=tuple(zip(PARTS, times_ns, strict=True)),
        links=(),
        error="DEADLINE_EXCEEDED" if number == 5 else "",
    )


class FakeReader:
    async def read(self) -> bytes:
        return json.dumps(status_document(fake_state())).encode()


async def test_a_browser_draws_five_hundred_workers(tmp_path: Path) -> None:
    async with served(FakeReader(), insecure="true") as address:
        shown = await browse(f"http://{address}/", tmp_path)
    cells = re.findall(r'<div title="([^:"]+): ([^"]+)" class="([a-z]*)"', shown)
    assert len(cells) == WORKERS
    states = {name: (text, kind) for name, text, kind in cells}
    assert states["decode-7"][1] == "off"
    assert states["decode-7"][0].startswith("unreachable, ")
    assert states["decode-19"][1] == "draining"
    assert states["decode-20"][1] == ""
    assert 'stroke="var(--busy)"' in shown
    assert "498 of 500" not in shown
    assert "298 of 300" in shown
    assert "86 faster ones not shown" in shown
