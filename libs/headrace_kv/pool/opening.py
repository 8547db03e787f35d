"""Opens the remote pool that a worker's settings name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from headrace_kv.manager.settings import TierSettings
from headrace_kv.pool.memory import PoolMemory
from headrace_kv.pool.messages import PoolSetup
from headrace_kv.pool.remote import RemotePool
from headrace_kv.transport.mooncake.transport import protocol_environment
from headrace_kv.transport.networks import Networks

PoolOpener: TypeAlias = Callable[[Sequence[PoolMemory], bytes, Callable[[], None]], RemotePool]
"""Opens a pool over the memories of all ranks of a process, with the pool's secret, and a callback for its losses."""


def pool_opener(
    settings: TierSettings,
    host: str,
    rdma_devices: Sequence[str] = (),
    admitted: Networks | None = None,
) -> PoolOpener:
    """Opens the store at `settings.pool_address`. `host` is this worker's address."""

    def open_pool(
        memories: Sequence[PoolMemory], secret: bytes, on_lost: Callable[[], None]
    ) -> RemotePool:
        protocol, _ = protocol_environment("auto")
        callers: tuple[str, ...] | None = ()
        if protocol == "rdma":
            # Peers connect back, unlike over TCP.
            callers = None if admitted is None else tuple(map(str, admitted))
        setup = PoolSetup(
            master=settings.pool_address,
            host=host,
            secret=secret,
            memories=tuple(memories),
            protocol=protocol,
            rdma_devices=",".join(rdma_devices),
            admitted=callers,
        )
        return RemotePool(setup, on_lost)

    return open_pool
