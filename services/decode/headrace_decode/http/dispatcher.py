"""Runs the requests of this worker's own clients."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import Cancelled, DeadlineExceeded, HeadraceError, InvalidRequest
from headrace_common.registry.adapters import adapters_from_proto
from headrace_common.registry.duties import COMPUTE_PROMPTS
from headrace_common.registry.view import RegistryView
from headrace_decode.http.own_attempt import OwnAttempt
from headrace_decode.http.prefill import RouterPrefills
from headrace_decode.http.room import BlockShares, RoomQueue
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.attempt import AdmittedRequest, finish_response
from headrace_kv.layout import WorkerRef

_LOG = logging.getLogger(__name__)

_FINAL_ERRORS = (Cancelled, DeadlineExceeded, InvalidRequest)


@dataclass(frozen=True, slots=True)
class OwnDispatcher:
    """Runs requests on this worker.

    A prompt goes to a prefill worker through a router. If that fails before the first token, this worker prefills it.

    `members` has the prefill workers and the policy.
    """

    ref: WorkerRef
    model: str
    room: RoomQueue
    blocks: BlockShares
    prefills: RouterPrefills
    members: RegistryView

    async def run(self, request: AdmittedRequest) -> None:
        """Fills and finishes the response. Raises the last attempt's error."""
        request.record.slot_wanted()
        with closing(await self.blocks.acquire(request.prepared, request.deadline)):
            await self._run(request)

    async def _run(self, request: AdmittedRequest) -> None:
        remote = self._prefills_remotely(request.prepared)
        attempts = 1
        attempt = OwnAttempt(request, self.ref, self.prefills, remote=remote)
        try:
            outcome = await attempt.run(self.room)
        except HeadraceError as error:
            useless = isinstance(error, _FINAL_ERRORS) or request.response.started
            if useless or not remote or not attempt.reserved:
                raise
            _LOG.warning("prefilling %s here: %s", request.prepared.request_id, error.detail)
            attempts = 2
            attempt = OwnAttempt(request, self.ref, self.prefills, remote=False)
            outcome = await attempt.run(self.room)
        await finish_response(
            request, outcome, attempts=attempts, prefill_worker_id=attempt.prefill_worker_id
        )

    def _prefills_remotely(self, prepared: PreparedRequest) -> bool:
        adapter = prepared.adapter
        missing_min = max(1, self.members.policy.local_prefill_max_tokens)
        return (
            self.prefills.available
            and prepared.placement != inference_pb2.PREFILL_PLACEMENT_LOCAL
            # EnqueueRequest has no images.
            and not prepared.images
            and len(prepared.token_ids) - 1 >= missing_min
            and any(
                member.model == self.model
                and (adapter is None or adapter in adapters_from_proto(member.adapters))
                for member in self.members.of_role(*COMPUTE_PROMPTS)
            )
        )
