"""The program inside the virtual machines. Results go to the console, see report.py.

`python -m tests.rdma.guest` reads the role of the machine from HEADRACE_RDMA_ROLE, see cases.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from tests.forked import Forked, fork, import_services
from tests.rdma.cases import (
    BETWEEN_HOSTS,
    CHAOS_ANSWERS,
    CHAOS_ROLE,
    CONTROL,
    HOST_ROLES,
    LANES,
    VLLM_ROLES,
    WRITES,
    WRITES_MOVED,
    WRITES_ROLE,
    Group,
)
from tests.rdma.chaos import start_chaos
from tests.rdma.conformance import CASES, large_runs
from tests.rdma.device import Traffic, check_crossed_by_rdma, check_moved_by_rdma, traffic
from tests.rdma.harness import Harness
from tests.rdma.hosts import FIRST_HOST, MEET_TIMEOUT_S, SECOND_HOST, accepted, listening, meet
from tests.rdma.peers import PeerSettings
from tests.rdma.report import LOGS, run_case, show_logs, write_failure
from tests.rdma.serving import (
    Site,
    ask_and_report,
    center,
    check_engines,
    payload_bytes,
    running,
    serve_lane,
    start_worker,
)
from tests.rdma.vllm_hosts import decode_host, prefill_host

_WELL = "ended well"
_LANE_TIMEOUT_S = 1100.0
_WRITES_TIMEOUT_S = 900.0
_CONTROL_TIMEOUT_S = 200.0
_CHAOS_END_TIMEOUT_S = 30.0
_LARGE_BYTES = 26 << 20
# Emulation on cores that other processes use as well.
_SLOWNESS = 5.0
# The same with many services and all their times, see tests.chaos.plan.slowed.
_CHAOS_SLOWNESS = 8.0


def main() -> None:
    """Runs the job of this machine."""
    # The engines log which transport they use.
    os.environ["MC_LOG_LEVEL"] = "INFO"
    LOGS.mkdir(exist_ok=True)
    role = os.environ["HEADRACE_RDMA_ROLE"]
    if role == WRITES_ROLE:
        finish(WRITES_MOVED, fork("writes", conformance), _WRITES_TIMEOUT_S)
        case = partial(run_case, CONTROL, control)
        finish(CONTROL, fork("control", case), _CONTROL_TIMEOUT_S)
        return
    if role == CHAOS_ROLE:
        finish(CHAOS_ANSWERS, start_chaos(FIRST_HOST, _CHAOS_SLOWNESS), _CHAOS_END_TIMEOUT_S)
        return
    started_s = time.monotonic()
    import_services()
    print(f"the services are imported after {time.monotonic() - started_s:.1f} s", flush=True)
    if role in HOST_ROLES:
        (first_host if role == HOST_ROLES[0] else second_host)()
        return
    if role in VLLM_ROLES:
        (decode_host if role == VLLM_ROLES[0] else prefill_host)()
        return
    site = Site(FIRST_HOST, FIRST_HOST)
    with center(site):
        lane = fork(role, partial(serve_lane, LANES[role], site))
        finish(f"lane: {role}", lane, _LANE_TIMEOUT_S)


def finish(name: str, process: Forked, timeout_s: float) -> None:
    """Waits for a process that reports cases itself, and reports it when it does not end well."""
    try:
        status = process.wait(timeout_s)
        note = f"its process ended with status {status}" if status else ""
    except TimeoutError as error:
        note = str(error)
    if note:
        show_logs("*.log")
        write_failure(name, note)


def conformance() -> None:
    """The transport conformance suite, over RDMA."""
    before = traffic()
    harness = Harness(PeerSettings("mooncake", FIRST_HOST, "rdma"), _SLOWNESS)

    def run(case: Callable[[Harness], None]) -> str:
        case(harness)
        return (case.__doc__ or "").strip()

    for case in CASES:
        run_case(WRITES[case.__name__], partial(run, case))
    run_case(WRITES_MOVED, lambda: check_moved_by_rdma(traffic() - before, _LARGE_BYTES))
    harness.close()


def control() -> str:
    """Bytes sent by TCP appear in the counters of the other cases, so their proof can fail."""
    harness = Harness(PeerSettings("mooncake", FIRST_HOST, "tcp"), _SLOWNESS)
    before = traffic()
    large_runs(harness)
    counted = traffic() - before
    harness.close()
    assert counted.rdma_packets_sent == 0, f"{counted.rdma_packets_sent} RDMA packets were sent"
    assert counted.ip_bytes >= _LARGE_BYTES, f"only {counted.ip_bytes} bytes went by IP"
    return f"{_LARGE_BYTES} bytes, {counted.ip_bytes} bytes by IP"


def first_host() -> None:
    """Registry, router and decode workers. The prefill workers of the second host join them."""
    site = Site(FIRST_HOST, FIRST_HOST)
    with listening() as server, center(site), accepted(server, MEET_TIMEOUT_S) as line:
        for group in BETWEEN_HOSTS:
            name = group.pair_name(group.decode_ranks[0])
            workers = [start_worker("decode", group, n, site) for n in group.decode_ranks]
            with running(workers):
                client = fork("client", partial(ask_and_report, group, site, between))
                finish(name, client, _LANE_TIMEOUT_S)
                print("answered", file=line, flush=True)
                note = line.readline().strip()
            if note != _WELL:
                write_failure(name, f"second host: {note}")


def between(group: Group, counted: Traffic) -> str:
    """Explains how the counters prove that the payload crossed by RDMA."""
    return check_crossed_by_rdma(counted, payload_bytes(group), sends=False)


def second_host() -> None:
    """Runs the prefill workers of the first host's groups, each until its requests are answered."""
    site = Site(FIRST_HOST, SECOND_HOST)
    with meet(_LANE_TIMEOUT_S) as line:
        for group in BETWEEN_HOSTS:
            note = _WELL
            before = traffic()
            worker = start_worker("prefill", group, group.prefill_ranks, site)
            try:
                with running([worker]):
                    assert line.readline().strip() == "answered", "the first host is gone"
                    check_engines(worker.name)
                    counted = traffic() - before
                    print(check_crossed_by_rdma(counted, payload_bytes(group), sends=True))
            except (AssertionError, TimeoutError) as error:
                note = " ".join(str(error).split())
                show_logs("*.log")
            print(note, file=line, flush=True)


if __name__ == "__main__":
    main()
