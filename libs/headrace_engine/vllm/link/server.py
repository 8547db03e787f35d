"""The link's end in the service process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from headrace.engine.v1 import link_pb2, link_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import (
    HeadraceError,
    InternalError,
    ProtocolViolation,
    TransferFailed,
    from_reason,
)
from headrace_common.rpc.channel import LOCAL_OPTIONS
from headrace_engine.steps import EngineSteps
from headrace_engine.vllm.link.messages import (
    EngineLoad,
    kept_from_proto,
    load_from_proto,
    report_from_proto,
    steps_from_proto,
    tier_load_from_proto,
    transfer_event_to_proto,
)
from headrace_kv.layout import (
    KvDescriptor,
    KvLayout,
    WorkerRef,
    descriptor_to_proto,
    layout_from_proto,
    layout_to_proto,
    rank_memory_from_proto,
)
from headrace_kv.manager.load_times import TierLoad
from headrace_kv.manager.promises import KeepTerms, Kept
from headrace_kv.messages import (
    Reservation,
    SendReport,
    reservation_from_proto,
)
from headrace_kv.transport.mapped_memory import MappedMemory

if TYPE_CHECKING:
    from headrace_engine.interface import TransferEvent
    from headrace_kv.send.context import DescriptorSource
    from headrace_kv.transport.networks import Networks

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

UNSENT_MAX = 65_536
QUERIES_MAX = 1024
_ANSWERS = {"networks_admitted", "keep_answer", "first_sampled"}


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Callbacks for messages of the engine processes. The link's loop calls them; they must not block.

    `lost` gets the reason why a connector's stream has ended before `begin_close`. `tier_loaded` gets a rank's load.
    `request_failed` gets the transfer id of a request that has ended with an error, and whether a load from a tier is
    the cause.
    `blocks_compared` gets what a rank has found, or nothing from the scheduler: see link.proto.
    `step_started` gets a transfer id, and when its request's first step was planned, by the host's monotonic clock.
    """

    reserved: Callable[[Reservation], None]
    report: Callable[[SendReport], None]
    lost: Callable[[str], None]
    load: Callable[[EngineLoad], None] = lambda load: None
    tier_loaded: Callable[[int, TierLoad], None] = lambda rank, load: None
    request_failed: Callable[[str, bool], None] = lambda transfer_id, load_failed: None
    step_started: Callable[[str, int], None] = lambda transfer_id, monotonic_ns: None
    steps: Callable[[EngineSteps], None] = lambda steps: None
    blocks_compared: Callable[[link_pb2.BlocksCompared], None] = lambda compared: None


@dataclass(slots=True)
class _Peer:
    attachment: link_pb2.Attachment
    outbox: asyncio.Queue[link_pb2.AttachResponse | None] = field(
        default_factory=lambda: asyncio.Queue(UNSENT_MAX)
    )
    queries: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """For log messages."""
        return "scheduler" if self.attachment.scheduler else f"rank {self.attachment.rank}"


