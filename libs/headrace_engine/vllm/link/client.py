"""The link's end in an engine process. One daemon thread with one event loop serves all links and senders of it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

import grpc
import grpc.aio
import uvloop

from headrace.engine.v1 import link_pb2, link_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import DeadlineExceeded, from_reason
from headrace_common.rpc.channel import LOCAL_OPTIONS, open_channel
from headrace_kv.layout import KvDescriptor, WorkerRef, descriptor_from_proto

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 900.0
ATTACH_POLL_S = 0.05
UNSENT_MAX = 65_536
LINK_LOST_STATUS = 75
SECRET_KEY = "headrace-link-secret"
"""Of the metadata of a connector on another host than the service."""

OnResponse = Callable[[link_pb2.AttachResponse], None]


class LinkLoop:
    """The process's background event loop."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="headrace-link", daemon=True
        )
        self._thread.start()

    _ours: LinkLoop | None = None
    _ours_lock = threading.Lock()

    @classmethod
    def of_process(cls) -> LinkLoop:
        """The one loop of this process, made on first use."""
        with cls._ours_lock:
            if cls._ours is None:
                cls._ours = cls()
            return cls._ours


class EngineLink:
    """The stream of one connector. When it ends before `close`, the process exits: it has no service to serve.

    Any thread may call `send`. The link's loop calls `on_response`.
    """

    def __init__(
        self,
        path: Path,
        attachment: link_pb2.Attachment,
        on_response: OnResponse,
        address: str = "",
        secret: str = "",
    ) -> None:
        """On another host than the service, `address` and `secret` of ConnectorSettings lead to it."""
        self._path, self._address, self._secret = path, address, secret
        self._attachment = attachment
        self._on_response = on_response
        self.loop = LinkLoop.of_process().loop
        self._outbox: asyncio.Queue[link_pb2.AttachRequest] = asyncio.Queue(UNSENT_MAX)
        self._query_ids = count(1)
        self._queries: dict[int, asyncio.Future[link_pb2.DescriptorAnswer]] = {}
        self._closing = False
        self._run = asyncio.run_coroutine_threadsafe(self._attach(), self.loop)

    def send(self, request: link_pb2.AttachRequest) -> None:
        """Queues a message, which is sent once the stream is open."""
        self.loop.call_soon_threadsafe(self._enqueue, request)

    def close(self) -> None:
        """Ends the stream without ending the process."""
        self._closing = True
        self._run.cancel()

    def _enqueue(self, request: link_pb2.AttachRequest) -> None:
        try:
            self._outbox.put_nowait(request)
        except asyncio.QueueFull:
            self._exit_process(f"the service has not read {UNSENT_MAX} messages")

    async def find_descriptor(self, ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        """Asks the service for a decode worker's memory. Runs on the link's loop.

        Raises DeadlineExceeded, or the error that the service reports.
        """
        query_id = next(self._query_ids)
        answer = self._queries[query_id] = self.loop.create_future()
        query = link_pb2.DescriptorQuery(
            query_id=query_id,
            worker_id=ref.worker_id,
            incarnation=ref.incarnation,
            remaining=duration_from_seconds(deadline.remaining_s()),
        )
        self._enqueue(link_pb2.AttachRequest(descriptor_query=query))
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                found = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"the memory of {ref} was not found in time") from None
        finally:
            del self._queries[query_id]
        if found.reason:
            raise from_reason(found.reason, found.detail)
        return descriptor_from_proto(found.descriptor)

    async def _attach(self) -> None:
        try:
            async with await self._open_channel() as channel:
                stub = link_pb2_grpc.EngineLinkServiceStub(channel)
                stream = stub.Attach(
                    self._requests(), metadata=((SECRET_KEY, self._secret),), wait_for_ready=True
                )
                async for response in stream:
                    self._dispatch(response)
            self._exit_process("the service ended it")
        except TimeoutError:
            self._exit_process(f"the service did not open it within {ATTACH_TIMEOUT_S:g} s")
        except grpc.aio.AioRpcError as exc:
            self._exit_process(f"{exc.code().name}: {exc.details()}")

    async def _open_channel(self) -> grpc.aio.Channel:
        """The service listens once all engine processes are forked and loaded."""
        if self._address:
            channel = open_channel(self._address)
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await channel.channel_ready()
            return channel
        await self._wait_for_socket()
        return grpc.aio.insecure_channel(f"unix:{self._path}", options=LOCAL_OPTIONS)

    async def _wait_for_socket(self) -> None:
        for _ in range(round(ATTACH_TIMEOUT_S / ATTACH_POLL_S)):
            if self._path.exists():
                return
            await asyncio.sleep(ATTACH_POLL_S)
        raise TimeoutError

    async def _requests(self) -> AsyncIterator[link_pb2.AttachRequest]:
        yield link_pb2.AttachRequest(attachment=self._attachment)
        while True:
            yield await self._outbox.get()

    def _dispatch(self, response: link_pb2.AttachResponse) -> None:
        if response.WhichOneof("message") == "descriptor_answer":
            query = self._queries.get(response.descriptor_answer.query_id)
            if query is not None and not query.done():
                query.set_result(response.descriptor_answer)
        else:
            self._on_response(response)

    def _exit_process(self, why: str) -> None:
        if self._closing:
            return
        log.error("engine process %d ends: its link to the service is gone (%s)", os.getpid(), why)
        os._exit(LINK_LOST_STATUS)
