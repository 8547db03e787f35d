"""PrefixService: sends the cached KV of requests to their prefill workers, or to the decode workers they move to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc.aio

from headrace.kv.v1 import prefix_pb2, prefix_pb2_grpc
from headrace_common.access.roles import Role, current_caller, require_own_name
from headrace_common.deadlines import Deadline
from headrace_common.errors import DecodeFull, InvalidRequest, NotFound, PermissionDenied
from headrace_common.limits import TRANSFER_ID_CHARACTERS_MAX
from headrace_decode.attempts import Attempts
from headrace_engine.interface import DecodeWork, Engine, PrefillWork, Sampling
from headrace_engine.proto import require_vocabulary
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import TransferTarget, prefix_transfer
from headrace_kv.prefix.cache_salt import salt_violations
from headrace_kv.prefix.images import whole_images_end
from headrace_kv.tickets import HandoffTickets

_TIMEOUT_S: Final = 10.0
"""For callers without a deadline."""
SENDS_MAX: Final = 4
"""Prefixes that are sent at once: each one takes time of the answers that run here."""

Context = grpc.aio.ServicerContext[prefix_pb2.SendPrefixRequest, prefix_pb2.SendPrefixResponse]


@dataclass(eq=False, slots=True)
class PrefixServicer(prefix_pb2_grpc.PrefixServiceServicer):
    """Sends prefixes of live attempts to the prefill workers with their tickets, as prefill workers send theirs.

    `endpoint_of` finds the internal address of a registered prefill worker, or raises StaleIncarnation. The address is
    not the caller's to choose: this worker presents its own credential there.
    """

    engine: Engine
    attempts: Attempts
    tickets: HandoffTickets
    endpoint_of: Callable[[WorkerRef], str]
    _sending: int = field(default=0, init=False)

    async def SendPrefix(
        self, request: prefix_pb2.SendPrefixRequest, context: Context
    ) -> prefix_pb2.SendPrefixResponse:
        """See prefix.proto."""
        work = self._checked_work(request, Deadline.from_context(context, _TIMEOUT_S))
        # It shares the blocks of its request, but for those that this one still loads from lower tiers.
        shares = bool(request.transfer_id) and len(self.engine.prefix_events.tiers) == 1
        if self._sending >= SENDS_MAX:
            raise DecodeFull(
                f"{SENDS_MAX} prefixes are sent already", metadata={"maxsize": str(SENDS_MAX)}
            )
        self.attempts.admit_sending(work.target.transfer_id, 1 if shares else request.end_token)
        self._sending += 1
        try:
            outcome = await self.engine.prefill(work)
        finally:
            self._sending -= 1
        return prefix_pb2.SendPrefixResponse(
            payload_bytes=sum(report.payload_bytes for report in outcome.reports)
        )

    def _checked_work(
        self, request: prefix_pb2.SendPrefixRequest, deadline: Deadline
    ) -> PrefillWork:
        """The hand-over that the caller asks for. Only a valid ticket shows whether the request exists."""
        prefill, name = WorkerRef(request.worker_id, request.incarnation), request.transfer_id
        moved = request.target_transfer_id
        if not 0 < len(name or moved) <= TRANSFER_ID_CHARACTERS_MAX >= len(moved):
            raise InvalidRequest(
                {"transfer_id": f"give 1 to {TRANSFER_ID_CHARACTERS_MAX} characters"}
            )
        _require_role(Role.ROUTER if moved else Role.PREFILL)
        attempt = self.attempts.find(name) if name else None
        if not moved:
            require_own_name(prefill.worker_id)
            signer = None if attempt is None else attempt.signer
            self.tickets.check(request.ticket, name, prefill, signer)
        if name and (attempt is None or (attempt.reservation is None and not moved)):
            raise NotFound(
                f"no request of transfer {name} has KV here", metadata={"transfer_id": name}
            )
        given = tuple(request.generated_token_ids)
        if attempt is None:
            if violations := salt_violations(request.cache_salt):
                raise InvalidRequest(violations)
            require_vocabulary(given, (), self.engine.vocabulary_size)
            own = DecodeWork("", given, Sampling(), False, cache_salt=request.cache_salt)
            token_ids, cached_tokens = given, len(given)
        elif moved or attempt.reservation is None:
            own, token_ids = attempt.work, attempt.work.token_ids + given
            cached_tokens = len(token_ids) - 1
        else:
            own, token_ids = attempt.work, attempt.work.token_ids
            cached_tokens = attempt.reservation.start_token
        if not request.start_token < request.end_token <= cached_tokens:
            remedy = f"give a token above start_token, and at most {cached_tokens}"
            raise InvalidRequest({"end_token": remedy})
        if whole_images_end(request.end_token, own.images) != request.end_token:
            raise InvalidRequest({"end_token": "must not divide the placeholders of an image"})
        return PrefillWork(
            token_ids=token_ids[: request.end_token],
            target=TransferTarget(
                transfer_id=moved or prefix_transfer(name),
                decode=prefill,
                # A router gives the address with each task too.
                handoff_endpoint=request.target_endpoint if moved else self.endpoint_of(prefill),
                start_token=request.start_token,
                end_token=request.end_token,
                deadline_s=deadline.monotonic_s,
                ticket=request.ticket,
            ),
            cache_salt=own.cache_salt,
            adapter=own.adapter,
            priority=own.priority,
            images=tuple(one for one in own.images if one.start_token < request.end_token),
            cached_only=True,
        )


def _require_role(role: Role) -> None:
    """Raises PermissionDenied. In the table of roles, both callers have one row."""
    if role not in current_caller().roles:
        raise PermissionDenied(f"only the role {role} may ask for this", metadata={"role": role})
