"""Headrace's connector joined with vLLM's offloading: ends of loads, and blocks that are not stored yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from headrace_engine.connector.transfers import BlockHolds
from tests.vllm.conftest import IMPORTS_VLLM

if TYPE_CHECKING:
    from headrace_engine.vllm.offload_connector import HeadraceOffloadingConnector

pytestmark = IMPORTS_VLLM


@dataclass
class Child:
    """One of the two connectors. `received` and `failed`: what it reports next. `jobs`: the stores of the next step."""

    hit: int | None = 0
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    jobs: dict[int, Any] = field(default_factory=dict)
    allocated: list[int] = field(default_factory=list)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return self.hit, bool(self.hit)

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self.allocated.append(tokens)

    def get_transfer_results(self, finished: set[str]) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        received, self.received = self.received, set()
        failed, self.failed = self.failed, set()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_meta(self, output: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common

        jobs, self.jobs = self.jobs, {}
        return common.OffloadingConnectorMetadata({}, jobs)

    def update_connector_output(self, output: Any) -> None:
        """Takes nothing."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def has_pending_push_work(self) -> bool:
        return False

    def set_loads_beside(self, loads: bool) -> None:
        """Changes nothing."""


class Pool:
    """vLLM's block pool: how many requests or holds have each block."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=one, is_null=one == 0) for one in range(10)]
        self.references = [0] * 10

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            self.references[block.block_id] += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            self.references[block.block_id] -= 1

    @property
    def held(self) -> list[int]:
        return [block for block, count in enumerate(self.references) if count]


@dataclass
class Rig:
    connector: HeadraceOffloadingConnector
    ours: Child
    theirs: Child
    pool: Pool

    def step(self, **completed: int) -> Any:
        """Plans a step. Then ranks report the stores that have ended."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common
        from vllm.v1.outputs import KVConnectorOutput

        metadata = self.connector.build_connector_meta(SimpleNamespace())
        ended = common.OffloadingWorkerMetadata({int(k[1:]): v for k, v in completed.items()})
        worker_meta = multi_connector.MultiKVConnectorWorkerMetadata((None, ended))
        self.connector.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=worker_meta)
        )
        return metadata


def rig(rank_count: int = 1) -> Rig:
    from headrace_engine.vllm import offload_connector
    from headrace_engine.vllm.scheduler.connector_scheduler import VllmPoolBlocks

    ours, theirs, pool = Child(), Child(), Pool()

    class Joined(offload_connector.HeadraceOffloadingConnector):
        """With connectors of the test."""

        def __init__(self) -> None:
            self._connectors = [ours, theirs]
            self._all_support_hma = True
            self._extra_async_saves: dict[str, int] = {}
            self._requests_to_connector: dict[str, int] = {}
            self._rank_count = rank_count
            self._begin()

        @property
        def _ours(self) -> Any:
            return ours

    connector = Joined()
    connector._holds.bind(VllmPoolBlocks(cast("Any", pool)))
    assert isinstance(connector._holds, BlockHolds)
    return Rig(connector, ours, theirs, pool)


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name)


def test_offloaded_tokens_come_before_those_of_a_transfer() -> None:
    one = rig()
    one.theirs.hit, one.ours.hit = 96, 64
    assert one.connector.get_num_new_matched_tokens(request("a"), 32) == (160, True)
    one.connector.update_state_after_alloc(request("a"), None, 160)
    assert (one.theirs.allocated, one.ours.allocated) == ([96], [64])
    assert one.step().loads_of_both == {"a"}
    assert one.step().loads_of_both == set()
    one.ours.hit = None
    assert one.connector.get_num_new_matched_tokens(request("b"), 0) == (None, False)
    one.theirs.hit, one.ours.hit = 0, 0
    assert one.connector.get_num_new_matched_tokens(request("b"), 0) == (0, False)


def test_a_request_that_loads_from_both_runs_when_both_have_ended() -> None:
    one = rig()
    one.connector._missing_loads = {"both": {0, 1}}
    one.ours.received, one.ours.failed = {"both", "other"}, {"both"}
    found = one.connector.get_transfer_results(set())
    assert (found.finished_recving, found.failed_recving) == ({"other"}, set())
    one.ours.received = {"both"}
    assert not one.connector.get_transfer_results(set()).finished_recving
    one.theirs.received = {"both", "third"}
    found = one.connector.get_transfer_results(set())
    assert (found.finished_recving, found.failed_recving) == ({"both", "third"}, {"both"})
    assert not one.connector._missing_loads


def test_no_peer_gets_a_block_before_every_rank_has_stored_it() -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    one = rig(rank_count=2)
    one.connector.request_finished_all_groups(request("a"), ([3, 4, 5],))
    assert one.pool.held == [3, 4, 5]
    assert one.connector.has_pending_push_work()
    spec = GPULoadStoreSpec([3, 4], group_sizes=(2,), block_indices=(0,))
    one.theirs.jobs = {7: SimpleNamespace(src_spec=spec)}
    one.step()
    assert one.pool.held == [3, 4]
    one.step(j7=1)
    assert one.pool.held == [3, 4]
    one.step(j7=1, j9=2)
    assert one.pool.held == []
    assert not one.connector.has_pending_push_work()
