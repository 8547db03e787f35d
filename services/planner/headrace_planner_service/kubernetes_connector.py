"""Follows the planner's targets, and has each carried out in Kubernetes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace_common.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    HeadraceError,
    WorkerGone,
)
from headrace_common.extras import require_extra
from headrace_planner.observation import PlannedRole, WorkerCounts, own_target
from headrace_planner_service.config import PlannerConfig, Workload, WorkloadState, parse_workload
from headrace_planner_service.steering import TargetBoard

if TYPE_CHECKING:
    from headrace_planner_service.kubernetes_client import KubernetesApi

_LOG: Final = logging.getLogger(__name__)


class WorkloadScaler:
    """Scales the workloads of both roles. It has no state: the Kubernetes API has the numbers."""

    def __init__(
        self,
        api: KubernetesApi,
        workloads: Mapping[PlannedRole, Workload],
        *,
        poll_s: float,
        timeout_s: float,
    ) -> None:
        """`timeout_s` bounds each step: the drain of removed workers, and the start of added ones."""
        self._api = api
        self._workloads = workloads
        self._poll_s, self._timeout_s = poll_s, timeout_s

    async def apply(self, current: WorkerCounts, wanted: WorkerCounts) -> None:
        """Returns when the wanted workers serve and all removed ones have ended.

        Removals come first, because an added worker may need their devices. Pods that are removed drain by SIGTERM.
        Raises as `own_target` does, and DeadlineExceeded where added workers do not serve in time. Their number is then
        as before, so that they hold no devices.
        """
        states = {role: await self._api.read(found) for role, found in self._workloads.items()}
        given = WorkerCounts(states[PlannedRole.PREFILL].wanted, states[PlannedRole.DECODE].wanted)
        if wanted.both:
            raise Conflict("no workload has workers of both roles: scale them by their own means")
        wanted = own_target(given, current, wanted)
        removed = [role for role in PlannedRole if wanted.of(role) < given.of(role)]
        added = [role for role in PlannedRole if wanted.of(role) > given.of(role)]
        for role in removed:
            await self._scale(role, wanted.of(role), given.of(role))
        await self._wait(removed, lambda state: state.has_removed, "removed workers did not end")
        for role in added:
            await self._scale(role, wanted.of(role), given.of(role))
        # A repeated target changes no number and waits for all.
        waiting = added if given != wanted else list(self._workloads)
        try:
            await self._wait(waiting, lambda state: state.serves, "added workers do not serve")
        except DeadlineExceeded:
            for role in added:
                await self._scale(role, given.of(role), wanted.of(role))
            raise

    async def _scale(self, role: PlannedRole, count: int, expected: int) -> None:
        _LOG.info("%s: %d -> %d", self._workloads[role], expected, count)
        await self._api.scale(self._workloads[role], count, expected)

    async def _wait(
        self, roles: Collection[PlannedRole], done: Callable[[WorkloadState], bool], failure: str
    ) -> None:
        """Returns when `done` holds for all roles. Raises DeadlineExceeded."""
        texts: dict[PlannedRole, str] = {}
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                for role in roles:
                    while (text := await self._problem(role, done)) != "":
                        texts[role] = text
                        await asyncio.sleep(self._poll_s)
                    texts.pop(role, None)
        except TimeoutError:
            if not limit.expired():
                raise
            detail = "; ".join(texts.values())
            raise DeadlineExceeded(f"{failure} within {self._timeout_s:g} s: {detail}") from None

    async def _problem(self, role: PlannedRole, done: Callable[[WorkloadState], bool]) -> str:
        """What is missing; empty when `done` holds. An API that does not answer may do so later."""
        workload = self._workloads[role]
        try:
            state = await self._api.read(workload)
        except WorkerGone as error:
            return error.detail
        if done(state):
            return ""
        return f"{workload} has {state.existing} pods, {state.ready} ready, of {state.wanted}"


_FAILURE_CHARACTERS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class KubernetesConnector:
    """Carries out one target after the other, and acknowledges each.

    `acknowledge` gets the target's id, and why it failed.
    """

    board: TargetBoard
    scaler: WorkloadScaler
    acknowledge: Callable[[str, str], object]

    async def run(self) -> None:
        """Never returns. A cancellation leaves the numbers of workers as they are."""
        seen_id = ""
        while True:
            target = await self.board.wait_other(seen_id)
            seen_id = target.id
            failure = ""
            try:
                await self.scaler.apply(target.current, target.counts)
            except HeadraceError as error:
                failure = error.detail[:_FAILURE_CHARACTERS_MAX]
                _LOG.warning("target %s failed: %s", target.id, failure)
            self.acknowledge(target.id, failure)


@asynccontextmanager
async def open_scaler(config: PlannerConfig) -> AsyncIterator[WorkloadScaler]:
    """The scaler that the settings describe. Raises ConfigError when Kubernetes refuses to show the workloads."""
    require_extra("mode kubernetes", "kubernetes")
    from headrace_planner_service.kubernetes_client import KubernetesApi

    workloads = {
        PlannedRole.PREFILL: parse_workload(config.kubernetes_prefill),
        PlannedRole.DECODE: parse_workload(config.kubernetes_decode),
    }
    api = KubernetesApi(config.kubeconfig, config.kubernetes_namespace)
    try:
        for workload in workloads.values():
            try:
                await api.read(workload)
            except HeadraceError as error:
                raise ConfigError(
                    f"{error.detail}; kubernetes_prefill and kubernetes_decode name workloads that this planner may "
                    "scale"
                ) from error
        yield WorkloadScaler(
            api, workloads, poll_s=config.kubernetes_poll_s, timeout_s=config.change_timeout_s
        )
    finally:
        await api.close()
