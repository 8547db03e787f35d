"""Runs the requests of this worker's own clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    DecodeFull,
    HeadraceError,
    InvalidRequest,
    QueueFull,
)
from headrace_common.registry.adapters import Adapter, adapters_from_proto
from headrace_common.registry.duties import COMPUTE_PROMPTS
from headrace_common.registry.view import RegistryView
from headrace_decode.admission import Capacity
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.attempts import Attempts
from headrace_decode.http.own_attempt import OwnAttempt
from headrace_decode.http.prefill import RouterPrefills
from headrace_frontend.admission.admission import BoundedResource, Held
from headrace_frontend.admission.fair_share import FairPool
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.attempt import AdmittedRequest, finish_response
from headrace_kv.layout import WorkerRef

_LOG = logging.getLogger(__name__)

_FINAL_ERRORS = (Cancelled, DeadlineExceeded, InvalidRequest)


class BlockShares:
    """Shares the worker's KV blocks among tenants. Requests wait until the engine has room for them beside routers'."""

    def __init__(
        self,
        attempts: Attempts,
        capacity: Capacity,
        weights: Callable[[], Mapping[str, float]],
        wait_s: float,
    ) -> None:
        """`weights`: the current weights of tenants. `wait_s` bounds the wait of requests beyond their share."""
        self._attempts = attempts
        self._capacity = capacity
        self.pool = FairPool(capacity.usable_blocks, weights, queue_above_share=True)
        self._blocks = BoundedResource("blocks", "KV blocks", self.pool, wait_s)
        attempts.notify_room(self._blocks.probe)

    async def acquire(self, request: PreparedRequest, deadline: Deadline) -> Held:
        """Blocks for a request. Raises QueueFull or DeadlineExceeded."""
        needed = self._capacity.blocks_for(len(request.token_ids), request.sampling.max_tokens)
        # The engine rejects a request for more blocks than there are.
        blocks = min(needed, self._capacity.usable_blocks)
        return await self._blocks.acquire(request.tenant, blocks, deadline, request.priority)

    async def start(
        self, held: Held, deadline: Deadline, request: decode_pb2.GenerateRequest
    ) -> DecodeAttempt:
        """Starts an attempt with these blocks, once the engine has room for it. The caller must end it.

        Raises DecodeFull, DeadlineExceeded, or as `Attempts.admit` does.
        """
        while True:
            try:
                return self._attempts.admit(request, deadline)
            except DecodeFull as error:
                full = error
            try:
                await held.wait_again(deadline)
            except QueueFull:
                # The engine's error names what is missing.
                raise full from None


def prefill_worker_count(members: RegistryView, model: str, adapter: Adapter | None) -> int:
    """The prefill workers that serve the model, with this adapter if one is given."""
    return sum(
        member.model == model
        and (adapter is None or adapter in adapters_from_proto(member.adapters))
        for member in members.of_role(*COMPUTE_PROMPTS)
    )


@dataclass(frozen=True, slots=True)
class OwnDispatcher:
    """Runs requests on this worker.

    A prompt goes to a prefill worker through a router. If that fails before the first token, this worker prefills it.

    `members` has the prefill workers and the policy.
    """

    ref: WorkerRef
    model: str
    blocks: BlockShares
    prefills: RouterPrefills
    members: RegistryView

    async def run(self, request: AdmittedRequest) -> None:
        """Fills and finishes the response. Raises the last attempt's error."""
        prepared, record = request.prepared, request.record
        record.slot_wanted()
        with closing(await self.blocks.acquire(prepared, request.deadline)) as held:
            start = partial(self.blocks.start, held, request.deadline)
            remote = self._prefills_remotely(prepared)
            attempt = OwnAttempt(request, self.ref, self.prefills, remote=remote)
            try:
                outcome = await attempt.run(start)
            except HeadraceError as error:
                useless = isinstance(error, _FINAL_ERRORS) or request.response.started
                if useless or not remote or not attempt.reserved:
                    raise
                _LOG.warning("prefilling %s here: %s", prepared.request_id, error.detail)
                attempt = OwnAttempt(request, self.ref, self.prefills, remote=False)
                outcome = await attempt.run(start)
            await finish_response(
                request,
                outcome,
                attempts=len(record.attempts),
                prefill_worker_id=attempt.record.answer.worker_id,
            )

    def _prefills_remotely(self, prepared: PreparedRequest) -> bool:
        missing_min = max(1, self.members.policy.local_prefill_max_tokens)
        return (
            self.prefills.available
            and prepared.placement != inference_pb2.PREFILL_PLACEMENT_LOCAL
            # EnqueueRequest has no images.
            and not prepared.images
            and len(prepared.token_ids) - 1 >= missing_min
            and prefill_worker_count(self.members, self.model, prepared.adapter) > 0
        )
