"""RegistryService over a store: validates requests, then calls the store."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc.aio

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.access.roles import Role, current_caller, require_own_name
from headrace_common.callers.bounds import RateByCaller, host_of_peer
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import PermissionDenied, QueueFull
from headrace_common.identity import is_worker_id
from headrace_common.limits import CLOCK_OFFSET_NOTED_S, PAGE_SIZE_MAX
from headrace_common.registry.view import DEFAULT_RETRY_BUDGET
from headrace_registry import validation
from headrace_registry.feed import WatchFilter
from headrace_registry.store.base import MemoryStore

if TYPE_CHECKING:
    from headrace_registry.store.etcd_store import EtcdStore

_LOG = logging.getLogger(__name__)

Store: TypeAlias = "MemoryStore | EtcdStore"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# A member may use up the registrations of so many seconds at once, as after crashes.
_REGISTRATIONS_AT_ONCE: Final = 20.0
# Registrations a second from one host, by credentials without a name. They could change their member's name each time.
_UNNAMED_PER_S: Final = 20.0
_UNNAMED_AT_ONCE: Final = 100


_CREDENTIAL_ROLES: Final = {
    registry_pb2.Member.ROLE_ROUTER: Role.ROUTER,
    registry_pb2.Member.ROLE_PREFILL: Role.PREFILL,
    registry_pb2.Member.ROLE_DECODE: Role.DECODE,
    registry_pb2.Member.ROLE_BOTH: Role.WORKER,
}


def _require_own_identity(member: registry_pb2.Member) -> None:
    """Raises PermissionDenied when the caller's credential is for another role or another worker."""
    caller = current_caller()
    role = _CREDENTIAL_ROLES[member.role]
    if role not in caller.roles:
        roles = ", ".join(sorted(caller.roles))
        raise PermissionDenied(
            f"a credential of the role {roles} cannot register a member of the role {role}",
            metadata={"worker_id": member.worker_id, "role": role},
        )
    require_own_name(member.worker_id)


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """The gRPC side of a store.

    `prefix_hash_key` overrides the store's key, unless it is 0.
    """

    def __init__(
        self,
        store: Store,
        max_members: int,
        max_unnamed_members: int,
        prefix_hash_key: int = 0,
        *,
        max_routers: int = 64,
        registrations_per_s: float = 1.0,
    ) -> None:
        self._store = store
        self._max_members = max_members
        self._max_unnamed_members = max_unnamed_members
        self._prefix_hash_key = prefix_hash_key
        self._max_routers = max_routers
        self._registrations = RateByCaller(
            registrations_per_s, max(1.0, _REGISTRATIONS_AT_ONCE * registrations_per_s)
        )
        self._unnamed = RateByCaller(_UNNAMED_PER_S, _UNNAMED_AT_ONCE + max_unnamed_members)

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: _Context
    ) -> registry_pb2.RegisterResponse:
        validation.require(
            {
                **validation.member_violations(request.member, "member"),
                **validation.ttl_violations(request.ttl, "ttl"),
            }
        )
        _require_own_identity(request.member)
        self._require_rate(request.member.worker_id, host_of_peer(context.peer()))
        if request.member.worker_id not in self._store.feed.members:
            self._require_room(request.member.role)
        ttl_s = math.ceil(seconds_from_duration(request.ttl))
        prefix_hash_key = self._prefix_hash_key or await self._store.ensure_prefix_hash_key(
            request.prefix_hash_key
        )
        self._note_offset(request)
        registration = await self._store.register(request.member, ttl_s)
        return registry_pb2.RegisterResponse(
            lease_id=registration.lease_id,
            ttl=duration_from_seconds(registration.ttl_s),
            revision=registration.revision,
            prefix_hash_key=prefix_hash_key,
            registration_order=registration.order,
        )

    def _require_rate(self, worker_id: str, host: str) -> None:
        """Raises QueueFull when a member, or a host without a name in its credential, registers too often.

        Every registration is written to the store, and every watcher reads it.
        """
        rates = [(self._registrations, worker_id)]
        if not current_caller().name:
            rates.append((self._unnamed, host))
        for rate, name in rates:
            if excess_s := rate.excess_s(name):
                raise QueueFull(
                    f"{name} registers too often: wait {excess_s:.1f} s, and find out why it loses its lease",
                    metadata={"queue": "registrations", "worker_id": worker_id},
                    retry_after_s=excess_s,
                )
        for rate, name in rates:
            rate.count(name)

    def _require_room(self, role: registry_pb2.Member.Role.ValueType) -> None:
        """Raises QueueFull when the caller may not register another member."""
        if len(self._store.feed.members) >= self._max_members:
            raise QueueFull(
                f"the registry has reached its limit of {self._max_members} members: raise its max_members",
                metadata={"max_members": str(self._max_members)},
            )
        routers = self._store.feed.member_count(registry_pb2.Member.ROLE_ROUTER)
        if role == registry_pb2.Member.ROLE_ROUTER and routers >= self._max_routers:
            raise QueueFull(
                f"{routers} routers are registered, and every worker works for each of them: raise the registry's "
                "max_routers",
                metadata={"max_routers": str(self._max_routers)},
            )
        if current_caller().name:
            return
        bound = self._max_unnamed_members
        if self._store.feed.member_count(role) >= bound:
            name = _CREDENTIAL_ROLES[role]
            raise QueueFull(
                f"{bound} members of the role {name} are registered, and a credential without a name cannot register "
                "more: give each worker a credential with its name, or raise the registry's max_unnamed_members",
                metadata={"max_unnamed_members": str(bound), "role": name},
            )

    def _note_offset(self, request: registry_pb2.RegisterRequest) -> None:
        """Warns of a clock that is far from this registry's."""
        offset_s = (request.sent_unix_ns - time.time_ns()) / 1e9
        if request.sent_unix_ns and abs(offset_s) >= CLOCK_OFFSET_NOTED_S:
            _LOG.warning(
                "the clock of %s is %.1f s %s this registry's. It is admitted, but times in traces and logs are wrong: "
                "set the clocks of both hosts",
                request.member.worker_id,
                abs(offset_s),
                "ahead of" if offset_s > 0 else "behind",
            )

    async def KeepAlive(
        self, request_iterator: AsyncIterator[registry_pb2.KeepAliveRequest], context: _Context
    ) -> AsyncIterator[registry_pb2.KeepAliveResponse]:
        async for request in request_iterator:
            if request.lease_ids:
                yield registry_pb2.KeepAliveResponse(ended_lease_ids=await self._renew(request))
                continue
            ttl_s = await self._store.keep_alive(request.lease_id)
            ttl = None if ttl_s is None else duration_from_seconds(ttl_s)
            yield registry_pb2.KeepAliveResponse(lease_id=request.lease_id, ttl=ttl)

    async def _renew(self, request: registry_pb2.KeepAliveRequest) -> list[str]:
        """Renews several leases. Returns those that have ended."""
        lease_ids = list(request.lease_ids)
        if request.lease_id:
            validation.require({"lease_id": "excludes lease_ids; put it among them"})
        left_s = await asyncio.gather(*map(self._store.keep_alive, lease_ids))
        return [one for one, ttl_s in zip(lease_ids, left_s, strict=True) if ttl_s is None]

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: _Context
    ) -> registry_pb2.DeregisterResponse:
        await self._store.deregister(request.lease_id)
        return registry_pb2.DeregisterResponse()

    async def Watch(
        self, request: registry_pb2.WatchRequest, context: _Context
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        validation.require(validation.watch_violations(request))
        wanted = WatchFilter(frozenset(request.roles), request.without_layouts)
        async for response in self._store.watch(request.start_revision, wanted):
            yield response

    async def ListMembers(
        self, request: registry_pb2.ListMembersRequest, context: _Context
    ) -> registry_pb2.ListMembersResponse:
        violations: dict[str, str] = {}
        if request.page_size > PAGE_SIZE_MAX:
            violations["page_size"] = f"give 1 to {PAGE_SIZE_MAX}, or 0 for the maximum"
        if request.page_token and not is_worker_id(request.page_token):
            violations["page_token"] = "give the next_page_token of a previous response, or none"
        if request.role not in registry_pb2.Member.Role.values():
            violations["role"] = "give a known role, or none for all"
        validation.require(violations)
        page_size = request.page_size or PAGE_SIZE_MAX
        matching = [
            member
            for worker_id, member in sorted(self._store.feed.members.items())
            if worker_id > request.page_token and request.role in (0, member.role)
        ]
        page = matching[:page_size]
        return registry_pb2.ListMembersResponse(
            members=page,
            next_page_token=page[-1].worker_id if len(matching) > page_size else "",
            revision=self._store.feed.revision,
        )

    async def PutKvDescriptor(
        self, request: registry_pb2.PutKvDescriptorRequest, context: _Context
    ) -> registry_pb2.PutKvDescriptorResponse:
        violations = {
            **validation.reference_violations(request.member, "member"),
            **validation.descriptor_violations(request.descriptor, "descriptor"),
        }
        if not request.lease_id:
            violations["lease_id"] = "give the lease that Register granted"
        validation.require(violations)
        require_own_name(request.member.worker_id)
        revision = await self._store.put_descriptor(
            request.lease_id, request.member, request.descriptor
        )
        return registry_pb2.PutKvDescriptorResponse(revision=revision)

    async def GetKvDescriptor(
        self, request: registry_pb2.GetKvDescriptorRequest, context: _Context
    ) -> registry_pb2.GetKvDescriptorResponse:
        validation.require(validation.reference_violations(request.member, "member"))
        descriptor = await self._store.get_descriptor(request.member)
        return registry_pb2.GetKvDescriptorResponse(descriptor=descriptor)

    async def GetPolicy(
        self, request: registry_pb2.GetPolicyRequest, context: _Context
    ) -> registry_pb2.GetPolicyResponse:
        record = self._store.feed.policy
        return registry_pb2.GetPolicyResponse(policy=record.policy, revision=record.revision)

    async def SetPolicy(
        self, request: registry_pb2.SetPolicyRequest, context: _Context
    ) -> registry_pb2.SetPolicyResponse:
        if not request.HasField("policy"):
            validation.require({"policy": "give the whole policy"})
        validation.require(validation.policy_violations(request.policy, "policy"))
        policy = registry_pb2.Policy()
        policy.CopyFrom(request.policy)
        if not policy.HasField("retry_budget"):
            policy.retry_budget = DEFAULT_RETRY_BUDGET
        revision = await self._store.set_policy(policy, request.expected_revision)
        return registry_pb2.SetPolicyResponse(revision=revision)