class LinkServer(link_pb2_grpc.EngineLinkServiceServicer):
    """Serves one stream of the scheduler's connector and one of each rank's."""

    def __init__(self, path: Path, events: LinkEvents, descriptors: DescriptorSource) -> None:
        self._path = path
        self._events = events
        self._descriptors = descriptors
        self._server: grpc.aio.Server | None = None
        self._scheduler: _Peer | None = None
        self._ranks: dict[int, _Peer] = {}
        self._changed = asyncio.Event()
        self._closing = False
        self._update_ids = count(1)
        # By rank and update.
        self._admissions: dict[tuple[int, int], asyncio.Future[link_pb2.NetworksAdmitted]] = {}
        self._keeps: dict[int, asyncio.Future[link_pb2.KeepAnswer]] = {}
        self._samples: dict[int, asyncio.Future[link_pb2.FirstSampled]] = {}

    async def start(self) -> None:
        """Serves on the socket. Raises InternalError when it cannot be bound."""
        self._server = grpc.aio.server(options=LOCAL_OPTIONS)
        link_pb2_grpc.add_EngineLinkServiceServicer_to_server(self, self._server)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as exc:
            raise InternalError(f"cannot serve the engine link on {self._path}: {exc}") from exc
        await self._server.start()

    def begin_close(self) -> None:
        """Reports no lost connectors from now on."""
        self._closing = True

    async def close(self) -> None:
        """Ends all streams."""
        self.begin_close()
        if self._server is not None:
            await self._server.stop(grace=None)

    async def wait_attached(
        self, rank_count: int, timeout_s: float, *, with_scheduler: bool = True
    ) -> KvDescriptor:
        """Waits for all connectors to attach and returns the worker's memory. Raises InternalError on a timeout.

        Without `with_scheduler`, only ranks attach: the scheduler is in this process.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (with_scheduler and self._scheduler is None) or len(self._ranks) < rank_count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise InternalError(
                f"{len(self._ranks)} of {rank_count} ranks of the engine attached within {timeout_s:g} s"
            ) from None
        attachments = [self._ranks[rank].attachment for rank in sorted(self._ranks)]
        layouts = {layout_from_proto(attachment.layout) for attachment in attachments}
        if len(layouts) != 1:
            raise InternalError("the engine's ranks disagree on their KV layout")
        return KvDescriptor(
            layouts.pop(), tuple(rank_memory_from_proto(item.memory) for item in attachments)
        )

    def process_of(self, rank: int) -> int:
        """The id of an attached rank's process, 0 where its KV memory is not host memory."""
        return self._ranks[rank].attachment.process_id

    def shared_memories(self) -> dict[int, MappedMemory]:
        """The KV memory of the attached ranks that have shared it. Empty when one of them cannot be mapped."""
        memories: dict[int, MappedMemory] = {}
        for rank, peer in self._ranks.items():
            attachment = peer.attachment
            if not attachment.memory_descriptor:
                continue
            memory = rank_memory_from_proto(attachment.memory)
            try:
                memories[rank] = MappedMemory(
                    attachment.process_id, attachment.memory_descriptor, memory
                )
            except TransferFailed as error:
                log.warning("the KV memory of rank %d stays apart: %s", rank, error.detail)
                return {}
        return memories

    def request_coming(self) -> None:
        """Announces a request to the scheduler, before vLLM gets it."""
        self._send(
            self._scheduler, link_pb2.AttachResponse(request_coming=link_pb2.RequestComing())
        )

    def transfer_event(self, event: TransferEvent) -> None:
        """Sends the scheduler what becomes of a transfer."""
        message = transfer_event_to_proto(event)
        self._send(self._scheduler, link_pb2.AttachResponse(transfer_event=message))

    def open_pool(self, prefix_hash_key: int, layout: KvLayout) -> None:
        """Lets the scheduler and every rank use the remote pool."""
        opened = link_pb2.OpenPool(prefix_hash_key=prefix_hash_key, layout=layout_to_proto(layout))
        for peer in (self._scheduler, *self._ranks.values()):
            self._send(peer, link_pb2.AttachResponse(open_pool=opened))

    def stop(self, transfer_id: str) -> None:
        """Makes every rank stop sending a transfer and report."""
        for peer in self._ranks.values():
            self._send(peer, link_pb2.AttachResponse(stop=link_pb2.Stop(transfer_id=transfer_id)))

    async def admit_networks(self, networks: Networks) -> None:
        """Replaces the networks from which hosts may connect to the ranks' transports. Raises a rank's error.

        The caller bounds the wait.
        """
        update = link_pb2.AdmitNetworks(
            update_id=next(self._update_ids), networks=map(str, networks)
        )
        keys = [(rank, update.update_id) for rank in self._ranks]
        for key in keys:
            self._admissions[key] = asyncio.get_running_loop().create_future()
            self._send(self._ranks.get(key[0]), link_pb2.AttachResponse(admit_networks=update))
        try:
            for admitted in await asyncio.gather(*map(self._admissions.__getitem__, keys)):
                if admitted.reason:
                    raise from_reason(admitted.reason, admitted.detail)
        finally:
            for key in keys:
                del self._admissions[key]

    async def keep(self, terms: KeepTerms) -> Kept | None:
        """Renews or ends a promise. None when its owner has none of that name. The caller bounds the wait."""
        query = link_pb2.KeepQuery(
            query_id=next(self._update_ids),
            transfer_id=terms.name,
            owner=terms.owner,
            duration=duration_from_seconds(terms.seconds),
        )
        answer = self._keeps[query.query_id] = asyncio.get_running_loop().create_future()
        self._send(self._scheduler, link_pb2.AttachResponse(keep_query=query))
        try:
            return kept_from_proto(await answer)
        finally:
            del self._keeps[query.query_id]

    async def sample_first(self, request: link_pb2.SampleFirst) -> link_pb2.FirstSampled:
        """Has the engine's only rank sample a token beside its steps. Raises InternalError when the rank is lost.

        The caller bounds the wait.
        """
        request.number = next(self._update_ids)
        answer: asyncio.Future[link_pb2.FirstSampled]
        answer = self._samples[request.number] = asyncio.get_running_loop().create_future()
        self._send(self._ranks.get(0), link_pb2.AttachResponse(sample_first=request))
        try:
            return await answer
        finally:
            del self._samples[request.number]

    def _send(self, peer: _Peer | None, response: link_pb2.AttachResponse) -> None:
        if peer is None:
            return
        try:
            peer.outbox.put_nowait(response)
        except asyncio.QueueFull:
            self._report_lost(f"{peer.name} of the engine has not read {UNSENT_MAX} messages")

    def _report_lost(self, why: str) -> None:
        if not self._closing:
            self._events.lost(why)

    async def Attach(
        self,
        request_iterator: AsyncIterator[link_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[link_pb2.AttachRequest, link_pb2.AttachResponse],
    ) -> AsyncIterator[link_pb2.AttachResponse]:
        """See link.proto. The stream of one connector."""
        peer = await self._register(request_iterator)
        reader = asyncio.create_task(self._read(peer, request_iterator), name=f"link {peer.name}")
        try:
            while (response := await peer.outbox.get()) is not None:
                yield response
        finally:
            for task in (reader, *peer.queries):
                task.cancel()
            self._unregister(peer)

    async def _register(self, requests: AsyncIterator[link_pb2.AttachRequest]) -> _Peer:
        async for request in requests:
            if request.WhichOneof("message") != "attachment":
                break
            peer = _Peer(request.attachment)
            if peer.attachment.scheduler:
                self._scheduler = peer
            else:
                self._ranks[peer.attachment.rank] = peer
            self._changed.set()
            return peer
        raise ProtocolViolation("the first message on the engine link must be an attachment")

    def _unregister(self, peer: _Peer) -> None:
        if self._scheduler is peer:
            self._scheduler = None
        elif self._ranks.get(peer.attachment.rank) is peer:
            del self._ranks[peer.attachment.rank]
            for answer in self._samples.values():
                if not answer.done():
                    answer.set_exception(InternalError(f"the engine's {peer.name} has ended"))
        self._report_lost(f"the engine's {peer.name} has ended")

    async def _read(self, peer: _Peer, requests: AsyncIterator[link_pb2.AttachRequest]) -> None:
        try:
            async for request in requests:
                self._dispatch(peer, request)
        finally:
            # A full outbox was reported as a lost peer already.
            if not peer.outbox.full():
                peer.outbox.put_nowait(None)

    def _dispatch(self, peer: _Peer, request: link_pb2.AttachRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "reserved":
            self._events.reserved(reservation_from_proto(request.reserved))
        elif kind == "report":
            self._events.report(report_from_proto(request.report))
        elif kind == "step_started":
            started = request.step_started
            self._events.step_started(started.transfer_id, started.monotonic_ns)
        elif kind == "load":
            self._events.load(load_from_proto(request.load))
        elif kind == "steps":
            self._events.steps(steps_from_proto(request.steps))
        elif kind == "blocks_compared":
            self._events.blocks_compared(request.blocks_compared)
        elif kind == "tier_loaded":
            self._events.tier_loaded(
                peer.attachment.rank, tier_load_from_proto(request.tier_loaded)
            )
        elif kind == "request_failed":
            failed = request.request_failed
            self._events.request_failed(failed.transfer_id, failed.load_failed)
        elif kind in _ANSWERS:
            self._settle(peer, request)
        elif kind == "descriptor_query" and len(peer.queries) < QUERIES_MAX:
            query = asyncio.create_task(self._answer(peer, request.descriptor_query))
            peer.queries.add(query)
            query.add_done_callback(peer.queries.discard)
        else:
            log.error("%s of the engine sent %s out of order", peer.name, kind)

    def _settle(self, peer: _Peer, answer: link_pb2.AttachRequest) -> None:
        if answer.HasField("networks_admitted"):
            key = (peer.attachment.rank, answer.networks_admitted.update_id)
            _settle(self._admissions.get(key), answer.networks_admitted)
        elif answer.HasField("keep_answer"):
            _settle(self._keeps.get(answer.keep_answer.query_id), answer.keep_answer)
        else:
            _settle(self._samples.get(answer.first_sampled.number), answer.first_sampled)

    async def _answer(self, peer: _Peer, query: link_pb2.DescriptorQuery) -> None:
        answer = link_pb2.DescriptorAnswer(query_id=query.query_id)
        deadline = Deadline.after(seconds_from_duration(query.remaining))
        try:
            found = await self._descriptors(WorkerRef(query.worker_id, query.incarnation), deadline)
            answer.descriptor.CopyFrom(descriptor_to_proto(found))
        except HeadraceError as exc:
            answer.reason, answer.detail = exc.reason, exc.detail
        self._send(peer, link_pb2.AttachResponse(descriptor_answer=answer))


def _settle(waiting: asyncio.Future[Answer] | None, answer: Answer) -> None:
    """Gives an answer to what waits for it, if anything does still."""
    if waiting is not None and not waiting.done():
        waiting.set_result(answer)
