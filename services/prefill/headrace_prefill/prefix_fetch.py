"""Fetches the KV of prompts' first tokens from the decode workers that hold it, instead of computing it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import grpc.aio

from headrace.kv.v1 import prefix_pb2, prefix_pb2_grpc
from headrace.prefill.v1 import prefill_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import Cancelled, DecodeFull, HeadraceError, NotFound
from headrace_common.rpc.channel import open_channel
from headrace_common.tasks import Recent
from headrace_engine.interface import Arrived, Engine, LayersArrived, PrefillWork, Recompute
from headrace_engine.kv_fetch import ALL_LAYERS, fetch_kv, late_layers_s
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_kv.layout import STATE, WorkerRef
from headrace_kv.messages import Reservation, TransferTarget, prefix_transfer
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_kv.prefix.images import whole_images_end
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary
from headrace_prefill.config import FetchingConfig

_LOG = logging.getLogger(__name__)

_CHANNELS_MAX: Final = 256
# The answer follows the last layer. Without it, the call is cancelled.
_ANSWER_WAIT_S: Final = 0.5
_END_WAIT_S: Final = 5.0
# The link has no part in these.
_HARMLESS: Final = (Cancelled, NotFound, DecodeFull)


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """A fetch that has ended. `reason` is an error's, or ""."""

    token_count: int
    payload_bytes: int
    reason: str
    start_unix_ns: int
    end_unix_ns: int


@dataclass(eq=False, slots=True, kw_only=True)
class PrefixFetcher:
    """Offers each task a fetch, and owns the channels to decode workers.

    A fetch that takes longer than `timeout_s` has failed.
    """

    ref: WorkerRef
    engine: Engine
    receiver: Receiver
    rule: FetchRule
    timeout_s: float
    on_ended: Callable[[FetchRecord], None]
    open_channel: Callable[[str], grpc.aio.Channel]
    _channels: Recent[str, grpc.aio.Channel] = field(
        default_factory=partial(Recent, _CHANNELS_MAX), init=False
    )

    def offer(self, work: PrefillWork, part: prefill_pb2.FirstPart) -> PrefixFetch | None:
        """The fetch of a task's first tokens: of the `part` that another worker computes meanwhile, unless it is empty.

        Else of what decode has, up to an image that decode has in part. None when it has too little, or fetching is not
        worth it.
        """
        target = work.target
        if part.end_token and self.engine.computes_beside:
            return ComputedPart(self, target, part)
        end = target.start_token
        if work.images:
            block_tokens = self.engine.descriptor.layout.block_tokens
            end = whole_images_end(end, work.images, block_tokens)
        if not target.ticket or not self.rule.may_fetch(target.decode.worker_id, end):
            return None
        return PrefixFetch(self, target, end)

    async def close(self) -> None:
        """Closes every channel."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to a decode worker. An old one closes when nothing refers to it."""
        channel = self._channels.get(endpoint) or self.open_channel(endpoint)
        self._channels[endpoint] = channel
        return channel


class PrefixFetch:
    """The fetch for one task: a RemotePrefix for the engine. Any failure of it costs time only."""

    def __init__(self, fetcher: PrefixFetcher, target: TransferTarget, end_token: int) -> None:
        self.record: FetchRecord | None = None
        self.transfer_id = prefix_transfer(target.transfer_id)
        """See RemotePrefix."""
        self.end_token = end_token
        """See RemotePrefix."""
        self.least_tokens = fetcher.rule.min_tokens
        """See RemotePrefix."""
        self.error: HeadraceError | None = None
        """What has ended the task, since the engine computes with KV that does not come."""
        self._fetcher = fetcher
        self._target = target
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    def start(self, reservation: Reservation) -> bool:
        """See RemotePrefix."""
        target = self._target
        start, end = reservation.start_token, reservation.end_token
        engine, decode = self._fetcher.engine, target.decode.worker_id
        payload_bytes = (end - start) * engine.descriptor.layout.token_bytes
        if not self._fetcher.rule.prefers_fetch(
            decode, start, end, payload_bytes, engine.step_times
        ):
            return False
        # A router has signed it for the other direction of this very hand-over. Decode verifies that.
        return self._start(reservation, self._fetcher.timeout_s, (target.decode, target.ticket))

    def _start(
        self, reservation: Reservation, timeout_s: float, sender: tuple[WorkerRef, bytes]
    ) -> bool:
        if self._closed:
            return False
        fetcher, target = self._fetcher, self._target
        deadline = Deadline(min(target.deadline_s, time.monotonic() + timeout_s))
        try:
            transfer = fetcher.receiver.reserve(reservation, deadline, sender=sender)
        except HeadraceError as error:
            _LOG.warning("the prefix of %s is computed: %s", target.transfer_id, error.detail)
            return False
        self._running = asyncio.create_task(
            self._run(transfer), name=f"prefix of {target.transfer_id}"
        )
        return True

    async def close(self) -> None:
        """Ends the fetch, because its task has ended. Reports the end to the engine before it returns."""
        self._closed = True
        if self._running is None or self._running.done():
            return
        name = self.transfer_id
        self._fetcher.receiver.cancel(name, Cancelled.reason, "the prefill task has ended")
        _, late = await asyncio.wait({self._running}, timeout=_END_WAIT_S)
        if late:
            _LOG.error("transfer %s did not end in time", name)

    async def _run(self, transfer: IncomingTransfer) -> None:
        start_unix_ns, reservation = time.time_ns(), transfer.reservation
        token_count = reservation.end_token - reservation.start_token
        payload_bytes, reason = 0, ""
        try:
            payload_bytes = (await self._fetch(transfer, token_count)).payload_bytes
        except HeadraceError as failure:
            reason = failure.reason
            if not self._closed:
                _LOG.warning("%s is not fetched: %s", self.transfer_id, failure.detail)
            self._failed(failure)
        self.record = FetchRecord(token_count, payload_bytes, reason, start_unix_ns, time.time_ns())
        self._fetcher.on_ended(self.record)

    async def _fetch(self, transfer: IncomingTransfer, token_count: int) -> TransferSummary:
        fetcher, start_s = self._fetcher, time.monotonic()

        def whole(summary: TransferSummary) -> None:
            fetcher.engine.transfer_event(Arrived(self.transfer_id))
            fetch_s = time.monotonic() - start_s
            decode = self._target.decode.worker_id
            fetcher.rule.fetched(decode, summary.payload_bytes, fetch_s)

        asking = self._ask(transfer)
        return await fetch_kv(fetcher.receiver, transfer, asking, whole, _ANSWER_WAIT_S)

    def _failed(self, failure: HeadraceError) -> None:
        if not self._closed and not isinstance(failure, _HARMLESS):
            self._fetcher.rule.failed(self._target.decode.worker_id)
        self._fetcher.engine.transfer_event(Recompute(self.transfer_id))

    async def _ask(self, transfer: IncomingTransfer) -> None:
        """Has the decode worker send. Returns when it has sent everything."""
        target, reservation = self._target, transfer.reservation
        channel = self._fetcher.channel(target.handoff_endpoint)
        stub = prefix_pb2_grpc.PrefixServiceStub(channel)
        request = prefix_pb2.SendPrefixRequest(
            transfer_id=target.transfer_id,
            worker_id=self._fetcher.ref.worker_id,
            incarnation=self._fetcher.ref.incarnation,
            ticket=target.ticket,
            start_token=reservation.start_token,
            end_token=reservation.end_token,
        )
        await stub.SendPrefix(request, timeout=transfer.deadline.remaining_s())


