"""One attempt at a response, driven by what its decode worker sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import keep_pb2, sampling_pb2
from headrace_common.errors import ProtocolViolation
from headrace_common.identity import new_transfer_id
from headrace_frontend.promises import kept_of
from headrace_frontend.request.validation import decode_request
from headrace_frontend.running.completion import AdmittedRequest, AttemptOutcome
from headrace_kv.layout import WorkerRef


class RunningAttempt:
    """Adds tokens to the response as they arrive. It continues after the tokens that the response has already.

    Each method reports an event. `ended` has the outcome, or the error with which the attempt failed. Later events are
    ignored.
    """

    def __init__(self, request: AdmittedRequest, decode_worker: WorkerRef, *, remote: bool) -> None:
        """`remote`: whether a prefill worker computes the prompt."""
        self.decode_worker = decode_worker
        self.ended: asyncio.Future[AttemptOutcome] = asyncio.get_running_loop().create_future()
        self.response = request.response
        self._prepared = request.prepared
        self._given = request.response.generated
        self._records = request.record.attempts
        self._call = decode_request(
            request.prepared,
            new_transfer_id(),
            self._given,
            incarnation=decode_worker.incarnation,
            remote_prefill=remote,
        )
        self.vocabulary_size = request.prepared.codec.vocabulary_size
        self._reserved: decode_pb2.Reserved | None = None
        self._generates = False
        """Whether the decode worker has computed a token from the KV cache."""
        request.response.attempt_started(decode_worker, self._stopped, self._drained)

    def add_batch(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.TokenLogprobs] = (),
        prompt_logprobs: Sequence[sampling_pb2.TokenLogprobs] = (),
    ) -> bool:
        """New tokens. False when there is no room for more before `_drained`."""
        if self.ended.done():
            return True
        if not self._generates:
            self._begin(len(token_ids))
        return self.response.add_tokens(token_ids, logprobs, prompt_logprobs)

    def finish(self, finished: decode_pb2.Finished) -> None:
        """The decode worker has ended the request."""
        self._require_reservation()
        if self._records:
            self._records[-1].decoded(finished.receipt)
        kept = kept_of(finished, self._call.incarnation, self._call.transfer_id)
        self._end(
            self._outcome(
                finished.reason, finished.cached_tokens, finished.transferred_tokens, kept
            )
        )

    def fail(self, error: Exception) -> None:
        """The attempt has failed."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def outcome_of(self, reason: sampling_pb2.FinishReason.ValueType) -> AttemptOutcome:
        """The outcome for a response that ended before the decode worker's Finished, by the reservation's counts."""
        reserved = self._reserved
        if not self._call.remote_prefill or reserved is None:
            return AttemptOutcome(reason)
        start, end = reserved.start_token, reserved.end_token
        return self._outcome(reason, start, end - start)

    def _begin(self, count: int) -> None:
        """The first tokens have arrived."""
        self._require_reservation()
        self._generates = True

    def _stopped(self) -> None:
        """A stop string is complete."""
        self._end(self.outcome_of(sampling_pb2.FINISH_REASON_STOP))

    def _drained(self) -> None:
        """There is room for tokens again."""

    def _require_reservation(self) -> None:
        if self._reserved is None:
            raise ProtocolViolation("the decode worker did not send Reserved first")

    def _end(self, outcome: AttemptOutcome) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)

    def _outcome(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        cached_tokens: int,
        transferred_tokens: int,
        kept: keep_pb2.Kept | None = None,
    ) -> AttemptOutcome:
        """Counts only tokens of the prompt: an attempt after others also computes tokens of the completion again."""
        prompt_tokens = len(self._prepared.token_ids)
        cached = min(cached_tokens, prompt_tokens)
        return AttemptOutcome(reason, cached, min(transferred_tokens, prompt_tokens - cached), kept)
