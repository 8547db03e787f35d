"""A chaos run: load and faults, then a search for violations and leftover state."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc.aio

from headrace.incident.v1 import incident_pb2, incident_pb2_grpc
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import RouterClient, worker_status
from headrace_common.access.roles import REGISTRY_AUDIENCE
from headrace_common.errors import HeadraceError
from headrace_common.process.events import incident_writer
from headrace_common.registry.duties import all_members
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from tests.chaos import pool_process
from tests.chaos.hostile import served_by_hostile
from tests.chaos.load import Clients, Outcomes
from tests.chaos.plan import (
    ChaosPlan,
    FaultKind,
    ProcessFault,
    process_faults,
    requests,
    role_changes,
)
from tests.chaos.processes import ETCD, HERE, Place, Processes
from tests.chaos.tiers import held_file
from tests.waiting import until

# At most two processes are away at a time.
FAULTS_AT_ONCE = 2
MOVES_AT_ONCE = 8
QUIESCE_S = 60.0
SERVED_WITHIN_S = 30.0
_ENOUGH_CHECK_S = 0.2
_CALL_S = 30.0


@dataclass(slots=True)
class ChaosReport:
    """The record of a run. The run passed when `violations` is empty."""

    plan: ChaosPlan
    seconds: float = 0.0
    requests: int = 0
    outcomes: Outcomes = field(default_factory=Outcomes)
    process_faults: Counter[str] = field(default_factory=Counter)
    wire_faults: Counter[str] = field(default_factory=Counter)
    tier_counts: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    foreign_blocks: int = 0
    unconserved: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    decisions: Counter[str] = field(default_factory=Counter)
    """What a replay of the events of the routers that run at the end has compared, and what it made differently."""
    differing: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """A line for every broken promise."""
        foreign = [f"{self.foreign_blocks} free blocks were written to"] * bool(self.foreign_blocks)
        own = [*self.outcomes.violations, *self.crashes, *foreign]
        return [*own, *self.unconserved, *self.left_behind, *self.differing]


async def run_chaos(
    plan: ChaosPlan,
    folder: Path,
    place: Place = HERE,
    report: ChaosReport | None = None,
    last_s: float = math.inf,
    enough: Callable[[ChaosReport], bool] | None = None,
) -> ChaosReport:
    """Fills the report. Raises only when a process does not start. Violations stand in the report.

    No request is sent after `last_s`, or once `enough` returns true. If the report has a violation then, no state that
    is left behind is searched.
    """
    report = report or ChaosReport(plan)
    processes = Processes(plan, folder, place)
    try:
        await processes.start()
        keeping = asyncio.create_task(processes.keep(report.process_faults, report.crashes))
        try:
            await until_served(processes, SERVED_WITHIN_S * plan.slowness)
            await _load(plan, processes, report, last_s, enough)
        finally:
            failed = keeping.done()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        if failed:
            await keeping
        if enough is None or not report.violations:
            await _repair(processes)
            await _replay_decisions(processes, report, folder / "chaos.incident")
            report.left_behind = await left_behind(processes, QUIESCE_S * plan.slowness)
            # Every worker checks its free blocks once more.
            await asyncio.sleep(3 * plan.wire.watch_interval_s)
        _read_reports(processes.reports, report)
    finally:
        await processes.stop()
    if plan.pool_gib:
        report.left_behind += await _pool_processes(processes.reports, QUIESCE_S * plan.slowness)
    return report


async def _load(
    plan: ChaosPlan,
    processes: Processes,
    report: ChaosReport,
    last_s: float,
    enough: Callable[[ChaosReport], bool] | None,
) -> None:
    """Sends all requests, or those until `last_s` or until `enough` returns true, while faults happen."""
    started_s = time.monotonic()
    model = SimModel(parse_settings(plan.model))
    channels = processes.client_channels()
    clients = Clients(
        *(channels, model, processes.model, plan.deadline_s, report.outcomes, plan.late_s),
        hostile=partial(served_by_hostile, processes.reports) if plan.hostile else None,
    )
    faults = asyncio.create_task(_inject(plan, processes, report))
    roles = asyncio.create_task(_change_roles(plan, processes, report))
    moving = asyncio.create_task(_move_answers(plan, processes, report, clients))
    sending = asyncio.create_task(clients.run(requests(plan), plan.concurrency, last_s))
    try:
        while not sending.done():
            report.foreign_blocks = _foreign_blocks(processes.reports)
            if enough is not None and enough(report):
                sending.cancel()
            await asyncio.wait({sending}, timeout=_ENOUGH_CHECK_S)
        if not sending.cancelled():
            sending.result()
        report.requests = clients.done
    finally:
        sending.cancel()
        failed = [one for one in (faults, moving) if one.done()]
        faults.cancel()
        roles.cancel()
        moving.cancel()
        await asyncio.gather(sending, faults, roles, moving, return_exceptions=True)
        await clients.close()
    for task in failed:
        task.result()
    report.seconds = time.monotonic() - started_s


async def until_served(processes: Processes, timeout_s: float = SERVED_WITHIN_S) -> None:
    """Workers register by themselves. Before every router has one, no request can be served."""
    for name in processes.routers:
        endpoint = processes.endpoint(name)
        async with open_channel(endpoint, processes.identities.operator) as channel:
            router = RouterClient(endpoint, channel)
            await until(partial(_serves, router), timeout_s, f"{name} serves", interval_s=0.05)


async def _serves(router: RouterClient) -> bool:
    try:
        return any(model.decode_worker_count for model in (await router.listing()).models)
    except HeadraceError:
        # On a machine that stands still, even this may take longer than its limit.
        return False


async def _inject(plan: ChaosPlan, processes: Processes, report: ChaosReport) -> None:
    """Applies faults until cancelled, and then repairs their effects. Raises the error of a repair."""
    repairs: dict[str, asyncio.Task[None]] = {}
    try:
        for fault in process_faults(plan):
            await asyncio.sleep(fault.gap_s)
            while True:
                for target in [name for name, task in repairs.items() if task.done()]:
                    repairs.pop(target).result()
                if len(repairs) < FAULTS_AT_ONCE:
                    break
                await asyncio.wait(repairs.values(), return_when=asyncio.FIRST_COMPLETED)
            # A repair task needs the process in the state in which the fault left it.
            if fault.target in repairs or not processes.running(fault.target):
                continue
            if fault.target.startswith("router") and not _another_serves(processes, fault.target):
                continue
            report.process_faults[f"{fault.target.partition('-')[0]} {fault.kind}"] += 1
            repairs[fault.target] = asyncio.create_task(_break_and_repair(fault, processes))
    finally:
        for task in repairs.values():
            task.cancel()
        await asyncio.gather(*repairs.values(), return_exceptions=True)


async def _change_roles(plan: ChaosPlan, processes: Processes, report: ChaosReport) -> None:
    """Changes the roles of workers by policy until cancelled, as far as the registry answers."""
    if not plan.role_interval_s:
        return
    for roles in role_changes(plan):
        await asyncio.sleep(plan.role_interval_s)
        policy = registry_pb2.Policy(worker_roles=roles)
        async with open_channel(
            processes.endpoint("registry"), processes.identities.operator
        ) as channel:
            with suppress(grpc.aio.AioRpcError):
                await registry_pb2_grpc.RegistryServiceStub(channel).SetPolicy(
                    registry_pb2.SetPolicyRequest(policy=policy), timeout=plan.role_interval_s
                )
                report.process_faults["roles changed"] += 1


async def _move_answers(
    plan: ChaosPlan, processes: Processes, report: ChaosReport, clients: Clients
) -> None:
    """Moves running answers until cancelled, some of them at once. Moves may fail, by a name."""
    rng = random.Random(f"{plan.seed}/moves")
    under_way: set[asyncio.Task[None]] = set()
    try:
        while plan.move_gap_s:
            await asyncio.sleep(plan.move_gap_s)
            if clients.running and len(under_way) < MOVES_AT_ONCE:
                name, router = rng.choice(list(clients.running.items()))
                task = asyncio.create_task(_move(processes, f"router-{router}", name, report.moves))
                under_way.add(task)
            for task in [one for one in under_way if one.done()]:
                under_way.remove(task)
                task.result()
        await asyncio.Event().wait()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _move(processes: Processes, router: str, name: str, counts: Counter[str]) -> None:
    request = inference_pb2.MoveAnswerRequest(request_id=name)
    endpoint = processes.internal_endpoint(router)
    async with open_channel(endpoint, processes.identities.operator) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            await stub.MoveAnswer(request, timeout=_CALL_S)
            counts["moved"] += 1
        except grpc.aio.AioRpcError as error:
            counts[error_from_rpc(error).reason] += 1


def _another_serves(processes: Processes, name: str) -> bool:
    return any(processes.serving(other) for other in processes.routers if other != name)


async def _break_and_repair(fault: ProcessFault, processes: Processes) -> None:
    match fault.kind:
        case FaultKind.FREEZE:
            processes.freeze(fault.target)
            try:
                await asyncio.sleep(fault.down_s)
            finally:
                processes.thaw(fault.target)
        case FaultKind.KILL:
            await processes.kill(fault.target)
            await asyncio.sleep(fault.down_s)
            await processes.begin(fault.target)
        case FaultKind.RESTART:
            await processes.terminate(fault.target)
            await processes.begin(fault.target)


async def _replay_decisions(processes: Processes, report: ChaosReport, file: Path) -> None:
    operator = processes.identities.operator
    async with open_channel(processes.endpoint("registry"), operator, REGISTRY_AUDIENCE) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        members = await all_members(stub, _CALL_S)
    with incident_writer(file) as write:
        for member in members:
            if member.role != registry_pb2.Member.ROLE_ROUTER:
                continue
            async with open_channel(member.endpoint, operator) as channel:
                incidents = incident_pb2_grpc.IncidentServiceStub(channel)
                request = incident_pb2.ListEventsRequest()
                async for part in incidents.ListEvents(request, timeout=_CALL_S):
                    part.member.CopyFrom(member)
                    write(part)
    command = (sys.executable, "-m", "headrace_simulator.incident", str(file))
    # The replay sets the clock of its process.
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=nothing)
    output, _ = await child.communicate()
    for name, kinds in json.loads(output).items():
        for kind, one in kinds.items():
            report.decisions[f"{kind}, compared"] += one["compared"]
            report.decisions[f"{kind}, differing"] += one["differing"]
            # On a busy machine, timers of the queue end beside other events, and later decisions move.
            if kind != "prefill queue" and one["differing"] > 0.01 * one["compared"]:
                report.differing.append(
                    f"{name} decides {one['differing']} times otherwise: {one['first']}"
                )


async def _repair(processes: Processes) -> None:
    """Waits until every process runs again."""
    for name in (ETCD, *processes.stores, "registry", *processes.routers, *processes.workers):
        await processes.settle(name)
        # One that was started a moment ago may not serve yet.
        await processes.begin(name)


async def left_behind(processes: Processes, timeout_s: float = QUIESCE_S) -> list[str]:
    """State that workers still hold after the time that they have to release it."""
    give_up_s = time.monotonic() + timeout_s
    left: dict[str, str] = {}
    while True:
        for name in sorted(set(processes.workers) - processes.hostile):
            # The kill timer of a sender that was frozen may have ended it after the repairs.
            if processes.killed(name):
                await processes.begin(name)
            try:
                held = _held(
                    await worker_status(processes.endpoint(name), processes.identities.operator)
                )
            except HeadraceError as error:
                held = f"does not answer: {error.detail}"
            left[name] = held or _held_below(processes, name)
        if not any(left.values()) or time.monotonic() > give_up_s:
            return [f"{name} {held}" for name, held in left.items() if held]
        await asyncio.sleep(0.2)


def _held(status: worker_pb2.WatchStatusResponse) -> str:
    held = {
        "running requests": status.running_requests,
        "waiting requests": status.waiting_requests,
        "reserved blocks": status.reserved_blocks,
        "blocks in quarantine": status.quarantined_blocks,
        "transfers": status.active_transfers,
        "blocks with requests' KV": status.used_blocks,
    }
    text = ", ".join(f"{count} {what}" for what, count in held.items() if count)
    return f"still holds {text}" if text else ""


def _held_below(processes: Processes, name: str) -> str:
    """Whether a worker's tiers hold blocks, for a load, a fetch or a store."""
    process_id = processes.process_ids().get(name, 0)
    file = held_file(processes.reports, process_id)
    count = int(file.read_text(encoding="utf-8") or 0) if file.exists() else 0
    return f"still holds blocks of lower tiers {count} times" if count else ""


