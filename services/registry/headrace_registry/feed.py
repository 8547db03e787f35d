"""The members and policy in force, the changes that led there, and those who watch them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import WatchExpired
from headrace_common.registry.policy import default_policy


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A policy and the revision it was set at, 0 for the default."""

    policy: registry_pb2.Policy
    revision: int


@dataclass(frozen=True, slots=True)
class _Entry:
    revision: int
    changes: tuple[registry_pb2.Change, ...]


class ChangeFeed:
    """One registry process's copy of what is registered, with the last `history_size` changes.

    Belongs to one event loop. A store alone writes to it. Watchers hold no queue: each reads the
    shared history from its own revision, and one that falls behind the history gets WatchExpired.
    So a slow watcher costs no memory and holds up nobody.
    """

    def __init__(self, history_size: int, revision: int = 0) -> None:
        self._history: deque[_Entry] = deque()
        self._history_size = history_size
        self._revision = revision
        # Changes up to this revision are no longer kept.
        self._floor = revision
        self._epoch = 0
        self._members: dict[str, registry_pb2.Member] = {}
        self._policy = PolicyRecord(default_policy(), 0)
        self._moved = asyncio.Event()

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def members(self) -> Mapping[str, registry_pb2.Member]:
        """Live members by worker id."""
        return MappingProxyType(self._members)

    @property
    def policy(self) -> PolicyRecord:
        return self._policy

    def apply(
        self,
        revision: int,
        members: Mapping[str, registry_pb2.Member | None],
        policy: PolicyRecord | None = None,
    ) -> None:
        """Takes in what changed at `revision`: records by worker id, None where one went."""
        changes: list[registry_pb2.Change] = []
        for worker_id, member in members.items():
            changes += self._apply_member(worker_id, member)
        if policy is not None:
            if policy.policy != self._policy.policy:
                changes.append(registry_pb2.Change(policy_put=policy.policy))
            self._policy = policy
        self._revision = max(self._revision, revision)
        if changes:
            self._history.append(_Entry(self._revision, tuple(changes)))
            if len(self._history) > self._history_size:
                self._floor = self._history.popleft().revision
        self._wake()

    def replace(
        self, revision: int, members: Mapping[str, registry_pb2.Member], policy: PolicyRecord
    ) -> None:
        """Takes in a whole listing, as the changes from what was known to it."""
        gone = {worker_id: None for worker_id in self._members if worker_id not in members}
        self.apply(revision, {**gone, **members}, policy)

    def restart(
        self, revision: int, members: Mapping[str, registry_pb2.Member], policy: PolicyRecord
    ) -> None:
        """Takes in a listing whose revisions do not go on from here: every watch expires."""
        self._history.clear()
        self._members = dict(members)
        self._policy = policy
        self._revision = revision
        self._floor = revision
        self._epoch += 1
        self._wake()

    async def wait_for(self, revision: int, timeout_s: float) -> bool:
        """Waits until the feed has reached `revision`; False when it has not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._revision < revision:
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    async def watch(
        self, start_revision: int, *, ahead: bool = False
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        """A snapshot (start 0) or what changed since `start_revision`, at once; then every change.

        `ahead` admits a start that this copy has yet to reach. Raises WatchExpired when the changes
        are not kept.
        """
        epoch = self._epoch
        if start_revision == 0:
            cursor = self._revision
            yield self._snapshot()
        else:
            self._require_kept(start_revision, epoch, ahead)
            cursor = start_revision
            response = self._since(cursor)
            cursor = response.revision
            yield response
        while True:
            self._require_kept(cursor, epoch, ahead=True)
            moved = self._moved
            response = self._since(cursor)
            if response.changes:
                cursor = response.revision
                yield response
            else:
                await moved.wait()

    def _apply_member(
        self, worker_id: str, member: registry_pb2.Member | None
    ) -> list[registry_pb2.Change]:
        previous = self._members.get(worker_id)
        if member is None:
            if previous is None:
                return []
            del self._members[worker_id]
            return [_gone(previous)]
        self._members[worker_id] = member
        if previous == member:
            return []
        put = registry_pb2.Change(member_put=member)
        if previous is None or previous.incarnation == member.incarnation:
            return [put]
        return [_gone(previous), put]

    def _require_kept(self, cursor: int, epoch: int, ahead: bool) -> None:
        if epoch != self._epoch or cursor < self._floor or (cursor > self._revision and not ahead):
            raise WatchExpired(
                f"changes since revision {cursor} are not kept, only those since {self._floor}: "
                "watch again from 0",
                metadata={"start_revision": str(cursor), "kept_since_revision": str(self._floor)},
            )

    def _since(self, cursor: int) -> registry_pb2.WatchResponse:
        entries: list[_Entry] = []
        for entry in reversed(self._history):
            if entry.revision <= cursor:
                break
            entries.append(entry)
        changes = [change for entry in reversed(entries) for change in entry.changes]
        return registry_pb2.WatchResponse(revision=max(cursor, self._revision), changes=changes)

    def _snapshot(self) -> registry_pb2.WatchResponse:
        snapshot = registry_pb2.Snapshot(
            members=[self._members[worker_id] for worker_id in sorted(self._members)],
            policy=self._policy.policy,
        )
        return registry_pb2.WatchResponse(revision=self._revision, snapshot=snapshot)

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def _gone(member: registry_pb2.Member) -> registry_pb2.Change:
    reference = registry_pb2.MemberRef(worker_id=member.worker_id, incarnation=member.incarnation)
    return registry_pb2.Change(member_gone=reference)
