"""The link's end in the service process."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import grpc.aio
import numpy as np

from headrace.engine.v1 import link_pb2, link_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import (
    HeadraceError,
    InternalError,
    ProtocolViolation,
    TransferFailed,
)
from headrace_common.rpc.channel import LOCAL_OPTIONS, keepalive_options
from headrace_engine.interface import LayersArrived
from headrace_engine.vllm.link.client import SECRET_KEY
from headrace_engine.vllm.link.messages import transfer_event_to_proto
from headrace_kv.layout import (
    KvDescriptor,
    WorkerRef,
    descriptor_to_proto,
    layout_from_proto,
    rank_memory_from_proto,
)
from headrace_kv.runs import Int64Array
from headrace_kv.transport.guard import Address, address_of_peer
from headrace_kv.transport.mapped_memory import MappedMemory

if TYPE_CHECKING:
    from headrace_engine.interface import TransferEvent
    from headrace_kv.send.stream import DescriptorSource

log = logging.getLogger(__name__)

_NETWORK_OPTIONS: Final = (
    *LOCAL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", 1_024),
    # An idle rank sends only pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)
UNSENT_MAX = 65_536
QUERIES_MAX = 1024
_SUM_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Peer:
    attachment: link_pb2.Attachment
    host: Address | None
    outbox: asyncio.Queue[link_pb2.AttachResponse | None] = field(
        default_factory=lambda: asyncio.Queue(UNSENT_MAX)
    )
    queries: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """For log messages."""
        if self.attachment.scheduler:
            return "scheduler"
        return f"rank {self.attachment.rank}" + (f" on {self.host}" if self.host else "")


class RankSums:
    """WordSums of a rank's memory. Make it on the link's event loop, and call it on other threads."""

    def __init__(self, link: LinkServer, rank: int) -> None:
        self._link, self._rank, self._loop = link, rank, asyncio.get_running_loop()

    def word_sum(self, addresses: Int64Array, lengths: Int64Array, seed: int) -> int:
        query = link_pb2.SumWords(runs=np.stack((addresses, lengths)).tobytes(), seed=seed)
        asking = self._link.ask_rank(self._rank, link_pb2.AttachResponse(sum_words=query))
        bounded = asyncio.wait_for(asking, _SUM_TIMEOUT_S)
        answer = asyncio.run_coroutine_threadsafe(bounded, self._loop).result().words_summed
        if answer.detail:
            raise TransferFailed(f"rank {self._rank} cannot sum its KV: {answer.detail}")
        return answer.word_sum


class LinkServer(link_pb2_grpc.EngineLinkServiceServicer):
    """Serves one stream of the scheduler's connector and one of each rank's.

    Its loop calls `on_message` with each message that answers nothing, and the rank that sent it: 0 for the scheduler.
    `on_lost` gets the reason why a connector's stream has ended before `begin_close`. They must not block.
    """

    def __init__(
        self,
        path: Path,
        on_message: Callable[[int, link_pb2.AttachRequest], None],
        on_lost: Callable[[str], None],
        descriptors: DescriptorSource,
        address: str = "",
        secret: str = "",
    ) -> None:
        """`address`: "host:port" that serves connectors of other hosts, which present `secret`. Empty for none."""
        self._path, self._address, self._secret = path, address, secret
        self._on_message = on_message
        self._on_lost = on_lost
        self._descriptors = descriptors
        self._servers: list[grpc.aio.Server] = []
        self._scheduler: _Peer | None = None
        self._ranks: dict[int, _Peer] = {}
        self._changed = asyncio.Event()
        self._closing = False
        self._query_ids = count(1)
        self._answers: dict[int, tuple[_Peer, asyncio.Future[link_pb2.AttachRequest]]] = {}

    async def start(self) -> None:
        """Serves on the socket, and on the address. Raises InternalError when one cannot be bound."""
        await self._serve(f"unix:{self._path}", LOCAL_OPTIONS)
        if self._address:
            await self._serve(self._address, (*_NETWORK_OPTIONS, *keepalive_options()))

    async def _serve(self, address: str, options: Sequence[tuple[str, int | str]]) -> None:
        server = grpc.aio.server(options=options)
        link_pb2_grpc.add_EngineLinkServiceServicer_to_server(self, server)
        try:
            server.add_insecure_port(address)
        except RuntimeError as exc:
            raise InternalError(f"cannot serve the engine link on {address}: {exc}") from exc
        await server.start()
        self._servers.append(server)

    def begin_close(self) -> None:
        """Reports no lost connectors from now on."""
        self._closing = True

    async def close(self) -> None:
        """Ends all streams."""
        self.begin_close()
        await asyncio.gather(*(server.stop(grace=None) for server in self._servers))

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

    def transfer_event(self, event: TransferEvent) -> None:
        """Sends the scheduler what becomes of a transfer, and the ranks which layers have arrived."""
        message = link_pb2.AttachResponse(transfer_event=transfer_event_to_proto(event))
        if isinstance(event, LayersArrived):
            self.send_to_ranks(message)
        self.send_to_scheduler(message)

    def request_coming(self) -> None:
        """Announces a request to the scheduler, before vLLM gets it."""
        self.send_to_scheduler(link_pb2.AttachResponse(request_coming=link_pb2.RequestComing()))

    def send_to_scheduler(self, message: link_pb2.AttachResponse) -> None:
        """Without an answer."""
        self._send(self._scheduler, message)

    def send_to_ranks(self, message: link_pb2.AttachResponse) -> None:
        """To every rank, without an answer."""
        for peer in self._ranks.values():
            self._send(peer, message)

    async def ask_scheduler(self, message: link_pb2.AttachResponse) -> link_pb2.AttachRequest:
        """The scheduler's answer. Raises InternalError when it is lost. The caller bounds the wait."""
        return await self._ask(self._scheduler, message)

    async def ask_rank(self, rank: int, message: link_pb2.AttachResponse) -> link_pb2.AttachRequest:
        """As `ask_scheduler`."""
        return await self._ask(self._ranks.get(rank), message)

    async def _ask(
        self, peer: _Peer | None, message: link_pb2.AttachResponse
    ) -> link_pb2.AttachRequest:
        if peer is None:
            raise InternalError("a process of the engine has ended")
        query_id = next(self._query_ids)
        answer: asyncio.Future[link_pb2.AttachRequest]
        answer = asyncio.get_running_loop().create_future()
        self._answers[query_id] = peer, answer
        query = link_pb2.AttachResponse(query_id=query_id)
        query.MergeFrom(message)
        self._send(peer, query)
        try:
            return await answer
        finally:
            del self._answers[query_id]

    def _send(self, peer: _Peer | None, response: link_pb2.AttachResponse) -> None:
        if peer is None:
            return
        try:
            peer.outbox.put_nowait(response)
        except asyncio.QueueFull:
            self._report_lost(f"{peer.name} of the engine has not read {UNSENT_MAX} messages")

    def _report_lost(self, why: str) -> None:
        if not self._closing:
            self._on_lost(why)

    async def Attach(
        self,
        request_iterator: AsyncIterator[link_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[link_pb2.AttachRequest, link_pb2.AttachResponse],
    ) -> AsyncIterator[link_pb2.AttachResponse]:
        """See link.proto. The stream of one connector."""
        host = address_of_peer(context.peer())
        given = str(dict(context.invocation_metadata() or ()).get(SECRET_KEY, ""))
        is_local = context.peer().startswith("unix:")
        if not is_local and not hmac.compare_digest(given.encode(), self._secret.encode()):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the caller is no rank of this engine"
            )
        peer = await self._register(request_iterator, host)
        reader = asyncio.create_task(self._read(peer, request_iterator), name=f"link {peer.name}")
        try:
            while (response := await peer.outbox.get()) is not None:
                yield response
        finally:
            for task in (reader, *peer.queries):
                task.cancel()
            self._unregister(peer)

    async def _register(
        self, requests: AsyncIterator[link_pb2.AttachRequest], host: Address | None
    ) -> _Peer:
        async for request in requests:
            if request.WhichOneof("message") != "attachment":
                break
            peer = _Peer(request.attachment, host)
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
        for asked, answer in self._answers.values():
            if asked is peer and not answer.done():
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
        if request.answered_query_id:
            asked, answer = self._answers.get(request.answered_query_id, (None, None))
            if asked is peer and answer is not None and not answer.done():
                answer.set_result(request)
        elif not request.HasField("descriptor_query"):
            self._on_message(peer.attachment.rank, request)
        elif len(peer.queries) < QUERIES_MAX:
            query = asyncio.create_task(self._answer(peer, request.descriptor_query))
            peer.queries.add(query)
            query.add_done_callback(peer.queries.discard)
        else:
            log.error("%s of the engine asks for too many descriptors at once", peer.name)

    async def _answer(self, peer: _Peer, query: link_pb2.DescriptorQuery) -> None:
        answer = link_pb2.DescriptorAnswer(query_id=query.query_id)
        deadline = Deadline.after(seconds_from_duration(query.remaining))
        try:
            found = await self._descriptors(WorkerRef(query.worker_id, query.incarnation), deadline)
            answer.descriptor.CopyFrom(descriptor_to_proto(found))
        except HeadraceError as exc:
            answer.reason, answer.detail = exc.reason, exc.detail
        self._send(peer, link_pb2.AttachResponse(descriptor_answer=answer))
