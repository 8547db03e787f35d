"""Fetches the KV of prompts' first tokens from the decode workers that hold it, instead of computing it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import grpc.aio

from headrace.kv.v1 import prefix_pb2, prefix_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import Cancelled, DecodeFull, HeadraceError, NotFound
from headrace_common.rpc.channel import open_channel
from headrace_common.tasks import Recent
from headrace_engine.interface import Arrived, Engine, Recompute
from headrace_engine.kv_fetch import fetch_kv
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_kv.layout import STATE, WorkerRef
from headrace_kv.messages import Reservation, TransferTarget, prefix_transfer
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_kv.prefix.images import ImageSpan, whole_images_end
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

    def offer(self, target: TransferTarget, images: Sequence[ImageSpan] = ()) -> PrefixFetch | None:
        """The fetch of what decode has of a task's tokens, up to an image that decode has in part.

        None when it has too little, or fetching is not worth it.
        """
        end = target.start_token
        if images:
            block_tokens = self.engine.descriptor.layout.block_tokens
            end = whole_images_end(end, images, block_tokens)
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

    def __init__(
        self,
        fetcher: PrefixFetcher,
        target: TransferTarget,
        end_token: int,
    ) -> None:
        self.record: FetchRecord | None = None
        self.transfer_id = prefix_transfer(target.transfer_id)
        """See RemotePrefix."""
        self.end_token = end_token
        """See RemotePrefix."""
        self._fetcher = fetcher
        self._target = target
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def least_tokens(self) -> int:
        """See RemotePrefix."""
        return self._fetcher.rule.min_tokens

    def start(self, reservation: Reservation) -> bool:
        """See RemotePrefix."""
        fetcher, target = self._fetcher, self._target
        start, end = reservation.start_token, reservation.end_token
        times = fetcher.engine.step_times
        payload_bytes = (end - start) * fetcher.engine.descriptor.layout.token_bytes
        decode = target.decode.worker_id
        if self._closed or not fetcher.rule.prefers_fetch(decode, start, end, payload_bytes, times):
            return False
        deadline = Deadline(min(target.deadline_s, time.monotonic() + fetcher.timeout_s))
        # A router has signed it for the other direction of this very hand-over. Decode verifies that.
        sender = (target.decode, target.ticket)
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
        fetcher, start_unix_ns, start_s = self._fetcher, time.time_ns(), time.monotonic()
        reservation = transfer.reservation
        token_count = reservation.end_token - reservation.start_token

        def whole(summary: TransferSummary) -> None:
            fetcher.engine.transfer_event(Arrived(self.transfer_id))
            fetch_s = time.monotonic() - start_s
            decode = self._target.decode.worker_id
            fetcher.rule.fetched(decode, summary.payload_bytes, fetch_s)

        payload_bytes, reason = 0, ""
        try:
            asking = self._ask(transfer)
            summary = await fetch_kv(fetcher.receiver, transfer, asking, whole, _ANSWER_WAIT_S)
            payload_bytes = summary.payload_bytes
        except HeadraceError as failure:
            reason = failure.reason
            self._report_failure(failure)
            fetcher.engine.transfer_event(Recompute(self.transfer_id))
        self.record = FetchRecord(token_count, payload_bytes, reason, start_unix_ns, time.time_ns())
        fetcher.on_ended(self.record)

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

    def _report_failure(self, failure: HeadraceError) -> None:
        if self._closed:
            return
        name, decode = self._target.transfer_id, self._target.decode.worker_id
        _LOG.warning("the prefix of %s is computed: %s", name, failure.detail)
        if not isinstance(failure, _HARMLESS):
            self._fetcher.rule.failed(decode)


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
