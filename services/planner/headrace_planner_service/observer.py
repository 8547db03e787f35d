"""Gathers the load of one model from its routers and workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from headrace.inference.v1 import load_pb2, load_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import RegistryUnavailable, WorkerGone
from headrace_common.process.pacing import heartbeat_interval_s, must_change
from headrace_common.registry.duties import WORKERS
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tasks import BackgroundTasks, end_task, run_forever
from headrace_common.time_model.model import time_model_from_proto
from headrace_planner.observation import ClassCounts, DecodeLoad, LoadSample, RequestStatistics
from headrace_planner.settings import WorkerProfile, learned_profile

_US = 1e-6
_SUMS = tuple(field.name for field in load_pb2.RequestTotals.DESCRIPTOR.fields)


@dataclass(frozen=True, slots=True)
class DecodeReading:
    """The status of a worker that generates, and its slots. `has_both`: whether it computes prompts too."""

    status: worker_pb2.WatchStatusResponse
    max_num_seqs: int
    has_both: bool = False


Totals = Mapping[str, load_pb2.RequestTotals]
"""Sums over the answered requests of one model, by router incarnation."""


def load_sample(
    routers: Iterable[load_pb2.ModelLoad],
    prefill: Iterable[worker_pb2.WatchStatusResponse],
    decode: Iterable[DecodeReading],
) -> LoadSample:
    """The load of one model. Workers that drain are left out, because they take no requests."""
    loads = tuple(routers)
    pulling = [status for status in prefill if _serves(status)]
    generating = [reading for reading in decode if _serves(reading.status)]
    queued = sum(load.queued_prompts for load in loads)
    queued += sum(status.waiting_requests for status in pulling)
    queued = max(queued, _waiting_prompts(generating))
    return LoadSample(
        prefill_workers=len(pulling),
        queued_prompts=queued,
        decode=_decode_loads(generating, sum(load.waiting_requests for load in loads)),
        both_workers=sum(reading.has_both for reading in generating),
        queued_by_class=ClassCounts(
            high=sum(load.queued_by_class.high for load in loads),
            normal=sum(load.queued_by_class.normal for load in loads),
            low=sum(load.queued_by_class.low for load in loads),
        ),
    )


def request_statistics(before: Totals, after: Totals) -> RequestStatistics | None:
    """The requests that were answered between two readings, or None without any.

    A router that the first reading lacks counts from its next reading on. A router with smaller sums has started again.
    """
    sums = dict.fromkeys(_SUMS, 0)
    for router, totals in after.items():
        first = before.get(router)
        if first is None:
            continue
        restarted = totals.request_count < first.request_count
        for name in _SUMS:
            sums[name] += getattr(totals, name) - (0 if restarted else getattr(first, name))
    count = sums["request_count"]
    if count <= 0:
        return None
    gaps = sums["answer_tokens"] - count
    prompt_tokens = sums["prompt_tokens"]
    return RequestStatistics(
        request_count=count,
        prompt_tokens=prompt_tokens / count,
        answer_tokens=sums["answer_tokens"] / count,
        ttft_s=_US * sums["time_to_first_token_us"] / count,
        itl_s=_US * sums["streaming_us"] / gaps if gaps > 0 else 0.0,
        duration_s=_US * sums["duration_us"] / count,
        cached_share=min(1.0, sums["cached_prompt_tokens"] / max(1, prompt_tokens)),
    )


def _profile(
    prefill: Iterable[worker_pb2.WatchStatusResponse], decode: Sequence[DecodeReading]
) -> WorkerProfile | None:
    computing = [*prefill, *(one.status for one in decode if one.has_both)]
    return learned_profile(
        [time_model_from_proto(one.times, one.worker_id) for one in computing],
        [time_model_from_proto(one.status.times, one.status.worker_id) for one in decode],
        max_num_seqs=min((one.max_num_seqs for one in decode), default=0),
    )


def _waiting_prompts(readings: Iterable[DecodeReading]) -> int:
    """The prompts that workers of both roles wait for, without those in computation.

    They include prompts in the queues of routers, because their requests wait on the workers that have reserved blocks.
    """
    both = [reading.status for reading in readings if reading.has_both]
    return sum(status.waiting_requests - status.running_prompts for status in both)


def _decode_loads(readings: Sequence[DecodeReading], waiting: int) -> tuple[DecodeLoad, ...]:
    """The loads, with the requests that wait on routers spread evenly: any worker may get them."""
    share, rest = divmod(waiting, max(1, len(readings)))
    return tuple(
        _decode_load(reading, share + (index < rest)) for index, reading in enumerate(readings)
    )


def _decode_load(reading: DecodeReading, waiting: int) -> DecodeLoad:
    status = reading.status
    held = max(status.used_blocks, status.reserved_blocks + status.quarantined_blocks)
    return DecodeLoad(
        kv_usage=_share(held, status.total_blocks),
        waiting_requests=status.waiting_requests + waiting,
        slot_usage=_share(status.running_requests + status.waiting_requests, reading.max_num_seqs),
    )


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole else 0.0


def _serves(status: worker_pb2.WatchStatusResponse) -> bool:
    return status.state == worker_pb2.WatchStatusResponse.STATE_SERVING


OpenChannel = Callable[[str], grpc.aio.Channel]

_SHORTEST_S: Final = 5.0
_LATE_S: Final = 3.0
SILENT_S: Final = 30.0
"""A worker that has sent no status for so long is not counted. Until then nothing is decided."""
_RETRY_FIRST_S: Final = 0.2
_RETRY_MAX_S: Final = 5.0


class WorkerStatus:
    """The latest status of one worker incarnation, from the start of the object to `close`."""

    def __init__(
        self, member: registry_pb2.Member, open_channel: OpenChannel, interval_s: float
    ) -> None:
        """An idle worker sends at least every `interval_s`."""
        self.member = member
        self._interval_s = interval_s
        self._open_channel = open_channel
        self.latest: worker_pb2.WatchStatusResponse | None = None
        """The latest status. None while the worker sends none."""
        self._silent_since_s = time.monotonic()
        self._task = run_forever(self._follow, f"status-{member.worker_id}")

    @property
    def silent_s(self) -> float:
        """How long the worker has sent none, 0 while it sends some."""
        return 0.0 if self.latest is not None else time.monotonic() - self._silent_since_s

    def set_interval(self, interval_s: float) -> None:
        """Asks for another interval after the next status, if the difference is worth a new stream."""
        self._interval_s = interval_s

    async def close(self) -> None:
        """Ends the stream."""
        await end_task(self._task)

    async def _follow(self) -> None:
        delay_s = _RETRY_FIRST_S
        while True:
            channel = self._open_channel(self.member.endpoint)
            try:
                while await self._read(channel):
                    pass
                if self.latest is not None:
                    delay_s = _RETRY_FIRST_S
                    self._silent_since_s = time.monotonic()
            finally:
                self.latest = None
                await channel.close()
            await asyncio.sleep(delay_s)
            delay_s = min(_RETRY_MAX_S, 2 * delay_s)

    async def _read(self, channel: grpc.aio.Channel) -> bool:
        """Reads until the stream ends or is late. Returns whether it is to be opened again with another interval."""
        interval_s = self._interval_s
        request = worker_pb2.WatchStatusRequest(max_interval=duration_from_seconds(interval_s))
        call: Any = worker_pb2_grpc.WorkerServiceStub(channel).WatchStatus(request)
        try:
            while True:
                async with asyncio.timeout(interval_s + _LATE_S):
                    status = await call.read()
                if not isinstance(status, worker_pb2.WatchStatusResponse):
                    return False
                if status.incarnation == self.member.incarnation:
                    self.latest = status
                    if must_change(interval_s, self._interval_s):
                        return True
        except (TimeoutError, grpc.aio.AioRpcError):
            return False
        finally:
            call.cancel()


_CALL_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The load at one moment, the sums over answered requests, and what the workers have learned of their times."""

    sample: LoadSample
    totals: Totals
    profile: WorkerProfile | None = None


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
        self._closing = BackgroundTasks("the end of a connection")
        self._current = False
        # Whether a worker that generates has served since the start of this observer.
        self._has_served = False

    def update(self, members: Collection[registry_pb2.Member], *, current: bool = True) -> None:
        """Replaces the members that the registry lists. `current`: whether the registry is connected."""
        self._current = current
        workers = {_key(one): one for one in members if self._is_own(one)}
        routers = {_key(one): one for one in members if one.role == registry_pb2.Member.ROLE_ROUTER}
        for key in self._workers.keys() - workers.keys():
            self._closing.start(self._workers.pop(key).close())
        for key in self._routers.keys() - routers.keys():
            self._closing.start(self._routers.pop(key).channel.close())
        # An idle worker sends at least once in this time. Others send each change.
        interval_s = max(_SHORTEST_S, heartbeat_interval_s(len(workers)))
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
            if status is None and worker.silent_s < SILENT_S:
                raise WorkerGone(f"{member.worker_id} sends no status")
            if status is None:
                # It cannot be counted on, whatever the reason.
                continue
            if member.role == registry_pb2.Member.ROLE_PREFILL:
                prefill.append(status)
            else:
                both = member.role == registry_pb2.Member.ROLE_BOTH
                decode.append(DecodeReading(status, member.max_num_seqs, both))
        self._has_served |= any(_serves(one.status) for one in decode)
        if not self._has_served:
            # The deployment starts: not a reason to decide on a new number.
            raise WorkerGone(f"no worker that generates has served {self._model} yet")
        totals = {key: load.answered for key, load in loads.items()}
        sample = load_sample(loads.values(), prefill, decode)
        return Reading(sample, totals, _profile(prefill, decode))

    async def close(self) -> None:
        """Ends every stream and closes every channel."""
        self.update(())
        await self._closing.wait()

    def _is_own(self, member: registry_pb2.Member) -> bool:
        return member.role in WORKERS and member.model == self._model

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


def _key(member: registry_pb2.Member) -> str:
    return f"{member.worker_id}@{member.incarnation}"
