"""Checks of a live deployment: the registry, every member's state, and the clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import list_members, open_router_internally, worker_status
from headrace_cli.doctor.finding import Finding, Verdict
from headrace_common.errors import HeadraceError
from headrace_common.limits import CLOCK_OFFSET_NOTED_S

_Role = registry_pb2.Member.Role


async def find_members(registry: str) -> tuple[list[registry_pb2.Member], list[Finding]]:
    """The registered members, and what is wrong with their list."""
    try:
        members = await list_members(registry)
    except HeadraceError as error:
        remedy = "start it, name it with --registry, or give this command the role operator"
        return [], [Finding(Verdict.ERROR, "registry", error.detail, remedy)]
    findings = [Finding(Verdict.OK, "registry", f"{registry} lists {len(members)} members")]
    roles = {member.role for member in members}
    for role, name in ((_Role.ROLE_ROUTER, "router"), (_Role.ROLE_DECODE, "decode worker")):
        if role not in roles:
            findings.append(
                Finding(Verdict.ERROR, "registry", f"no {name} is registered", f"start a {name}")
            )
    return members, findings


async def check_members(members: Sequence[registry_pb2.Member]) -> list[Finding]:
    """One finding for each member, and one more for each clock that is wrong."""
    found = await asyncio.gather(*map(_check_member, members))
    return [finding for findings in found for finding in findings]


async def _check_member(member: registry_pb2.Member) -> list[Finding]:
    start_ns = time.time_ns()
    try:
        if member.role == _Role.ROLE_ROUTER:
            async with open_router_internally(member.endpoint) as router:
                await router.prefix_key_fingerprint()
            return [Finding(Verdict.OK, member.worker_id, "answers")]
        status = await worker_status(member.endpoint)
    except HeadraceError as error:
        remedy = f"read its log, and check that this host reaches {member.endpoint}"
        return [Finding(Verdict.ERROR, member.worker_id, error.detail, remedy)]
    findings = [_check_state(member.worker_id, status)]
    return findings + clock_findings(
        member.worker_id, status.sent_unix_ns, start_ns, time.time_ns()
    )


def _check_state(worker_id: str, status: worker_pb2.WatchStatusResponse) -> Finding:
    if status.state == worker_pb2.WatchStatusResponse.STATE_SERVING:
        return Finding(Verdict.OK, worker_id, "serves")
    remedy = "start another worker, unless its end is wanted"
    return Finding(Verdict.WARNING, worker_id, "drains, and takes no new requests", remedy)


def clock_findings(
    worker_id: str, sent_unix_ns: int, start_unix_ns: int, end_unix_ns: int
) -> list[Finding]:
    """A warning when a message with this time, received between two times here, shows another clock."""
    if not sent_unix_ns:
        return []
    early_s, late_s = (start_unix_ns - sent_unix_ns) / 1e9, (sent_unix_ns - end_unix_ns) / 1e9
    offset_s = max(early_s, late_s)
    if offset_s < CLOCK_OFFSET_NOTED_S:
        return []
    where = "behind" if early_s > late_s else "ahead of"
    detail = f"its clock is at least {offset_s:.1f} s {where} this host's"
    return [Finding(Verdict.WARNING, worker_id, detail, "set the clocks of both hosts, as by NTP")]
