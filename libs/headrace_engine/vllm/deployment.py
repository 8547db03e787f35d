"""Chooses the halves of the connector: for an engine of Headrace's services, or for a stock vLLM server."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_common.errors import HeadraceError
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.tier_planner import plan_tiers
from headrace_engine.vllm import continuation, grammar_costs, parallel
from headrace_engine.vllm.compat import (
    extra_config,
    keep_images,
    replica_count,
    steps_under_way,
)
from headrace_engine.vllm.link.messages import write_startup_error
from headrace_engine.vllm.rank.connector_worker import ConnectorWorker
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler, Peers
from headrace_engine.vllm.scheduler.linked_peers import LinkedPeers
from headrace_engine.vllm.settings import ConnectorSettings
from headrace_engine.vllm.standalone.node import StandaloneNode
from headrace_engine.vllm.standalone.pair_scheduler import PairScheduler
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


@dataclass(frozen=True, slots=True)
class ConnectorDeployment:
    """The environment that vLLM runs in.

    Without `standalone`, vLLM is the engine of a prefill or decode service, which the link at `settings.link_path`
    leads to. With it, vLLM is a server of its own. Its clients name the peer in each request, and set the arguments of
    their requests themselves, so that none of them adds generated tokens.
    """

    settings: ConnectorSettings
    standalone: StandaloneSettings | None = None

    def open_scheduler(
        self, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> ConnectorScheduler:
        """The scheduler's half. Raises ConfigError or InternalError."""
        ranks, role = parallel.rank_count(vllm_config), self.settings.role
        tiers = plan_tiers(
            self.settings.tiers, groups, ranks, sends_from_host=self.settings.sends_from_host
        )
        keep_images()
        peers: Peers
        if self.standalone is None:
            grammar_costs.install()
            peers = LinkedPeers(groups, self.settings, tiers)
        else:
            peers = PairScheduler(
                StandaloneNode(self.settings, self.standalone, ranks),
                can_send=role != "decode",
                can_receive=role != "prefill",
                timeout_s=self.standalone.transfer_timeout_s,
                kv_hold_timeout_s=self.standalone.kv_hold_timeout_s,
            )
        return ConnectorScheduler(
            groups,
            peers,
            tiers,
            steps_under_way(vllm_config),
            in_lockstep=replica_count(vllm_config) > 1,
        )

    def open_worker(
        self, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> ConnectorWorker:
        """The half of this rank."""
        if self.standalone is None:
            continuation.install(vllm_config)
            parallel.install(vllm_config)
        return ConnectorWorker(self.settings, vllm_config, groups)

    def report_startup_error(self, error: HeadraceError) -> None:
        """Stores the error for the service, which raises it. vLLM logs that of a server of its own."""
        if self.standalone is None:
            write_startup_error(Path(self.settings.link_path), error)


def deployment_of(vllm_config: VllmConfig) -> ConnectorDeployment:
    """The same for the scheduler's connector and each rank's. Raises ConfigError."""
    extra = extra_config(vllm_config)
    if "link_path" in extra:
        return ConnectorDeployment(ConnectorSettings.from_extra_config(extra))
    deployment = ConnectorDeployment(*standalone_settings(vllm_config))
    join_vllm_log()
    return deployment
