"""The decode worker's process."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from headrace.decode.v1 import decode_pb2_grpc
from headrace.kv.v1 import prefix_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.access.roles import Role
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.extras import require_extra
from headrace_common.limits import message_bytes_max
from headrace_common.process.run import run_service
from headrace_common.process.settings import load_config
from headrace_common.telemetry.setup import Telemetry
from headrace_common.tickets import TicketKeys
from headrace_decode.admission import BlockAdmission, Capacity
from headrace_decode.attempts import Attempts
from headrace_decode.canary import Canary, Comparison
from headrace_decode.config import DecodeConfig
from headrace_decode.prefix_service import PrefixServicer
from headrace_decode.service import DecodeService
from headrace_decode.spans import record_comparison
from headrace_engine.interface import Engine
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.process import run_workers
from headrace_engine.worker.receiving import KvReceiving
from headrace_engine.worker.serve import RoleServer
from headrace_engine.worker.status import StatusSignal
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.transport.memory import WORD_BYTES

if TYPE_CHECKING:
    from headrace_decode.http.door import HttpDoor

PROG = "headrace-decode"
# Engines keep one block for themselves: vLLM's null block.
ENGINE_OWN_BLOCKS = 1
QUIESCE_WAIT_S = 1.0
# Routers need a moment to notice that the worker drains. Until then their requests are accepted.
DRAIN_NOTICE_S = 0.3


def main() -> None:
    """Runs until SIGTERM."""
    load = partial(load_http_config, DecodeConfig, PROG, "HEADRACE_DECODE_", "a decode worker")
    run_service(PROG, lambda: run_workers("decode", load(), DecodeServer))


_Config = TypeVar("_Config", bound=DecodeConfig)


def load_http_config(kind: type[_Config], prog: str, env_prefix: str, what: str) -> _Config:
    """Raises ConfigError, also when a package for HTTP is not installed: before the engine loads a model.

    `what` names the worker in that error.
    """
    config = load_config(kind, None, prog=prog, env_prefix=env_prefix)
    if config.http_listen:
        require_extra(f"http_listen of {what}", "http")
    return config


class DecodeServer(RoleServer):
    """Serves requests of routers, those of gateways over HTTP, and the handoff streams of prefill ranks."""

    role = registry_pb2.Member.ROLE_DECODE
    services = (
        "headrace.decode.v1.DecodeService",
        "headrace.kv.v1.HandoffService",
        "headrace.kv.v1.PrefixService",
    )
    reserves_blocks = True

    def __init__(
        self,
        host: WorkerHost,
        hosted: HostedWorker[DecodeConfig],
    ) -> None:
        """Raises ConfigError when the settings do not fit the engine."""
        config, ref, engine = hosted.config, hosted.ref, hosted.engine
        self.descriptor = engine.descriptor
        self._engine = engine
        self.ticket_keys = keys = TicketKeys()
        self.status_signal = StatusSignal()
        signal = self.status_signal
        self.message_bytes_max = message_bytes_max(engine.max_model_len)
        self._drain_grace_s = config.drain_grace_s
        self._checks = checks = _digest_checks(config, engine)
        telemetry = host.telemetry.for_worker(ref.worker_id)
        self._canary = canary = self._new_canary(host, hosted, telemetry)
        self.receiving = KvReceiving(
            host,
            hosted,
            keys,
            # A decode worker sends the KV of answers that move here.
            senders=(Role.PREFILL, Role.DECODE),
            checks=checks,
        )
        self.incoming = receiver = self.receiving.receiver
        if canary is not None:
            receiver.add_tracker(canary.corrupt_senders)
        self.capacity = capacity = self.own_capacity(_capacity(config, engine))
        self._attempts = Attempts(
            ref=ref,
            engine=engine,
            receiver=receiver,
            admission=BlockAdmission(capacity, on_admitted=signal.notify),
            telemetry=telemetry,
            ticket_keys=keys,
        )
        self._service = DecodeService(self._attempts, config.default_deadline_s)
        if canary is not None:
            canary.watch(self._is_idle, receiver.lease_holders)
            self._attempts.notify(canary.attempt_arrived, canary.attempt_closed)
        self._prefixes = PrefixServicer(
            engine, self._attempts, self.receiving.tickets, host.prefill_endpoint
        )
        self._door = self._new_door(host, hosted, capacity)
        self.on_routers = self.routers_changed

    def own_capacity(self, capacity: Capacity) -> Capacity:
        """What its own requests may use of the engine."""
        return capacity

    def routers_changed(self, routers: list[registry_pb2.Member]) -> None:
        """Called with the live routers."""
        if self._door is not None:
            self._door.prefills.update(routers)

    def _is_idle(self) -> bool:
        usage = self._engine.usage()
        return self._attempts.idle and not (usage.running_requests + usage.waiting_requests)

    def _new_canary(
        self, host: WorkerHost, hosted: HostedWorker[DecodeConfig], telemetry: Telemetry
    ) -> Canary | None:
        interval_requests = hosted.config.canary_interval_requests
        if not interval_requests or not hosted.engine.compares_blocks:
            return None

        def on_compared(comparison: Comparison) -> None:
            record_comparison(telemetry, comparison)
            difference = comparison.difference
            host.metrics.blocks_compared(
                hosted.ref.worker_id,
                comparison.prefill.worker_id,
                comparison.outcome,
                *(() if difference is None else (difference.layer, difference.head)),
            )
            if comparison.quarantined:
                self.status_signal.notify()

        return Canary(
            hosted.engine, interval_requests, on_compared=on_compared, checks=self._checks
        )

    def _new_door(
        self, host: WorkerHost, hosted: HostedWorker[DecodeConfig], capacity: Capacity
    ) -> HttpDoor | None:
        if not hosted.config.http_listen:
            return None
        # The packages for HTTP belong to an extra of their own.
        from headrace_decode.http.door import HttpDoor

        return HttpDoor(host, hosted, self._attempts, capacity)

    async def start_http(self) -> str:
        return "" if self._door is None else await self._door.start()

    def set_prefix_hash_key(self, key: int) -> None:
        if self._door is not None:
            self._door.set_prefix_hash_key(key)

    def add_servicers(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self._service, server)
        self.receiving.add_servicer(server)
        prefix_pb2_grpc.add_PrefixServiceServicer_to_server(self._prefixes, server)

    def status(self) -> worker_pb2.WatchStatusResponse:
        return self._attempts.status()

    def start_drain(self, deadline: Deadline) -> None:
        self._attempts.start_drain(min(DRAIN_NOTICE_S, deadline.remaining_s()))
        if self._door is not None:
            self._door.start_drain()

    async def finish_drain(self, deadline: Deadline) -> None:
        await self._service.finish_drain(deadline)
        if self._door is not None:
            await self._door.drain(deadline)
        # Quarantined blocks end with the process. Only ranks that are about to quiesce are waited for.
        await self.receiving.receiver.drain(min(QUIESCE_WAIT_S, self._drain_grace_s))

    async def close(self) -> None:
        if self._canary is not None:
            await self._canary.close()
        await self.receiving.close()
        if self._door is not None:
            await self._door.stop()
        if self._checks is not None:
            # The engine's memory, which the checks read, is freed next.
            await asyncio.to_thread(self._checks.close)


def _digest_checks(config: DecodeConfig, engine: Engine) -> DigestChecks | None:
    if config.digest == "off":
        return None
    checks = partial(DigestChecks, engine.descriptor, config.digest)
    if len(engine.landed_memories) == len(engine.descriptor.ranks):
        return checks(memory_of=engine.landed_memories.__getitem__)
    sums = engine.landed_sums
    parts = [part for group in engine.descriptor.layout.groups for part in group.parts]
    if not sums or any(part.unit_bytes % WORD_BYTES for part in parts):
        raise ConfigError(
            f'digest is "{config.digest}", but the engine cannot sum its KV memory, which is on a device and may have '
            f'units of other sizes than {WORD_BYTES} bytes: set digest to "off"'
        )
    return checks(memory_of=sums.__getitem__, word_sums=True)


def _capacity(config: DecodeConfig, engine: Engine) -> Capacity:
    first, *others = engine.descriptor.layout.groups
    return Capacity(
        usable_blocks=engine.descriptor.ranks[0].block_count - ENGINE_OWN_BLOCKS,
        # A state is one block, however long the context.
        block_tokens=first.block_tokens or engine.max_model_len,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.max_num_seqs,
        windows=tuple(group for group in others if group.is_windowed),
    )
