"""Chooses the halves of the connector: for an engine of Headrace's services, or for a stock vLLM server."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace_common.errors import HeadraceError
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.tier_planner import plan_tiers
from headrace_engine.vllm import continuation, stages
from headrace_engine.vllm.compat import extra_config, replica_count, steps_under_way
from headrace_engine.vllm.link.messages import write_startup_error
from headrace_engine.vllm.rank.connector_worker import ConnectorWorker
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler
from headrace_engine.vllm.scheduler.service_scheduler import ServiceConnectorScheduler
from headrace_engine.vllm.settings import ConnectorSettings
from headrace_engine.vllm.standalone.connector_scheduler import StandaloneConnectorScheduler
from headrace_engine.vllm.standalone.settings import StandaloneSettings, standalone_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


PACKAGES = ("headrace_common", "headrace_engine", "headrace_kv")


def join_vllm_log() -> None:
    """Sends the log records of our packages to vLLM's handlers, at vLLM's level."""
    vllm_log = logging.getLogger("vllm")
    for name in PACKAGES:
        ours = logging.getLogger(name)
        ours.setLevel(vllm_log.getEffectiveLevel())
        for handler in vllm_log.handlers:
            if handler not in ours.handlers:
                ours.addHandler(handler)
                ours.propagate = False


class Deployment(Protocol):
    """The environment that vLLM runs in."""

    @property
    def settings(self) -> ConnectorSettings: ...

    def open_scheduler(
        self, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> ConnectorScheduler:
        """The scheduler's half. Raises ConfigError or InternalError."""

    def open_worker(
        self, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> ConnectorWorker:
        """The half of this rank."""

    def report_startup_error(self, error: HeadraceError) -> None:
        """The connector cannot start."""


@dataclass(frozen=True, slots=True)
class ServiceDeployment:
    """vLLM is the engine of a prefill or decode service, which the link at `settings.link_path` leads to."""

    settings: ConnectorSettings

    def open_scheduler(
        self, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> ConnectorScheduler:
        continuation.install_grammar_ends()
        return ServiceConnectorScheduler(
            groups,
            Path(self.settings.link_path),
            plan_tiers(
                self.settings.tiers,
                groups,
                stages.rank_count(vllm_config),
                sends_from_host=self.settings.sends_from_host,
            ),
            self.settings,
            steps_under_way(vllm_config),
            in_lockstep=replica_count(vllm_config) > 1,
        )

    def open_worker(
        self, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> ConnectorWorker:
        continuation.install(vllm_config)
        stages.install(vllm_config)
        return ConnectorWorker(self.settings, vllm_config, groups)

    def report_startup_error(self, error: HeadraceError) -> None:
        """Stores the error for the service, which raises it."""
        write_startup_error(Path(self.settings.link_path), error)


@dataclass(frozen=True, slots=True)
class StandaloneDeployment:
    """vLLM is a server of its own. Its clients name the peer in each request."""

    settings: ConnectorSettings
    standalone: StandaloneSettings

    def open_scheduler(
        self, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> ConnectorScheduler:
        return StandaloneConnectorScheduler(
            groups,
            self.settings,
            self.standalone,
            stages.rank_count(vllm_config),
            steps_under_way(vllm_config),
        )

    def open_worker(
        self, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> ConnectorWorker:
        """Without `continuation`: a client of a stock server sets the arguments of its requests itself."""
        return ConnectorWorker(self.settings, vllm_config, groups)

    def report_startup_error(self, error: HeadraceError) -> None:
        """Does nothing: vLLM logs the error that the connector raises."""


def deployment_of(vllm_config: VllmConfig) -> Deployment:
    """The same for the scheduler's connector and each rank's. Raises ConfigError."""
    extra = extra_config(vllm_config)
    if "link_path" in extra:
        return ServiceDeployment(ConnectorSettings.from_extra_config(extra))
    deployment = StandaloneDeployment(*standalone_settings(vllm_config))
    join_vllm_log()
    return deployment
