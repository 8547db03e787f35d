"""A draining decode worker ends requests at its deadline, so that routers continue on another worker."""

from __future__ import annotations

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.worker.v1 import worker_pb2
from headrace_common.errors import HeadraceError, InvalidRequest, StaleIncarnation
from headrace_common.rpc.status import error_from_rpc
from tests.component.decode.conftest import Served
from tests.component.decode.scripted_engine import REF
from tests.waiting import PATIENCE_S


async def drain_refused(served: Served, request: worker_pb2.DrainRequest) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.worker.Drain(request, timeout=PATIENCE_S)
    return error_from_rpc(refused.value)


async def test_drain_responds_at_once_and_a_second_call_changes_nothing(served: Served) -> None:
    await served.reserve(remote_prefill=False)
    asked = worker_pb2.DrainRequest(incarnation=REF.incarnation, grace=Duration(seconds=30))
    first = await served.worker.Drain(asked, timeout=PATIENCE_S)
    assert first.request_count == 1
    assert 29 < first.remaining.ToNanoseconds() / 1e9 <= 30
    again = await served.worker.Drain(
        worker_pb2.DrainRequest(incarnation=REF.incarnation, grace=Duration(seconds=3_000)),
        timeout=PATIENCE_S,
    )
    assert again.remaining.ToNanoseconds() <= first.remaining.ToNanoseconds()


async def test_drain_is_for_one_incarnation_and_a_grace_within_its_range(served: Served) -> None:
    for incarnation in ("", "f" * 16):
        request = worker_pb2.DrainRequest(incarnation=incarnation)
        assert isinstance(await drain_refused(served, request), StaleIncarnation)
    for grace in (Duration(seconds=-1), Duration(seconds=3_601), Duration(nanos=-5)):
        request = worker_pb2.DrainRequest(incarnation=REF.incarnation, grace=grace)
        assert isinstance(await drain_refused(served, request), InvalidRequest)
    assert (await served.worker.Drain(
        worker_pb2.DrainRequest(incarnation=REF.incarnation), timeout=PATIENCE_S
    )).remaining.seconds > 15  # fmt: skip
