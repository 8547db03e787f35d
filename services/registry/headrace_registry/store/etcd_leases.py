"""The leases of members in etcd, by worker id and by lease. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class MemberLeases:
    """Each member has one lease, and each lease one member. A lookup takes the same time for any number of them."""

    def __init__(self) -> None:
        self._by_worker: dict[str, int] = {}
        self._by_lease: dict[int, str] = {}

    def put(self, worker_id: str, lease: int) -> None:
        """Sets the lease of a member. 0 means none."""
        self.pop(worker_id)
        if lease:
            self._by_worker[worker_id] = lease
            self._by_lease[lease] = worker_id

    def pop(self, worker_id: str) -> int:
        """Removes a member. Returns its lease, 0 for an unknown member."""
        lease = self._by_worker.pop(worker_id, 0)
        if self._by_lease.get(lease) == worker_id:
            del self._by_lease[lease]
        return lease

    def worker_of(self, lease: int) -> str | None:
        """The member with a lease."""
        return self._by_lease.get(lease)

    def take_all(self) -> Mapping[str, int]:
        """Removes all members. Returns their leases by worker id."""
        taken, self._by_worker, self._by_lease = self._by_worker, {}, {}
        return taken
