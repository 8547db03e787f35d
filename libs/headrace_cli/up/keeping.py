"""`headrace up`: keeps a deployment, starts ended processes again, and follows its planner."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import grpc.aio
from rich.console import Console

from headrace.planner.v1 import planner_pb2, planner_pb2_grpc
from headrace_cli.client import (
    CALL_TIMEOUT_S,
    call_channel,
    counts_from_proto,
    list_members,
    rpc_errors,
)
from headrace_cli.state import ADD_ANSWER, ADD_FAILED, ADD_REQUEST, default_folder
from headrace_cli.up.deployment import Deployment, Signals, deployed, ready_text
from headrace_cli.up.supervisor import Child, Supervisor, end_text, log_line, unexpected_end
from headrace_cli.up.topology import (
    SIM_PROCESSES,
    WORKER_SERVICES,
    ProcessSpec,
    Topology,
    shares_processes,
    worker_spec,
)
from headrace_common.config import ServiceConfig
from headrace_common.errors import Cancelled, ConfigError, HeadraceError
from headrace_common.rpc.server import DRAIN_OVERRUN_MAX_S
from headrace_common.tasks import run_together
from headrace_kv.compatibility import pair_faults_of
from headrace_planner.observation import WorkerCounts, own_target

RESTARTED: Final = (*WORKER_SERVICES, "pool", "planner")
"""Services that others do not need to serve: without the pool, workers compute what it would have had."""
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A worker is started again after `first_delay_s`. Each further delay is twice as long, up to `delay_max_s`.

    After `count_max` restarts of a worker within `window_s`, its next end is final: all others end, unless it
    `gives_up` that worker alone. Without restarts, all others end in any case.
    """

    gives_up: bool = False
    count_max: int = 5
    first_delay_s: float = 1.0
    delay_max_s: float = 30.0
    window_s: float = 600.0

    def delay_s(self, number: int) -> float:
        """The delay before a worker's restart with this number, from 1."""
        return min(self.delay_max_s, self.first_delay_s * 2.0 ** (number - 1))


NO_RESTARTS: Final = RestartPolicy(count_max=0)


@dataclass(slots=True)
class _Worker:
    """A worker that has ended at least once. `due_s`: when it starts again. `starting`: its new process."""

    started_s: list[float] = field(default_factory=list)
    due_s: float | None = None
    ended: Child | None = None
    starting: Child | None = None

    def schedule(self, ended: Child, due_s: float) -> None:
        """Records an end, and when the worker starts again."""
        self.ended, self.due_s, self.starting = ended, due_s, None

    def started(self, child: Child, now_s: float) -> None:
        """Records a restart."""
        self.due_s, self.starting = None, child
        self.started_s.append(now_s)

    def forget_before(self, oldest_s: float) -> None:
        """Restarts before this time no longer count."""
        self.started_s = [at_s for at_s in self.started_s if at_s >= oldest_s]

    def served(self) -> None:
        """The new process serves."""
        self.starting = None


@dataclass(eq=False, slots=True)
class Restarts:
    """Starts workers of a supervisor again, and reports it on the console and in the worker's log."""

    supervisor: Supervisor
    console: Console
    policy: RestartPolicy
    clock: Callable[[], float] = time.monotonic
    _workers: dict[str, _Worker] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Runs until a process ends that is not started again. Then raises as Supervisor.check does."""
        while True:
            await self.step()
            await asyncio.sleep(_POLL_S)

    async def step(self) -> None:
        """Looks at all processes once."""
        for child in self.supervisor.unexpected_ends():
            self._ended(child)
        for worker in self._workers.values():
            if (
                worker.ended is not None
                and worker.due_s is not None
                and self.clock() >= worker.due_s
            ):
                worker.started(await self.supervisor.restart(worker.ended), self.clock())
            elif worker.starting is not None and worker.starting.read_port_file():
                child = worker.starting
                self._report(child, f"{child.spec.name} serves again on {child.endpoint}")
                worker.served()

    def _ended(self, child: Child) -> None:
        name, now_s = child.spec.name, self.clock()
        worker = self._workers.setdefault(name, _Worker())
        worker.forget_before(now_s - self.policy.window_s)
        number = len(worker.started_s) + 1
        final = number > self.policy.count_max
        gives_up = self.policy.gives_up and self.policy.count_max > 0
        if final and gives_up and child.spec.service in WORKER_SERVICES:
            child.mark_stopping()
            child.mark_replaced()
            self._report(child, f"{end_text(child)}, too often: it does not start again")
            return
        if final or child.spec.service not in RESTARTED:
            raise unexpected_end(child)
        delay_s = self.policy.delay_s(number)
        worker.schedule(child, now_s + delay_s)
        child.mark_replaced()
        self._report(
            child,
            f"{end_text(child)}; it starts again in {delay_s:g} s (restart {number} of {self.policy.count_max})",
        )

    def _report(self, child: Child, text: str) -> None:
        log_line(child.spec.log_file, text)
        self.console.print(text, markup=False)


START_TIMEOUT_S: Final = 600.0
"""Limit of a worker's start: engines load models for minutes."""

