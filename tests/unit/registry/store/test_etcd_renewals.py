"""Renewals that come together are one call."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import pytest

from headrace_common.errors import RegistryUnavailable
from headrace_registry.store.etcd_store import BatchedRenewals


class Etcd:
    """Leases 1 to 1,000 exist, with so many seconds left."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.fails = False

    async def renew_all(self, leases: Collection[int]) -> Mapping[int, float]:
        self.calls.append(list(leases))
        await asyncio.sleep(0)
        if self.fails:
            raise RegistryUnavailable("etcd does not serve")
        return {lease: float(lease) for lease in leases if lease <= 1_000}


async def test_a_call_has_a_bound() -> None:
    etcd = Etcd()
    renewals = BatchedRenewals(etcd.renew_all)
    await asyncio.gather(*map(renewals.renew, range(1, 1_001)))
    assert [len(call) for call in etcd.calls] == [512, 488]


async def test_a_caller_that_is_cancelled_takes_no_answer_from_others() -> None:
    renewals = BatchedRenewals(Etcd().renew_all)
    first = asyncio.create_task(renewals.renew(1))
    second = asyncio.create_task(renewals.renew(1))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1.0
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_the_end_cancels_those_that_wait() -> None:
    renewals = BatchedRenewals(Etcd().renew_all)
    waiting = asyncio.create_task(renewals.renew(1))
    await asyncio.sleep(0)
    await renewals.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
