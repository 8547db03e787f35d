"""The decode workers of the registry, the load reserved on them, and when their channels close."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import DecodeSlots, LoadTable
from tests.local_channel import ScriptedCalls
from tests.sim_layout import LAYOUT
from tests.virtually import stand_still
from tests.waiting import until

_REF = WorkerRef("d0", "a")


class _Channel(ScriptedCalls):
    """A channel to a worker that sends `incarnation` in its statuses."""

    def __init__(self, incarnation: str) -> None:
        self.closed = False
        self.delay_s = 0.01
        self._incarnation = incarnation
        self.distrusted: list[worker_pb2.DistrustedWorker] = []

    async def read(self) -> worker_pb2.WatchStatusResponse:
        await asyncio.sleep(self.delay_s)
        return worker_pb2.WatchStatusResponse(
            incarnation=self._incarnation, distrusted_workers=self.distrusted
        )

    async def close(self, grace: float | None = None) -> None:
        self.closed = True


class _Channels:
    """Opens channels to one worker."""

    def __init__(self, incarnation: str = _REF.incarnation) -> None:
        self.opened: list[_Channel] = []
        self._incarnation = incarnation

    def __call__(self, endpoint: str) -> Any:
        self.opened.append(_Channel(self._incarnation))
        return self.opened[-1]


def _member(max_model_len: int = 4_096, worker_id: str = _REF.worker_id) -> registry_pb2.Member:
    return registry_pb2.Member(
        role=registry_pb2.Member.ROLE_DECODE,
        worker_id=worker_id,
        incarnation=_REF.incarnation,
        endpoint="127.0.0.1:1",
        model="sim",
        max_model_len=max_model_len,
        max_num_seqs=8,
        layout=layout_to_proto(LAYOUT),
    )


async def _reported(directory: WorkerDirectory) -> None:
    await until(lambda: directory.table("sim").any_available)


async def test_a_worker_that_has_never_reported_is_no_candidate_and_limits_nothing() -> None:
    channels = _Channels(incarnation="another")
    seen: list[object] = []
    directory = WorkerDirectory(channels, b"", on_slots=lambda *change: seen.append(change))
    directory.update([_member(max_model_len=1)])
    # It was tried twice.
    await until(lambda: len(channels.opened) >= 2)
    assert not len(directory.table("sim"))
    assert directory.max_model_len() == directory.decode_worker_counts() == {}
    assert directory.reserve_load(_REF, 1) is None
    assert not seen
    assert channels.opened[0].closed
    await directory.close()


async def test_no_worker_is_late_because_the_router_stood_still() -> None:
    channels = _Channels()
    directory = WorkerDirectory(channels, b"")
    directory.update([_member()])
    await _reported(directory)
    # A status waits to be read when the router goes on.
    channels.opened[0].delay_s = 4.2
    await asyncio.sleep(1.0)
    stand_still(3.0)
    await asyncio.sleep(0.5)
    assert directory.table("sim").any_available
    # The next one is too late.
    await asyncio.sleep(3.0)
    assert not directory.table("sim").any_available
    await directory.close()


async def test_what_one_worker_reports_of_a_prefill_worker_concerns_its_own_requests_only() -> None:
    channels = _Channels()
    directory = WorkerDirectory(channels, b"")
    directory.update([_member(), _member(worker_id="d1")])
    await until(lambda: len(directory.table("sim")) == 2)
    accused = worker_pb2.DistrustedWorker(worker_id="p0", incarnation="a", detail="layer 3")
    channels.opened[0].distrusted.append(accused)
    await until(lambda: bool(directory.distrusted(_REF)))
    assert directory.distrusted(_REF) == {WorkerRef("p0", "a"): "layer 3"}
    await asyncio.sleep(1.0)
    assert directory.distrusted(WorkerRef("d1", "a")) == {}
    await directory.close()


async def test_the_slots_of_reachable_workers_are_reported_with_the_number_of_routers() -> None:
    seen: list[tuple[str, DecodeSlots]] = []
    directory = WorkerDirectory(_Channels(), b"", on_slots=lambda *change: seen.append(change))
    router = registry_pb2.Member(role=registry_pb2.Member.ROLE_ROUTER)
    directory.update([_member(), router, router])
    # The worker has not reported yet.
    assert not seen
    await _reported(directory)
    assert seen == [("sim", DecodeSlots(8, 0, 2))]
    directory.update([_member(), router])
    directory.update([_member(), router])
    assert seen[1:] == [("sim", DecodeSlots(8, 0, 1))]
    directory.update([router])
    assert seen[2:] == [("sim", DecodeSlots(0, 0, 1))]
    await directory.close()


async def test_the_policy_restricts_workers_of_both_roles_at_run_time() -> None:
    roles: dict[str, registry_pb2.WorkerRole.ValueType] = {}
    directory = WorkerDirectory(_Channels(), b"", worker_roles=lambda: roles)
    both = _member()
    both.role = registry_pb2.Member.ROLE_BOTH
    members = [both, _member(worker_id="d1")]
    directory.update(members)
    await until(lambda: len(directory.table("sim")) == 2)
    table = directory.table("sim")
    assert not table.prefill_only.any()
    for role, column in (
        (registry_pb2.WORKER_ROLE_PREFILL, "prefill_only"),
        (registry_pb2.WORKER_ROLE_DECODE, "decode_only"),
    ):
        # A worker of one role keeps it.
        roles |= {"d0": role, "d1": role, "unknown": role}
        directory.update(members)
        table = directory.table("sim")
        assert getattr(table, column).tolist() == [True, False]
    assert directory.decode_only == {_REF}
    assert directory.reserve_load(_REF, 1) is not None
    roles.clear()
    directory.update(members)
    assert not directory.table("sim").decode_only.any()
    assert not directory.decode_only
    await directory.close()


async def test_a_worker_counts_as_caching_the_whole_blocks_of_a_prompt() -> None:
    directory = WorkerDirectory(_Channels(), b"")
    directory.update([_member()])
    worker = directory.worker(_REF)
    assert worker is not None
    await directory.close()
    table, block = LoadTable([worker]), worker.layout.block_tokens
    known = np.array([1.0])
    prompt_tokens = 3 * block + block // 2
    assert table.with_cached_prompt(known, _REF, prompt_tokens).tolist() == [3 * block]
    more = np.array([3.0 * block + 1])
    assert table.with_cached_prompt(more, _REF, prompt_tokens).tolist() == more.tolist()
    other = WorkerRef(_REF.worker_id, "another")
    assert table.with_cached_prompt(known, other, prompt_tokens).tolist() == [1.0]
    assert known.tolist() == [1.0]
