"""The members and the policy in force, the last changes of both, and watches of the changes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import WatchExpired
from headrace_common.registry.view import default_policy

# A watcher gets the changes of so many seconds in one message.
_BATCH_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A policy and the revision at which it was set, 0 for the default."""

    policy: registry_pb2.Policy
    revision: int


@dataclass(frozen=True, slots=True)
class WatchFilter:
    """What a watcher receives of the members. No roles means all."""

    roles: frozenset[int] = frozenset()
    without_layouts: bool = False

    def takes(self, role: int) -> bool:
        """Whether members of a role belong to it. A change of the policy has the role 0."""
        return not role or not self.roles or role in self.roles


ALL: Final = WatchFilter()


@dataclass(frozen=True, slots=True)
class _HistoryChange:
    """A change, and the same without a layout. `role` is that of the member, or 0."""

    role: int
    full: registry_pb2.Change
    brief: registry_pb2.Change


@dataclass(frozen=True, slots=True)
class _HistoryEntry:
    revision: int
    changes: tuple[_HistoryChange, ...]


class ChangeFeed:
    """One registry process's copy of the records, with the last `history_size` changes.

    Used by one event loop. Only the store that owns it changes it. A watcher has no queue: it reads
    the shared history from its own revision, and gets WatchExpired when it falls behind the history.
    So a slow watcher needs no memory and delays no other watcher.
    """

    def __init__(self, history_size: int, revision: int = 0) -> None:
        self._history: deque[_HistoryEntry] = deque()
        self._history_size = history_size
        self.revision = revision
        # The history lacks changes up to this revision.
        self._kept_since = revision
        self._epoch = 0
        self._members: dict[str, registry_pb2.Member] = {}
        self._role_counts: Counter[int] = Counter()
        self.policy = PolicyRecord(default_policy(), 0)
        self._changed = asyncio.Event()

    @property
    def members(self) -> Mapping[str, registry_pb2.Member]:
        """Live members by worker id."""
        return MappingProxyType(self._members)

    def member_count(self, role: registry_pb2.Member.Role.ValueType) -> int:
        """The number of live members of a role."""
        return self._role_counts[role]

    def apply(
        self,
        revision: int,
        members: Mapping[str, registry_pb2.Member | None],
        policy: PolicyRecord | None = None,
    ) -> None:
        """Applies the changes of `revision`: records by worker id, None for a removed one."""
        changes: list[_HistoryChange] = []
        for worker_id, member in members.items():
            changes += self._apply_member(worker_id, member)
        if policy is not None:
            if policy.policy != self.policy.policy:
                put = registry_pb2.Change(policy_put=policy.policy)
                changes.append(_HistoryChange(0, put, put))
            self.policy = policy
        self.revision = max(self.revision, revision)
        if changes:
            self._history.append(_HistoryEntry(self.revision, tuple(changes)))
            if len(self._history) > self._history_size:
                self._kept_since = self._history.popleft().revision
        self._wake_watchers()

    def apply_listing(
        self, revision: int, members: Mapping[str, registry_pb2.Member], policy: PolicyRecord
    ) -> None:
        """Applies the differences between a complete listing and this copy."""
        gone = {worker_id: None for worker_id in self._members if worker_id not in members}
        self.apply(revision, {**gone, **members}, policy)

    def restart(
        self, revision: int, members: Mapping[str, registry_pb2.Member], policy: PolicyRecord
    ) -> None:
        """Replaces this copy by a listing of unrelated revisions. Every watch expires."""
        self._history.clear()
        self._members = dict(members)
        self._role_counts = Counter(member.role for member in members.values())
        self.policy = policy
        self.revision = revision
        self._kept_since = revision
        self._epoch += 1
        self._wake_watchers()

    async def wait_for_revision(self, revision: int, timeout_s: float) -> bool:
        """Waits until this copy has reached `revision`. False when it has not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.revision < revision:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def watch(
        self, start_revision: int, wanted: WatchFilter = ALL, *, allow_future: bool = False
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        """Yields a snapshot (start 0) or the changes since `start_revision`, then every later change.

        The first response comes at once. `allow_future` accepts a start that this copy has not
        reached yet. Raises WatchExpired when the history lacks the changes.
        """
        epoch = self._epoch
        if start_revision == 0:
            cursor = self.revision
            yield self._snapshot(wanted)
        else:
            self._require_kept(start_revision, epoch, allow_future)
            cursor = start_revision
            response = self._since(cursor, wanted)
            cursor = response.revision
            yield response
        while True:
            self._require_kept(cursor, epoch, allow_future=True)
            changed = self._changed
            if self.revision <= cursor:
                await changed.wait()
                continue
            response = self._since(cursor, wanted)
            cursor = response.revision
            if response.changes:
                yield response
            # Changes of many members at a time come together. The first one does not wait.
            await asyncio.sleep(_BATCH_S)

    def _apply_member(
        self, worker_id: str, member: registry_pb2.Member | None
    ) -> list[_HistoryChange]:
        previous = self._members.get(worker_id)
        if previous is not None:
            self._role_counts[previous.role] -= 1
        if member is not None:
            self._role_counts[member.role] += 1
        if member is None:
            if previous is None:
                return []
            del self._members[worker_id]
            return [_member_gone(previous)]
        self._members[worker_id] = member
        if previous == member:
            return []
        full = registry_pb2.Change(member_put=member)
        put = _HistoryChange(member.role, full, registry_pb2.Change(member_put=_brief(member)))
        if previous is None or previous.incarnation == member.incarnation:
            return [put]
        return [_member_gone(previous), put]

    def _require_kept(self, cursor: int, epoch: int, allow_future: bool) -> None:
        if (
            epoch != self._epoch
            or cursor < self._kept_since
            or (cursor > self.revision and not allow_future)
        ):
            raise WatchExpired(
                f"changes since revision {cursor} are not kept, only those since {self._kept_since}: "
                "watch again from 0",
                metadata={
                    "start_revision": str(cursor),
                    "kept_since_revision": str(self._kept_since),
                },
            )

    def _since(self, cursor: int, wanted: WatchFilter) -> registry_pb2.WatchResponse:
        entries: list[_HistoryEntry] = []
        for entry in reversed(self._history):
            if entry.revision <= cursor:
                break
            entries.append(entry)
        changes = [
            change.brief if wanted.without_layouts else change.full
            for entry in reversed(entries)
            for change in entry.changes
            if wanted.takes(change.role)
        ]
        return registry_pb2.WatchResponse(revision=max(cursor, self.revision), changes=changes)

    def _snapshot(self, wanted: WatchFilter) -> registry_pb2.WatchResponse:
        members = [
            member for _, member in sorted(self._members.items()) if wanted.takes(member.role)
        ]
        snapshot = registry_pb2.Snapshot(
            members=map(_brief, members) if wanted.without_layouts else members,
            policy=self.policy.policy,
        )
        return registry_pb2.WatchResponse(revision=self.revision, snapshot=snapshot)

    def _wake_watchers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _brief(member: registry_pb2.Member) -> registry_pb2.Member:
    """The member without its layout."""
    if not member.HasField("layout"):
        return member
    brief = registry_pb2.Member()
    brief.CopyFrom(member)
    brief.ClearField("layout")
    return brief


def _member_gone(member: registry_pb2.Member) -> _HistoryChange:
    reference = registry_pb2.MemberRef(worker_id=member.worker_id, incarnation=member.incarnation)
    gone = registry_pb2.Change(member_gone=reference)
    return _HistoryChange(member.role, gone, gone)