async def _pool_processes(reports: Path, timeout_s: float) -> list[str]:
    """Processes of the pool that run on although all workers have ended, after the time that they have to end."""
    # The virtual machines of tests/rdma have neither a pool nor this.
    import psutil

    def is_of_pool(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return pool_process.MODULE in process.cmdline() and process.environ().get(
                "HEADRACE_CHAOS_REPORTS"
            ) == str(reports)
        return False

    give_up_s = time.monotonic() + timeout_s
    while found := [one.pid for one in psutil.process_iter() if is_of_pool(one)]:
        if time.monotonic() > give_up_s:
            return [f"process {process_id} of the pool still runs" for process_id in found]
        await asyncio.sleep(0.2)
    return []


def _read_reports(folder: Path, report: ChaosReport) -> None:
    for path in folder.glob("wire-*.json"):
        report.wire_faults.update(json.loads(path.read_text(encoding="utf-8") or "{}"))
    for path in (*folder.glob("tiers-*.json"), *folder.glob("pool-*.json")):
        report.tier_counts.update(json.loads(path.read_text(encoding="utf-8") or "{}"))
    for path in folder.glob("unconserved-*.txt"):
        report.unconserved += path.read_text(encoding="utf-8").splitlines()
    report.foreign_blocks = _foreign_blocks(folder)


def _foreign_blocks(folder: Path) -> int:
    """The number of free blocks that were written to."""
    lines = [
        line
        for path in folder.glob("foreign-*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
    ]
    # A worker may be writing the last line.
    return sum(len(json.loads(line)["blocks"]) for line in lines if line.endswith("\n"))
