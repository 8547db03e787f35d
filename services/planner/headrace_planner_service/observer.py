"""Gathers the load of one model from its routers and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from headrace.inference.v1 import load_pb2, load_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import RegistryUnavailable, WorkerGone
from headrace_common.rpc.status import error_from_rpc
from headrace_planner.observation import LoadSample
from headrace_planner_service.sampling import DecodeReading, Totals, load_sample
from headrace_planner_service.worker_status import OpenChannel, WorkerStatus, status_interval_s

_CALL_TIMEOUT_S: Final = 2.0
_WORKERS: Final = (registry_pb2.Member.ROLE_PREFILL, registry_pb2.Member.ROLE_DECODE)


@dataclass(frozen=True, slots=True)
class Reading:
    """The load at one moment, and the sums over answered requests."""

    sample: LoadSample
    totals: Totals


@dataclass(frozen=True, slots=True)
class _Router:
    member: registry_pb2.Member
    channel: grpc.aio.Channel


class Observer:
    """Follows the members of one model. `update` must be called with every change of the registry's members.

    One event loop owns it.
    """

    def __init__(self, model: str, open_channel: OpenChannel) -> None:
        self._model = model
        self._open_channel = open_channel
        self._workers: dict[str, WorkerStatus] = {}
        self._routers: dict[str, _Router] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._current = False

    def update(self, members: Collection[registry_pb2.Member], *, current: bool = True) -> None:
        """Replaces the members that the registry lists. `current`: whether the registry is connected."""
        self._current = current
        workers = {_key(one): one for one in members if self._is_own(one)}
        routers = {_key(one): one for one in members if one.role == registry_pb2.Member.ROLE_ROUTER}
        for key in self._workers.keys() - workers.keys():
            self._close_later(self._workers.pop(key).close())
        for key in self._routers.keys() - routers.keys():
            self._close_later(self._routers.pop(key).channel.close())
        interval_s = status_interval_s(len(workers))
        for status in self._workers.values():
            status.set_interval(interval_s)
        for key in workers.keys() - self._workers.keys():
            self._workers[key] = WorkerStatus(workers[key], self._open_channel, interval_s)
        for key in routers.keys() - self._routers.keys():
            self._routers[key] = _Router(routers[key], self._open_channel(routers[key].endpoint))

    async def read(self) -> Reading:
        """The load now.

        Raises HeadraceError when a member does not report: a decision must not take it for idle or gone.
        """
        if not self._current:
            raise RegistryUnavailable("the registry does not report its members")
        if not self._routers:
            raise WorkerGone("no router is registered")
        routers = dict(self._routers)
        answers = await asyncio.gather(*(self._load_of(one) for one in routers.values()))
        loads = {
            key: load
            for key, answer in zip(routers, answers, strict=True)
            for load in answer.models
            if load.model == self._model
        }
        prefill, decode = [], []
        for worker in self._workers.values():
            status, member = worker.latest, worker.member
            if status is None:
                raise WorkerGone(f"{member.worker_id} sends no status")
            if member.role == registry_pb2.Member.ROLE_PREFILL:
                prefill.append(status)
            else:
                decode.append(DecodeReading(status, member.max_num_seqs))
        if not decode:
            # The deployment starts, or the registry has lost its members: not a reason to decide on a new number.
            raise WorkerGone(f"no decode worker of {self._model} is registered")
        totals = {key: load.answered for key, load in loads.items()}
        return Reading(load_sample(loads.values(), prefill, decode), totals)

    async def close(self) -> None:
        """Ends every stream and closes every channel."""
        self.update(())
        if self._closing:
            await asyncio.wait(self._closing)

    def _is_own(self, member: registry_pb2.Member) -> bool:
        return member.role in _WORKERS and member.model == self._model

    async def _load_of(self, router: _Router) -> load_pb2.GetLoadResponse:
        try:
            return await load_pb2_grpc.LoadServiceStub(router.channel).GetLoad(
                load_pb2.GetLoadRequest(), timeout=_CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            known = error_from_rpc(error)
            raise WorkerGone(
                f"router {router.member.worker_id} does not report its load: {known.detail}"
            ) from error

    def _close_later(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _key(member: registry_pb2.Member) -> str:
    return f"{member.worker_id}@{member.incarnation}"
