"""The contract of Store, tested on each store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import Conflict, NotFound, StaleIncarnation, WatchExpired
from headrace_registry.service import Store
from tests.component.registry.harness import kv_descriptor, ordered, reference, worker
from tests.waiting import PATIENCE_S


async def take(
    watch: AsyncIterator[registry_pb2.WatchResponse], timeout_s: float = PATIENCE_S
) -> registry_pb2.WatchResponse:
    async with asyncio.timeout(timeout_s):
        return await anext(watch)


def kinds(response: registry_pb2.WatchResponse) -> list[str | None]:
    return [change.WhichOneof("change") for change in response.changes]


async def test_a_member_is_listed_from_registration_to_deregistration(store: Store) -> None:
    member = worker()
    registration = await store.register(member, 5)
    assert registration.ttl_s == 5
    assert dict(store.feed.members) == {"decode-0": ordered(member, registration.order)}
    await store.deregister(registration.lease_id)
    assert dict(store.feed.members) == {}
    await store.deregister(registration.lease_id)
    assert await store.keep_alive(registration.lease_id) is None


async def test_a_lease_that_is_not_renewed_expires_with_its_descriptor(store: Store) -> None:
    member = worker()
    watch = store.watch(0)
    assert not (await take(watch)).snapshot.members
    registration = await store.register(member, 1)
    await store.put_descriptor(registration.lease_id, reference(member), kv_descriptor())
    assert kinds(await take(watch)) == ["member_put"]
    gone = await take(watch)
    assert gone.changes[0].member_gone == reference(member)
    assert dict(store.feed.members) == {}
    assert await store.keep_alive(registration.lease_id) is None
    with pytest.raises(NotFound):
        await store.get_descriptor(reference(member))


@pytest.mark.parametrize("lease_id", ["", "zz", "0", "7fffffffffffff00", "f" * 40, "-1"])
async def test_an_unknown_lease_does_not_exist(store: Store, lease_id: str) -> None:
    assert await store.keep_alive(lease_id) is None
    await store.deregister(lease_id)
    with pytest.raises(NotFound):
        await store.put_descriptor(lease_id, reference(worker()), kv_descriptor())


async def test_a_newer_incarnation_replaces_the_older_at_once(store: Store) -> None:
    old, new = worker(generation=1), worker(generation=2)
    # The order does not depend on the clocks of hosts.
    old.start_unix_ns += 3600 * 10**9
    first = await store.register(old, 30)
    await store.put_descriptor(first.lease_id, reference(old), kv_descriptor())
    watch = store.watch(0)
    await take(watch)
    second = await store.register(new, 30)
    assert second.order > first.order
    assert dict(store.feed.members) == {"decode-0": ordered(new, second.order)}
    change = await take(watch)
    assert kinds(change) == ["member_gone", "member_put"]
    assert change.changes[0].member_gone == reference(old)
    assert await store.keep_alive(first.lease_id) is None
    assert await store.keep_alive(second.lease_id) is not None
    for incarnation in (old, new):
        with pytest.raises(NotFound):
            await store.get_descriptor(reference(incarnation))


async def test_an_older_incarnation_is_rejected(store: Store) -> None:
    old, new = worker(generation=1), worker(generation=2)
    first = await store.register(old, 30)
    second = await store.register(new, 30)
    with pytest.raises(Conflict, match="newer incarnation"):
        await store.register(ordered(old, first.order), 30)
    # A lost lease changes nothing: the newer one repeats its number, too.
    await store.deregister(second.lease_id)
    third = await store.register(ordered(old, first.order), 30)
    fourth = await store.register(ordered(new, second.order), 30)
    assert (third.order, fourth.order) == (first.order, second.order)
    with pytest.raises(Conflict, match="newer incarnation"):
        await store.register(ordered(old, first.order), 30)
    assert dict(store.feed.members) == {"decode-0": ordered(new, second.order)}
    assert await store.keep_alive(fourth.lease_id) is not None


async def test_no_incarnation_can_place_itself_in_the_future(store: Store) -> None:
    far = ordered(worker(generation=1), (1 << 64) - 1)
    claimed = await store.register(far, 30)
    assert claimed.order < far.registration_order
    restarted = await store.register(worker(generation=2), 30)
    assert restarted.order > claimed.order


async def test_registering_again_renews_the_record_and_keeps_the_descriptor(store: Store) -> None:
    member = worker()
    first = await store.register(member, 30)
    await store.put_descriptor(first.lease_id, reference(member), kv_descriptor())
    changed = worker()
    changed.max_num_seqs = 99
    second = await store.register(changed, 20)
    assert (second.ttl_s, second.order) == (20, first.order)
    assert store.feed.members["decode-0"].max_num_seqs == 99
    assert await store.get_descriptor(reference(member)) == kv_descriptor()
    assert await store.keep_alive(second.lease_id) is not None
    assert await store.keep_alive(first.lease_id) is None
    await store.deregister(second.lease_id)
    with pytest.raises(NotFound):
        await store.get_descriptor(reference(member))


async def test_a_descriptor_is_bound_to_its_owner(store: Store) -> None:
    member, other = worker(), worker("decode-1")
    registration = await store.register(member, 30)
    await store.register(other, 30)
    with pytest.raises(NotFound):
        await store.get_descriptor(reference(member))
    lease_id = registration.lease_id
    revision = await store.put_descriptor(lease_id, reference(member), kv_descriptor(8192))
    assert revision > registration.revision
    assert await store.get_descriptor(reference(member)) == kv_descriptor(8192)
    with pytest.raises(StaleIncarnation):
        await store.put_descriptor(lease_id, reference(worker(generation=7)), kv_descriptor())
    with pytest.raises(NotFound):
        await store.put_descriptor(lease_id, reference(other), kv_descriptor())


async def test_a_watch_resumes_from_its_revision(store: Store) -> None:
    await store.register(worker("decode-0"), 30)
    watch = store.watch(0)
    snapshot = await take(watch)
    assert [member.worker_id for member in snapshot.snapshot.members] == ["decode-0"]
    assert snapshot.snapshot.policy.retry_budget == 2
    await store.register(worker("decode-1"), 30)
    await store.register(worker("decode-2"), 30)
    resumed = store.watch(snapshot.revision)
    missed = await take(resumed)
    assert [change.member_put.worker_id for change in missed.changes] == ["decode-1", "decode-2"]
    assert missed.revision == store.feed.revision
    again = await take(store.watch(missed.revision))
    assert not again.changes
    assert not again.HasField("snapshot")


async def test_a_watch_from_before_the_history_has_expired(store: Store) -> None:
    start = (await take(store.watch(0))).revision
    for number in range(10):
        await store.register(worker(f"decode-{number}"), 30)
    with pytest.raises(WatchExpired):
        await take(store.watch(start))
    with pytest.raises(WatchExpired):
        await take(store.watch(store.feed.revision + 1_000_000))


async def test_a_store_makes_a_key_once(store: Store) -> None:
    keys = await asyncio.gather(*(store.ensure_prefix_hash_key(0) for _ in range(8)))
    assert len(set(keys)) == 1
    assert 0 < keys[0] < 1 << 64
    assert await store.ensure_prefix_hash_key(5) == keys[0]


async def test_a_store_without_a_key_adopts_the_first_proposed(store: Store) -> None:
    assert [await store.ensure_prefix_hash_key(proposed) for proposed in (7, 5, 0)] == [7] * 3