class ComputedPart(PrefixFetch):
    """The first tokens of a divided prompt, which another prefill worker computes and sends, layer by layer.

    The engine computes the others from the first layer on. A failure before it costs time only. Then it ends the task,
    since the engine computes with KV that does not come: the task is the current one of asyncio.
    """

    def __init__(
        self, fetcher: PrefixFetcher, target: TransferTarget, part: prefill_pb2.FirstPart
    ) -> None:
        super().__init__(fetcher, target, part.end_token)
        self.least_tokens = 1
        self._sender = WorkerRef(part.worker_id, part.incarnation), part.handoff_ticket
        self._task = asyncio.current_task()
        self._begun = False
        fetcher.receiver.expect(self.transfer_id)

    def start(self, reservation: Reservation) -> bool:
        late_s = late_layers_s(self._fetcher.engine.step_times, reservation.end_token)
        return self._start(reservation, late_s, self._sender)

    async def close(self) -> None:
        if self._running is None:
            self._fetcher.receiver.cancel(self.transfer_id, Cancelled.reason, "it is computed here")
        await super().close()
        if self._begun and (self.record is None or self.record.reason):
            # By now the task's own transfer has ended, so that nothing of the step is sent.
            self._fetcher.engine.transfer_event(LayersArrived(self.transfer_id, ALL_LAYERS))

    async def _fetch(self, transfer: IncomingTransfer, token_count: int) -> TransferSummary:
        def layers_arrived(layer_count: int) -> None:
            self._begun = True
            self._fetcher.engine.transfer_event(LayersArrived(self.transfer_id, layer_count))

        transfer.notify(layers_arrived)
        summary = await transfer.wait()
        self._fetcher.engine.transfer_event(Arrived(self.transfer_id))
        return summary

    def _failed(self, failure: HeadraceError) -> None:
        if not self._begun:
            self._fetcher.engine.transfer_event(Recompute(self.transfer_id))
        elif self._task is not None and not self._closed:
            self.error = failure
            self._task.cancel()


def fetches_prefixes(config: FetchingConfig, engine: Engine) -> bool:
    """Whether a worker fetches any. A prefix of a model with states is of no use without its state."""
    states = any(group.kind == STATE for group in engine.descriptor.layout.groups)
    return config.prefix_fetch_gain < 1.0 and not states


def open_fetcher(
    host: WorkerHost, hosted: HostedWorker[FetchingConfig], receiver: Receiver
) -> PrefixFetcher | None:
    """What fetches prefixes into a worker's `receiver`, if it does."""
    config, ref, engine = hosted.config, hosted.ref, hosted.engine
    if not fetches_prefixes(config, engine):
        return None

    def count(record: FetchRecord) -> None:
        host.metrics.prefix_fetched(ref.worker_id, record.reason, record.token_count)

    return PrefixFetcher(
        ref=ref,
        engine=engine,
        receiver=receiver,
        rule=FetchRule(config.prefix_fetch_gain),
        timeout_s=config.kv_fetch_timeout_s,
        on_ended=count,
        open_channel=lambda endpoint: open_channel(endpoint, config),
    )