MakeSpec = Callable[[str, str], ProcessSpec]
"""A worker, by service and name."""


@dataclass(frozen=True, slots=True)
class Scaler:
    """Adds and removes workers of a supervisor, and has no state of its own.

    `drain_timeout_s` returns the limit of a drain, by service.
    """

    supervisor: Supervisor
    make_spec: MakeSpec
    console: Console
    drain_timeout_s: Callable[[str], float]
    start_timeout_s: float = START_TIMEOUT_S

    def counts(self) -> WorkerCounts:
        """The workers that run or start again."""
        return WorkerCounts(*(len(self._workers(service)) for service in WORKER_SERVICES))

    async def apply(self, target: WorkerCounts) -> None:
        """Returns when that many workers run: all that were added serve, and all that were removed have ended.

        Removals come first, because an added worker may need their devices. Raises HeadraceError for the first worker
        that could not be started or did not drain, after all others.
        """
        counts = (target.prefill, target.decode, target.both)
        wanted = dict(zip(WORKER_SERVICES, counts, strict=True))
        workers = {role: self._workers(role) for role in WORKER_SERVICES}
        # A worker that has ended is started again by its name, and cannot be drained.
        surplus = [
            one for role in WORKER_SERVICES for one in workers[role][wanted[role] :] if one.running
        ]
        await self._all([self._drain(child) for child in surplus])
        added: list[Coroutine[Any, Any, Child]] = []
        for role in WORKER_SERVICES:
            missing = max(0, wanted[role] - len(workers[role]))
            added += [
                self.add(role, name, "the planner") for name in islice(self._free(role), missing)
            ]
        await self._all(added)

    def free_name(self, role: str) -> str:
        """A name for one more worker of a role."""
        return next(self._free(role))

    def _free(self, role: str) -> Iterator[str]:
        taken = {child.spec.name for one in WORKER_SERVICES for child in self._workers(one)}
        taken |= {child.spec.name for child in self.supervisor.children if child.running}
        return (name for name in map(f"{role}-{{}}".format, count()) if name not in taken)

    def _workers(self, role: str) -> list[Child]:
        """The workers of a role, those with the highest numbers last. Those that start again count too."""
        found = [
            child
            for child in self.supervisor.children
            if child.spec.service == role and not child.stopping
        ]
        return sorted(found, key=lambda child: (child.running, _number(child.spec.name)))

    async def _drain(self, child: Child) -> None:
        self.console.print(f"the planner removes {child.spec.name}", markup=False)
        await self.supervisor.drain(child, self.drain_timeout_s(child.spec.service))

    async def add(self, role: str, name: str, caller: str) -> Child:
        """Starts a worker and waits until it serves. Raises as Supervisor.add does. `caller` is shown."""
        self.console.print(f"{caller} adds {name}", markup=False)
        # An earlier worker may have had the name.
        spec = replace(self.make_spec(role, name), keeps_log=True)
        child = await self.supervisor.add(spec, self.start_timeout_s)
        self.console.print(f"{name} serves on {child.endpoint}", markup=False)
        return child

    async def _all(self, work: Sequence[Coroutine[Any, Any, object]]) -> None:
        """Raises the first HeadraceError when all have ended, and any other error."""
        results = await asyncio.gather(*work, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in sorted(failures, key=lambda one: isinstance(one, HeadraceError)):
            raise failure


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


_LOG = logging.getLogger(__name__)
_RETRY_S: Final = 0.2
_FAILURE_CHARACTERS_MAX: Final = 1_000


class TargetFollower:
    """Applies each target of the planner at `planner`, and acknowledges it.

    A planner that is lost and returns publishes targets of its own, decided from the workers that run then.
    """

    def __init__(self, planner: str, scaler: Scaler, console: Console) -> None:
        self._planner = planner
        self._scaler = scaler
        self._console = console
        self._applied_id = ""

    async def run(self) -> None:
        """Never returns. While the planner does not answer, the numbers of workers stay."""
        while True:
            async with call_channel(self._planner) as channel:
                try:
                    with rpc_errors(f"the planner on {self._planner}"):
                        await self._follow(planner_pb2_grpc.PlannerServiceStub(channel))
                except HeadraceError as error:
                    # The supervisor reports the end of the planner's process.
                    _LOG.debug("the targets are not watched: %s", error.detail)
            await asyncio.sleep(_RETRY_S)

    async def _follow(self, stub: planner_pb2_grpc.PlannerServiceAsyncStub) -> None:
        """Raises AioRpcError when the stream ends."""
        async for response in stub.WatchTargets(planner_pb2.WatchTargetsRequest()):
            failure = ""
            try:
                await self._apply(response.target)
            except HeadraceError as error:
                failure = error.detail
                self._console.print(f"the planner's target failed: {failure}", markup=False)
            await self._acknowledge(stub, response.target.id, failure)

    async def _apply(self, target: planner_pb2.Target) -> None:
        """Raises as `own_target` and the scaler do. A target comes again after a lost connection."""
        if target.id == self._applied_id:
            return
        wanted, observed = map(counts_from_proto, (target.workers, target.current))
        await self._scaler.apply(own_target(self._scaler.counts(), observed, wanted))
        self._applied_id = target.id

    async def _acknowledge(
        self, stub: planner_pb2_grpc.PlannerServiceAsyncStub, target_id: str, failure: str
    ) -> None:
        """A planner that has started again since does not have the target: nothing is lost then."""
        request = planner_pb2.AcknowledgeTargetRequest(
            target_id=target_id, failure=failure[:_FAILURE_CHARACTERS_MAX]
        )
        try:
            await stub.AcknowledgeTarget(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Adds the workers that `headrace add` asks for, one after the other. `folder`: that of the deployment's state."""

    folder: Path
    topology: Topology
    scaler: Scaler

    async def run(self) -> None:
        """Never returns."""
        while True:
            for request in self.folder.glob(f"*{ADD_REQUEST}"):
                role = request.read_text(encoding="utf-8")
                request.unlink()
                try:
                    answer = await self._add(role)
                except HeadraceError as error:
                    answer = f"{ADD_FAILED}{error.detail}"
                complete = request.with_suffix(".part")
                complete.write_text(answer, encoding="utf-8")
                complete.rename(request.with_suffix(ADD_ANSWER))
            await asyncio.sleep(_POLL_S)

    async def _add(self, role: str) -> str:
        if shares_processes(self.topology, role):
            raise ConfigError(
                f"the workers of {role} share a process: start with {SIM_PROCESSES} of them at most"
            )
        name = self.scaler.free_name(role)
        child = await self.scaler.add(role, name, "headrace add")
        return f"{name} serves on {child.endpoint}"


# After its last request a process still stops its engine.
_ENGINE_STOP_S: Final = 10.0


async def run_up(topology: Topology, folder: Path | None, console: Console) -> None:
    """Serves until SIGINT or SIGTERM. Raises as Supervisor.check does when a process has ended for good."""
    with Signals() as signals:
        async with deployed(topology, folder, console, signals) as deployment:
            console.print(ready_text(topology, deployment))
            for fault in pair_faults_of(await list_members(deployment.registry)):
                console.print(str(fault), style="yellow", markup=False)
            with suppress(Cancelled):
                await signals.unless_stopped(keep(topology, deployment, console))
            console.print("stopping")


async def keep(
    topology: Topology,
    deployment: Deployment,
    console: Console,
    policy: RestartPolicy = RestartPolicy(),
) -> None:
    """Runs until a process ends for good. Then raises as Supervisor.check does."""
    # A planner replaces what is given up.
    policy = replace(policy, gives_up=bool(deployment.planner))
    work: list[Coroutine[Any, Any, None]] = [Restarts(deployment.supervisor, console, policy).run()]
    scaler = new_scaler(topology, deployment, console)
    work.append(AddRequests(default_folder(topology.port), topology, scaler).run())
    if deployment.planner:
        work.append(TargetFollower(deployment.planner, scaler, console).run())
    await run_together(work)


def new_scaler(topology: Topology, deployment: Deployment, console: Console) -> Scaler:
    """The scaler of a deployment's workers."""
    addresses = (deployment.registry, deployment.pool)
    return Scaler(
        deployment.supervisor,
        partial(worker_spec, topology, deployment.folder, addresses),
        console,
        partial(drain_timeout_s, topology),
    )


def drain_timeout_s(topology: Topology, service: str) -> float:
    """How long a worker may take from SIGTERM to its end."""
    grace_s = ServiceConfig.model_fields["drain_grace_s"].default
    for target, setting, value in topology.settings:
        if (target, setting) == (service, "drain_grace_s"):
            grace_s = float(value)
    return float(grace_s) + DRAIN_OVERRUN_MAX_S + _ENGINE_STOP_S
