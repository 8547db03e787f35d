"""The chaos run of tests/chaos inside one machine, with its KV over RDMA verbs."""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from headrace_common.rpc.channel import PING_TIMEOUT_S, PING_TIMEOUT_VARIABLE
from tests.chaos.plan import ChaosPlan, FaultKind, scenario, slowed
from tests.fork_server import ForkClient, ForkServer
from tests.forked import Forked, fork, import_services
from tests.rdma.cases import (
    CHAOS_ANSWERS,
    CHAOS_CASES,
    CHAOS_FAULTS,
    CHAOS_FOREIGN,
    CHAOS_LEFT,
    CHAOS_MOVED,
    REQUESTS_VARIABLE,
    SEED_VARIABLE,
)
from tests.rdma.device import Traffic, check_moved_by_rdma, traffic
from tests.rdma.report import LOGS, note_of, run_case, show_logs, write_failure
from tests.rdma.serving import INSTALLED, token_bytes

if TYPE_CHECKING:
    from tests.chaos.run import ChaosReport

_SHOWN = 5
_PROGRESS_S = 15.0


def emulated(seed: int, requests: int, slowness: float) -> ChaosPlan:
    """The run of `make chaos` with fewer processes, smaller KV memory, and more bytes per token."""
    plan = scenario("all", seed, requests)
    plan = replace(
        plan,
        # Few requests have few messages.
        wire=replace(plan.wire, lost=0.005, doubled=0.02, delayed=0.02),
        concurrency=6,
        prefill_tensor_parallel=(1, 2),
        decode_tensor_parallel=(2, 1),
        block_count=96,
        head_bytes=256,
    )
    return slowed(plan, slowness)


def start_chaos(host: str, slowness: float) -> Forked:
    """Runs the plan in a process of its own, with services that this process forks."""
    os.environ[PING_TIMEOUT_VARIABLE] = str(PING_TIMEOUT_S * slowness)
    import_services()
    ours, theirs = socket.socketpair()
    plan = emulated(int(os.environ[SEED_VARIABLE]), int(os.environ[REQUESTS_VARIABLE]), slowness)

    def client() -> None:
        ours.close()
        report(plan, host, theirs)

    started = fork("chaos", client)
    theirs.close()
    ForkServer().serve(ours)
    return started


def report(plan: ChaosPlan, host: str, connection: socket.socket) -> None:
    """Runs the plan and reports its cases."""
    before = traffic()
    try:
        done = asyncio.run(_run(plan, host, connection))
    # Any exception is the result of all cases.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        show_logs("*.log")
        for name in CHAOS_CASES:
            write_failure(name, note_of(error))
        return
    checks: Mapping[str, Callable[[], str]] = {
        CHAOS_FAULTS: partial(check_faults, done),
        CHAOS_ANSWERS: partial(check_answers, done),
        CHAOS_FOREIGN: partial(check_foreign, done),
        CHAOS_LEFT: partial(check_left, done),
        CHAOS_MOVED: partial(check_moved, done, traffic() - before),
    }
    for name in CHAOS_CASES:
        run_case(name, checks[name])
    if done.violations:
        print("\n".join(done.violations), flush=True)
        show_logs("*.log")


async def _run(plan: ChaosPlan, host: str, connection: socket.socket) -> ChaosReport:
    # Starts gRPC's threads, so only after the fork.
    from tests.chaos.processes import Place
    from tests.chaos.run import ChaosReport, run_chaos

    forks = ForkClient(connection)
    done = ChaosReport(plan)
    telling = asyncio.create_task(_report_progress(done))
    try:
        return await run_chaos(plan, LOGS, Place(host, forks.spawn), done)
    finally:
        telling.cancel()
        await forks.close()


async def _report_progress(done: ChaosReport) -> None:
    while True:
        ended, faults = len(done.outcomes.latencies_s), done.process_faults.total()
        print(f"{ended} of {done.plan.requests} requests have ended, {faults} faults", flush=True)
        await asyncio.sleep(_PROGRESS_S)


def check_faults(done: ChaosReport) -> str:
    """Every kind of fault occurred."""
    kinds = {what.rpartition(" ")[2] for what in done.process_faults}
    assert kinds >= set(FaultKind), f"of processes, only {sorted(kinds)}"
    missing = {"lost", "doubled", "held up"} - set(done.wire_faults)
    assert not missing, f"no message was {' or '.join(sorted(missing))}"
    return f"{_counts(done.process_faults)}; messages: {_counts(done.wire_faults)}"


def check_answers(done: ChaosReport) -> str:
    """Every request ended well, in a named error or by its client, in time. Most were answered."""
    outcomes, asked = done.outcomes, done.plan.requests
    assert not outcomes.violations, _some(outcomes.violations)
    assert outcomes.counts["right"] > asked // 2, f"too few answers: {_counts(outcomes.counts)}"
    return (
        f"seed {done.plan.seed}, {asked} requests in {done.seconds:.0f} s, deadline "
        f"{done.plan.deadline_s:.0f} s: {_counts(outcomes.counts)}; 0 wrong, late or unnamed"
    )


def check_foreign(done: ChaosReport) -> str:
    """No worker saw a change in a free block."""
    watching = len(list((LOGS / "reports").glob("wire-*.json")))
    workers = (*done.plan.prefill_tensor_parallel, *done.plan.decode_tensor_parallel)
    assert watching >= len(workers), f"only {watching} processes looked"
    assert not done.foreign_blocks, f"{done.foreign_blocks} free blocks were written to"
    return f"0, as {watching} worker processes saw"


def check_left(done: ChaosReport) -> str:
    """No worker holds any state."""
    assert not done.left_behind, _some(done.left_behind)
    return "0 requests, blocks, quarantines or transfers"


def check_moved(done: ChaosReport, counted: Traffic) -> str:
    """The KV of the answers was sent by RDMA, and every engine reports no other transport."""
    logs = [*LOGS.glob("prefill-*.log"), *LOGS.glob("decode-*.log")]
    kinds = {kind for log in logs for kind in INSTALLED.findall(log.read_text(errors="replace"))}
    assert kinds == {"rdma"}, f"the engines use {sorted(kinds)}"
    return check_moved_by_rdma(
        counted, done.outcomes.transferred_tokens * token_bytes(done.plan.model)
    )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def _some(lines: list[str]) -> str:
    return f"{len(lines)}: " + "; ".join(lines[:_SHOWN])
