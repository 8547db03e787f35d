"""The feed against a model: every watcher, from any start, ends with the registered members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import WatchExpired
from headrace_common.registry.view import default_policy
from headrace_registry.feed import ChangeFeed, PolicyRecord, WatchFilter
from headrace_simulator.virtual_time import run_virtually

Edits = dict[str, int | None]


def member(worker_id: str, generation: int) -> registry_pb2.Member:
    return registry_pb2.Member(
        worker_id=worker_id,
        incarnation=f"{generation:016x}",
        role=registry_pb2.Member.Role.values()[generation % 4],
        layout=layout_pb2.KvLayout(model="m"),
    )


def require_counts(feed: ChangeFeed) -> None:
    """The feed counts its members by role."""
    for role in registry_pb2.Member.Role.values():
        listed = [member for member in feed.members.values() if member.role == role]
        assert feed.member_count(role) == len(listed)


def records(edits: Edits) -> dict[str, registry_pb2.Member | None]:
    return {
        worker_id: None if generation is None else member(worker_id, generation)
        for worker_id, generation in edits.items()
    }


def follow(
    members: dict[str, registry_pb2.Member], response: registry_pb2.WatchResponse
) -> dict[str, registry_pb2.Member]:
    """The members after a response. Checks each removal against the known members."""
    if response.HasField("snapshot"):
        return {entry.worker_id: entry for entry in response.snapshot.members}
    members = dict(members)
    for change in response.changes:
        if change.HasField("member_put"):
            members[change.member_put.worker_id] = change.member_put
        elif change.HasField("member_gone"):
            gone = members.pop(change.member_gone.worker_id)
            assert gone.incarnation == change.member_gone.incarnation
    return members


edits = st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(1, 3), max_size=3)


ROLES = st.frozensets(st.integers(1, 3))


HISTORY = st.lists(edits, min_size=1, max_size=20)


@given(history=HISTORY, join_at=st.integers(0, 20), roles=ROLES, brief=st.booleans())
def test_every_watcher_converges_to_the_members_that_it_wants(
    history: list[Edits], join_at: int, roles: frozenset[int], brief: bool
) -> None:
    def shown(feed: ChangeFeed) -> dict[str, registry_pb2.Member]:
        found: dict[str, registry_pb2.Member] = {}
        for name, entry in feed.members.items():
            if not roles or not entry.role or entry.role in roles:
                found[name] = registry_pb2.Member()
                found[name].CopyFrom(entry)
                if brief:
                    found[name].ClearField("layout")
        return found

    async def scenario() -> None:
        feed = ChangeFeed(history_size=100, revision=10)
        wanted = WatchFilter(roles, without_layouts=brief)
        watch = feed.watch(0, wanted)
        seen = follow({}, await anext(watch))
        resumed: AsyncIterator[registry_pb2.WatchResponse] | None = None
        resumed_seen: dict[str, registry_pb2.Member] = {}
        for step, edit in enumerate(history):
            if step == join_at:
                resumed_seen = shown(feed)
                resumed = feed.watch(feed.revision, wanted)
            feed.apply(11 + step, records(edit))
            require_counts(feed)
        assert follow({}, await anext(feed.watch(0, wanted))) == shown(feed)
        if resumed is not None:
            assert follow(resumed_seen, await anext(resumed)) == shown(feed)
        assert follow({}, await anext(feed.watch(10, wanted))) == shown(feed)
        if shown(feed) != seen:
            assert follow(seen, await asyncio.wait_for(anext(watch), 10)) == shown(feed)

    run_virtually(scenario)


@given(before=edits, after=edits)
def test_a_listing_is_applied_as_changes(before: Edits, after: Edits) -> None:
    async def scenario() -> None:
        feed = ChangeFeed(history_size=10, revision=1)
        feed.apply(2, records(before))
        known = dict(feed.members)
        listing = {name: entry for name, entry in records(after).items() if entry is not None}
        feed.apply_listing(7, listing, PolicyRecord(default_policy(), 0))
        assert feed.members == listing
        response = await anext(feed.watch(2))
        assert response.revision == 7
        assert follow(known, response) == listing
        if known == listing:
            assert not response.changes

    run_virtually(scenario)


async def test_a_restart_ends_every_watch() -> None:
    feed = ChangeFeed(history_size=10, revision=5)
    watch = feed.watch(0)
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    feed.restart(9, {"b": member("b", 2)}, PolicyRecord(default_policy(), 0))
    require_counts(feed)
    with pytest.raises(WatchExpired):
        await asyncio.wait_for(waiting, 1)


async def test_waiting_for_a_revision() -> None:
    feed = ChangeFeed(history_size=10, revision=5)
    assert await feed.wait_for_revision(5, 0.01)
    assert not await feed.wait_for_revision(6, 0.01)
    waiting = asyncio.ensure_future(feed.wait_for_revision(7, 1))
    await asyncio.sleep(0)
    feed.apply(6, {})
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.apply(8, {})
    assert await waiting


async def test_an_equal_policy_is_no_change_but_has_a_new_revision() -> None:
    feed = ChangeFeed(history_size=10, revision=5)
    feed.apply(6, {}, PolicyRecord(default_policy(), 6))
    assert feed.policy.revision == 6
    assert not (await anext(feed.watch(5))).changes
