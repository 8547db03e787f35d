"""A decode worker gets KV of a request's first tokens into its cache, from another worker that has it."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import receipt_pb2, sampling_pb2
from headrace.kv.v1 import prefix_pb2, prefix_pb2_grpc
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import DeadlineExceeded, HeadraceError
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.status import error_from_rpc
from headrace_common.rpc.token_ids import token_ids_message
from headrace_common.rpc.trace_context import carrier_of
from headrace_frontend.request.validation import decode_request
from headrace_frontend.running.attempt import AdmittedRequest
from headrace_kv.compatibility import layout_hash
from headrace_kv.layout import WorkerRef
from headrace_router.decode_link.answer import LinkedAnswer, Logprobs
from headrace_router.prefill_queue.task import SignTask
from headrace_router.workers.connection import LoadReservation
from headrace_router.workers.table import Worker

_LOG = logging.getLogger(__name__)
_ANSWER_WAIT_S: Final = 0.1


class _Warmed(LinkedAnswer):
    """A request on the target for the KV of its prompt. Its first token is not used."""

    def __init__(self, vocabulary_size: int) -> None:
        loop = asyncio.get_running_loop()
        self.vocabulary_size = vocabulary_size
        self.reserved: asyncio.Future[decode_pb2.Reserved] = loop.create_future()
        self.ended: asyncio.Future[HeadraceError | None] = loop.create_future()
        """Done when the target has the KV, or with its error."""

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        if not self.reserved.done():
            self.reserved.set_result(reserved)

    def add_batch(self, token_ids: Any, logprobs: Logprobs, prompt_logprobs: Logprobs) -> bool:
        self._end(None)
        return True

    def finish(self, finished: decode_pb2.Finished) -> None:
        if self.on_receipt is not None:
            self.on_receipt(finished.receipt)
        self._end(None)

    def worker_failed(self, error: HeadraceError) -> None:
        self._end(error)

    def fail(self, error: Exception) -> None:
        self._end(error if isinstance(error, HeadraceError) else HeadraceError(str(error)))

    def _end(self, error: HeadraceError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


@dataclass(frozen=True, slots=True)
class KvSource:
    """A worker that has KV of the tokens. `asked` states of which request, or of which tokens."""

    ref: WorkerRef
    channel: grpc.aio.Channel
    asked: prefix_pb2.SendPrefixRequest


@dataclass(frozen=True, slots=True)
class Warming:
    """A request on a target for the KV of the first tokens of another request. `load` is reserved there.

    `sign` makes the ticket with which the source sends. `on_receipt` gets what it has cost there, if that comes.
    """

    request: AdmittedRequest
    target: Worker
    load: LoadReservation
    ticket_key_id: bytes
    sign: SignTask
    on_receipt: Callable[[receipt_pb2.Receipt], None] | None = None

    async def run(
        self,
        token_ids: array[int],
        answer_tokens: int,
        source: KvSource | None,
        timeout_s: float,
        stop: asyncio.Future[Any],
    ) -> int | None:
        """Returns the bytes sent, once the target has the KV of all tokens but the last, or `stop` is done.

        Without a source, the target computes it. None when the source cannot send. Raises DeadlineExceeded after
        `timeout_s`, or the error of the target.
        """
        request = self.request
        call = decode_request(
            request.prepared,
            new_transfer_id(),
            incarnation=self.target.ref.incarnation,
            remote_prefill=source is not None,
        )
        call.sampling.CopyFrom(
            sampling_pb2.SamplingParams(temperature=0.0, max_tokens=answer_tokens)
        )
        call.ticket_key_id = self.ticket_key_id
        for name in ("stop_token_ids", "keep"):
            call.ClearField(name)
        warmed = _Warmed(request.prepared.codec.vocabulary_size)
        if self.on_receipt is not None:
            warmed.report_late(self.on_receipt)
        link = self.load.links.usable()
        link.open(
            call,
            token_ids_message(token_ids),
            request.deadline,
            carrier_of(request.record.context),
            warmed,
            request.prepared.images,
        )
        try:
            async with asyncio.timeout(min(timeout_s, request.deadline.remaining_s())):
                return await self._fill(call.transfer_id, warmed, source, stop)
        except TimeoutError:
            raise DeadlineExceeded("the KV did not arrive at the target in time") from None
        finally:
            link.release(warmed)

    async def _fill(
        self, transfer_id: str, warmed: _Warmed, source: KvSource | None, stop: asyncio.Future[Any]
    ) -> int | None:
        sent_bytes = 0
        await first_of(stop, warmed.reserved, warmed.ended)
        sends, asking = False, asyncio.get_running_loop().create_future()
        if source is not None and warmed.reserved.done() and not stop.done():
            reserved = warmed.reserved.result()
            if sends := reserved.start_token < reserved.end_token:
                asking = asyncio.ensure_future(self._send(source, transfer_id, reserved))
        try:
            await first_of(stop, warmed.ended, asking)
            if sends and warmed.ended.done():
                # The answer follows the last byte.
                await first_of(stop, asking, timeout_s=_ANSWER_WAIT_S)
            if asking.done():
                sent_bytes = asking.result().payload_bytes
                await first_of(stop, warmed.ended)
        except grpc.aio.AioRpcError as error:
            _LOG.info("%s lacks KV: %s", self.target.ref, error_from_rpc(error).detail)
            return None
        finally:
            asking.cancel()
        if warmed.ended.done() and (failure := warmed.ended.result()) is not None:
            raise failure
        return sent_bytes

    def _send(self, source: KvSource, transfer_id: str, reserved: decode_pb2.Reserved) -> Any:
        """Has the source send what the target lacks."""
        target = self.target
        task = prefill_pb2.PrefillTask(
            transfer_id=transfer_id,
            decode_worker_id=target.ref.worker_id,
            decode_incarnation=target.ref.incarnation,
        )
        asked = prefix_pb2.SendPrefixRequest(
            worker_id=target.ref.worker_id,
            incarnation=target.ref.incarnation,
            ticket=self.sign(task, source.ref, layout_hash(target.layout)),
            start_token=reserved.start_token,
            end_token=reserved.end_token,
            target_transfer_id=transfer_id,
            target_endpoint=target.endpoint,
        )
        asked.MergeFrom(source.asked)
        # It is cancelled when the target has waited for long enough.
        stub = prefix_pb2_grpc.PrefixServiceStub(source.channel)
        return stub.SendPrefix(asked, timeout=self.request.deadline.remaining_s())


async def first_of(*events: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Waits until one of the events has happened, or for `timeout_s`."""
    await asyncio.wait(set(events), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
