"""A decode worker gets KV of a request's first tokens into its cache, from another worker that has it.

For a prompt that it computes: docs/architecture/prefix-fetch.md. For an answer that moves: docs/architecture/moves.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
import numpy as np

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import receipt_pb2, sampling_pb2
from headrace.kv.v1 import prefix_pb2, prefix_pb2_grpc
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import DeadlineExceeded, DecodeFull, HeadraceError, WorkerGone
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.status import error_from_rpc
from headrace_common.rpc.token_ids import token_ids_message
from headrace_common.rpc.trace_context import carrier_of
from headrace_frontend.request.validation import decode_request
from headrace_frontend.running.attempt import AdmittedRequest
from headrace_kv.compatibility import layout_hash
from headrace_kv.layout import STATE, WorkerRef
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_router.decode_link.answer import LinkedAnswer, Logprobs
from headrace_router.dispatch.messages import worker_gone
from headrace_router.placement import Decision
from headrace_router.prefill_queue.task import SignTask
from headrace_router.prefix_cache.cached_prompts import CachedPrompts
from headrace_router.tracing.attempt_record import Move, RoutedAttempt
from headrace_router.workers.connection import LoadReservation
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import Worker

_LOG = logging.getLogger(__name__)
_ANSWER_WAIT_S: Final = 0.1
FETCH_MIN_S: Final = 0.1
FETCH_S: Final = 2.0
"""A fetch delays a prompt for as long as computing its tokens takes, within these bounds."""
REFUSED: Final = "REFUSED"
"""The outcome of a fetch from a worker that does not send."""


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
        max_tokens: int,
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
        call.sampling.CopyFrom(sampling_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens))
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
            if asking.cancelled():
                # The router has closed its channel to the source.
                return None
            if asking.done():
                sent_bytes = asking.result().payload_bytes
                await first_of(stop, warmed.ended)
        except grpc.aio.AioRpcError as error:
            _LOG.info("%s lacks KV: %s", self.target.ref, error_from_rpc(error).detail)
            return None
        except grpc.aio.UsageError:
            # The channel to the source was closed before.
            return None
        finally:
            asking.cancel()
        if warmed.ended.done() and (failure := warmed.ended.result()) is not None:
            gone = isinstance(failure, WorkerGone)
            problem = f"vanished: {failure.detail}"
            raise worker_gone(self.target.ref, problem, failure) if gone else failure
        return sent_bytes

    async def _send(self, source: KvSource, transfer_id: str, reserved: decode_pb2.Reserved) -> Any:
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
        return await stub.SendPrefix(asked, timeout=self.request.deadline.remaining_s())


async def first_of(*events: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Waits until one of the events has happened, or for `timeout_s`."""
    await asyncio.wait(set(events), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


@dataclass(eq=False, slots=True)
class PrefixFetches:
    """Fetches prefixes for prompts that decode workers compute. Any failure costs time only. One event loop owns it.

    `sign` makes the ticket with which a source sends. `count` gets the decode worker of each fetch, its error's reason,
    or "", and its tokens.
    """

    workers: WorkerDirectory
    prefixes: CachedPrompts
    ticket_key_id: bytes
    sign: SignTask
    count: Callable[[str, str, int], None]
    rule: FetchRule

    async def fetch(
        self,
        request: AdmittedRequest,
        token_ids: array[int],
        decision: Decision,
        load: LoadReservation,
        record: RoutedAttempt,
    ) -> None:
        """Returns once the decode worker, which has `load`, has in its cache what is worth to be fetched."""
        found = self._source(request, token_ids, decision)
        if found is None:
            return
        source, due_bytes, limit_s = found
        ref, tokens = source.ref, len(source.asked.generated_token_ids)
        target, reason, sent_bytes = decision.worker.ref, "", None

        def charge(receipt: receipt_pb2.Receipt) -> None:
            # The attempt counts the tokens as cached.
            receipt.cached_tokens = 0
            record.charge(receipt)

        warming = Warming(request, decision.worker, load, self.ticket_key_id, self.sign, charge)
        never, start_ns = asyncio.get_running_loop().create_future(), time.monotonic_ns()
        try:
            sent_bytes = await warming.run(token_ids[: tokens + 1], 1, source, limit_s, never)
        except HeadraceError as error:
            reason = error.reason
            _LOG.warning("%s computes a prefix: %s", target, error.detail)
        end_ns, link = time.monotonic_ns(), _link(ref, target)
        if sent_bytes is not None or reason == DeadlineExceeded.reason:
            # One that is late takes this long at least. So a slow link is learned.
            due_bytes = int(due_bytes) if sent_bytes is None else sent_bytes
            self.rule.fetched(link, due_bytes, 1e-9 * (end_ns - start_ns))
        if sent_bytes is None and reason != DecodeFull.reason:
            self.rule.failed(link)
        reason = reason or ("" if sent_bytes is not None else REFUSED)
        tokens = 0 if reason else tokens - decision.decode_cached_tokens
        self.count(target.worker_id, reason, tokens)
        names, times = (ref.worker_id, target.worker_id), (start_ns, end_ns, 0)
        record.fetches.append(Move(*names, sent_bytes or 0, *times, tokens, reason))

    def _source(
        self, request: AdmittedRequest, token_ids: array[int], decision: Decision
    ) -> tuple[KvSource, float, float] | None:
        """Where to fetch how many tokens from, their bytes, and the longest time. None: compute them."""
        prepared, target, start = request.prepared, decision.worker, decision.decode_cached_tokens
        workers, layout, needed = self.workers, target.layout, len(token_ids) - 1
        if (
            decision.remote
            or needed - start < self.rule.min_tokens
            or prepared.images
            or prepared.adapter is not None
            or prepared.sampling.HasField("prompt_logprobs")
            or any(group.kind == STATE for group in layout.groups)
        ):
            return None
        table = workers.table(prepared.model, fresh=False)
        salt, load = prepared.cache_salt, table.load(target.ref)
        unfit = table.flags({target.ref, *workers.distrusted(target.ref)}) | table.draining
        cached = self.prefixes.cached_tokens(table, token_ids, salt, pooled=False)
        cached = np.where(table.reachable & ~unfit, cached, 0.0)
        row = cached.argmax()
        end = min(int(cached[row]), needed)
        end -= end % layout.block_tokens
        if load is None or end <= start:
            return None
        ref = table.workers[row].ref
        payload_bytes, link = (end - start) * layout.token_bytes, _link(ref, target.ref)
        channel, steps = workers.channel_of(ref.incarnation), load.times.steps
        if channel is None or not self.rule.prefers_fetch(link, start, end, payload_bytes, steps):
            return None
        asked = prefix_pb2.SendPrefixRequest(generated_token_ids=token_ids[:end], cache_salt=salt)
        step_s = load.times.step_s(end - start, prior_tokens=start) if self.rule.gain else None
        limit_s = FETCH_S if step_s is None else min(FETCH_S, max(FETCH_MIN_S, step_s))
        return KvSource(ref, channel, asked), payload_bytes, limit_s


def _link(source: WorkerRef, target: WorkerRef) -> str:
    return f"{source.worker_id}>{target.worker_id}"
