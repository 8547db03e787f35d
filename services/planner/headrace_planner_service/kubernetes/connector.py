"""Follows the planner's targets, and has each carried out in Kubernetes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from headrace_common.errors import ConfigError, HeadraceError
from headrace_common.extras import require_extra
from headrace_planner.observation import PlannedRole
from headrace_planner_service.config import PlannerConfig
from headrace_planner_service.kubernetes.scaler import ScaleLimits, WorkloadScaler
from headrace_planner_service.targets import TargetBoard
from headrace_planner_service.workloads import parse_workload

_LOG: Final = logging.getLogger(__name__)
_FAILURE_CHARACTERS_MAX: Final = 1_000


class KubernetesConnector:
    """Carries out one target after the other, and acknowledges each."""

    def __init__(
        self,
        board: TargetBoard,
        scaler: WorkloadScaler,
        acknowledge: Callable[[str, str], object],
    ) -> None:
        """`acknowledge` gets the target's id, and why it failed."""
        self._board = board
        self._scaler = scaler
        self._acknowledge = acknowledge

    async def run(self) -> None:
        """Never returns. A cancellation leaves the numbers of workers as they are."""
        seen_id = ""
        while True:
            target = await self._board.wait_other(seen_id)
            seen_id = target.id
            failure = ""
            try:
                await self._scaler.apply(target.current, target.counts)
            except HeadraceError as error:
                failure = error.detail[:_FAILURE_CHARACTERS_MAX]
                _LOG.warning("target %s failed: %s", target.id, failure)
            self._acknowledge(target.id, failure)


@asynccontextmanager
async def open_scaler(config: PlannerConfig) -> AsyncIterator[WorkloadScaler]:
    """The scaler that the settings describe. Raises ConfigError when Kubernetes refuses to show the workloads."""
    require_extra("mode kubernetes", "kubernetes")
    from headrace_planner_service.kubernetes.client import KubernetesApi

    workloads = {
        PlannedRole.PREFILL: parse_workload(config.kubernetes_prefill),
        PlannedRole.DECODE: parse_workload(config.kubernetes_decode),
    }
    limits = ScaleLimits(config.kubernetes_poll_s, config.change_timeout_s)
    api = KubernetesApi(
        config.kubeconfig, config.kubernetes_namespace, config.kubernetes_call_timeout_s
    )
    try:
        for workload in workloads.values():
            try:
                await api.read(workload)
            except HeadraceError as error:
                raise ConfigError(
                    f"{error.detail}; kubernetes_prefill and kubernetes_decode name workloads that this planner may "
                    "scale"
                ) from error
        yield WorkloadScaler(api, workloads, limits)
    finally:
        await api.close()
