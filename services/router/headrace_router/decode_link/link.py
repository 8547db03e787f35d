"""The router's side of one link to a decode worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    ProtocolViolation,
    WorkerGone,
)
from headrace_common.limits import LINK_MESSAGE_BYTES_MAX, LINK_STREAMS_MAX
from headrace_common.process.pacing import JOIN_S, LoopLoad
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tasks import end_task
from headrace_frontend.request.images import PromptImages
from headrace_router.decode_link.answer import LinkedAnswer, LinkedAnswers

# Most bytes of a credit or a cancel.
_ENTRY_BYTES = 24
# Most bytes of the lengths around an open and its tokens, and of a token.
_OPEN_BYTES = 24
_TOKEN_BYTES = 5


class OutgoingRequests:
    """Opens, credits, cancels and the interval between tokens that wait for the next message."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: the size from which messages are split. A single open may be longer."""
        self._bytes_max = bytes_max
        self._opens: dict[
            int, tuple[decode_pb2.LinkOpen, inference_pb2.TokenIds, PromptImages]
        ] = {}
        self._credits: dict[int, int] = {}
        self._cancels: list[int] = []
        self._interval_us = 0
        self._sent_interval_us = 0

    def set_token_interval(self, interval_us: int) -> bool:
        """Lets the worker join tokens for so long, from the next message on.

        Returns whether the worker must know soon: it joins them for twice as long now, or for half as long.
        """
        self._interval_us, sent_us = interval_us, self._sent_interval_us
        return interval_us != sent_us and not sent_us < 2 * interval_us < 4 * sent_us

    def open(
        self,
        opened: decode_pb2.LinkOpen,
        token_ids: inference_pb2.TokenIds,
        images: PromptImages = (),
    ) -> None:
        """Adds a request, and its tokens and images. Ids must increase."""
        self._opens[opened.stream_id] = opened, token_ids, images

    def grant(self, stream_id: int, credit_tokens: int) -> None:
        """Adds to the credit of a request."""
        self._credits[stream_id] = self._credits.get(stream_id, 0) + credit_tokens

    def cancel(self, stream_id: int) -> None:
        """Cancels a request. One that was not sent yet is forgotten."""
        self._credits.pop(stream_id, None)
        if self._opens.pop(stream_id, None) is None:
            self._cancels.append(stream_id)

    def next_message(self) -> decode_pb2.LinkRequest | None:
        """The next message, with as much as fits. None when nothing waits.

        Credits and cancels are for requests that were opened before, so they go first.
        """
        message = decode_pb2.LinkRequest()
        room_bytes = self._bytes_max
        if self._interval_us != self._sent_interval_us:
            message.token_interval_us = self._sent_interval_us = self._interval_us
            room_bytes -= _ENTRY_BYTES
        while self._credits and room_bytes > 0:
            stream_id, tokens = self._credits.popitem()
            message.credits.add(stream_id=stream_id, credit_tokens=tokens)
            room_bytes -= _ENTRY_BYTES
        fitting = max(0, room_bytes // _ENTRY_BYTES)
        message.cancelled_stream_ids.extend(self._cancels[:fitting])
        room_bytes -= _ENTRY_BYTES * min(fitting, len(self._cancels))
        del self._cancels[:fitting]
        while self._opens:
            stream_id = next(iter(self._opens))
            opened, token_ids, images = self._opens[stream_id]
            open_bytes = opened.ByteSize() + _OPEN_BYTES + _TOKEN_BYTES * len(token_ids.ids)
            if images:
                # Protobuf would serialize them to count them.
                open_bytes = self._bytes_max
            if open_bytes > room_bytes and room_bytes < self._bytes_max:
                break
            del self._opens[stream_id]
            message.opens.append(opened)
            message.opens[-1].request.token_ids.MergeFrom(token_ids.ids)
            message.opens[-1].request.images.extend(images)
            room_bytes -= open_bytes
        return None if room_bytes == self._bytes_max else message


_LOG = logging.getLogger(__name__)

WINDOW_TOKENS: Final = 512
"""Tokens of one request that the worker may send before the router has used some of them."""

_Failure = Callable[[], HeadraceError]
# CANCELLED is not this router's: a link that it cancels itself raises CancelledError.
_BROKEN: Final = frozenset({grpc.StatusCode.INTERNAL.name, grpc.StatusCode.CANCELLED.name})
_CANCELLED: Final = {"grpc_code": grpc.StatusCode.CANCELLED.name}


class DecodeLink:
    """One stream for many requests. It begins at once, and ends with `close` or when it breaks.

    `on_end` is called once it has ended. All its requests have failed by then. The worker joins tokens for as long as
    messages to clients do by `load`.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        on_end: Callable[[DecodeLink], None],
        load: LoopLoad,
    ) -> None:
        self.ended = False
        self._on_end = on_end
        self._load = load
        self._gap_s = 0.0
        self.answers = LinkedAnswers()
        """Those of the requests in progress."""
        self._outgoing = OutgoingRequests(LINK_MESSAGE_BYTES_MAX)
        self._wake = asyncio.Event()
        self._last_stream_id = 0
        self.started_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._retired = False
        self._failure: _Failure = _closed_here
        self._task = asyncio.create_task(self._run(channel))
        self._task.add_done_callback(self._finish)

    def open(
        self,
        request: decode_pb2.GenerateRequest,
        token_ids: inference_pb2.TokenIds,
        deadline: Deadline,
        carrier: Mapping[str, str],
        answer: LinkedAnswer,
        images: PromptImages = (),
    ) -> None:
        """Sends a request, with these tokens and images. `carrier` is that of the caller's span.

        `answer` gets all events. The caller must end it by `release`.
        """
        stream_id = self._last_stream_id = self._last_stream_id + 1
        remaining_s = deadline.remaining_s()
        self._outgoing.open(
            decode_pb2.LinkOpen(
                stream_id=stream_id,
                request=request,
                timeout=duration_from_seconds(remaining_s),
                **carrier,
                credit_tokens=WINDOW_TOKENS,
            ),
            token_ids,
            images,
        )
        if self._load.gap_s != self._gap_s:
            self._adapt_interval()
        self._wake.set()
        answer.opened(stream_id, WINDOW_TOKENS, self._grant)
        self.answers.add(answer)
        answer.expire_after(remaining_s, self._loop)

    def release(self, answer: LinkedAnswer) -> None:
        """The caller uses no more of it. Cancels the request unless it has ended. Repeats are ignored."""
        if self.answers.remove(answer.stream_id) is not None:
            answer.unlink()
            self._outgoing.cancel(answer.stream_id)
            self._wake.set()
            self._close_if_unused()

    def retire(self) -> None:
        """Ends the link once its requests have ended. The caller opens no more."""
        self._retired = True
        self._close_if_unused()

    def fail(self, failure: Callable[[], HeadraceError]) -> None:
        """Ends the link with errors that `failure` makes, one for each request. The worker ends the requests."""
        if not self.ended:
            self._failure = failure
            self._task.cancel()

    async def close(self) -> None:
        """Ends the link at once."""
        await end_task(self._task)

    def _close_if_unused(self) -> None:
        if self._retired and not self.answers.by_stream:
            self._task.cancel()

    def _grant(self, stream_id: int, credit_tokens: int) -> None:
        if stream_id in self.answers.by_stream:
            self._outgoing.grant(stream_id, credit_tokens)
            self._wake.set()

    async def _run(self, channel: grpc.aio.Channel) -> None:
        call: Any = decode_pb2_grpc.DecodeServiceStub(channel).Link()
        writer = asyncio.create_task(self._send(call))
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self.answers.receive(response)
                if self._load.gap_s != self._gap_s and self._adapt_interval():
                    self._wake.set()
                self._close_if_unused()
            self._failure = lambda: WorkerGone("it ended its link too early")
        except grpc.aio.AioRpcError as error:
            self._failure = partial(_failure_of, error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The writer was the first to find the link broken.
            self._failure = lambda: WorkerGone("its link broke", metadata=_CANCELLED)
        except ProtocolViolation as error:
            self._failure = partial(ProtocolViolation, error.detail)
        finally:
            writer.cancel()
            call.cancel()

    def _adapt_interval(self) -> bool:
        """See OutgoingRequests.set_token_interval."""
        self._gap_s = self._load.gap_s
        return self._outgoing.set_token_interval(round(1e6 * self._gap_s))

    def _finish(self, task: asyncio.Task[None]) -> None:
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            _LOG.error("the link to a decode worker met a bug", exc_info=bug)
            self._failure = _bug
        self.ended = True
        self.answers.fail_all(self._failure)
        self._on_end(self)

    async def _send(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                if self._load.busy:
                    await asyncio.sleep(JOIN_S)
                self._wake.clear()
                while (message := self._outgoing.next_message()) is not None:
                    await call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            # The call has ended. Its reader reports why.
            return
        finally:
            call.cancel()


def _failure_of(error: grpc.aio.AioRpcError) -> HeadraceError:
    """A connection that ends during a write gives the link a status of gRPC, without the details of a worker."""
    known = error_from_rpc(error)
    if known.metadata.get("grpc_code") in _BROKEN:
        return WorkerGone(f"its link broke: {known.detail}", metadata=known.metadata)
    return known


def _closed_here() -> HeadraceError:
    return Cancelled("this router closed its link to the worker")


def _bug() -> HeadraceError:
    return InternalError("the link to the worker met a bug; the router's log has it")


# The next link presents the certificate and the token that are in force then.
_AGE_MAX_S: Final = 600.0


class DecodeLinks:
    """Has the current link, on which requests are opened. `channel` returns the channel to the worker.

    A request opens the first link, and the next one after a link has broken. gRPC delays the connection after failed
    ones by up to 2 s, and refuses links meanwhile.
    """

    def __init__(
        self,
        channel: Callable[[], grpc.aio.Channel],
        load: LoopLoad | None = None,
        *,
        streams_max: int = LINK_STREAMS_MAX,
        age_max_s: float = _AGE_MAX_S,
    ) -> None:
        """`load`: see DecodeLink."""
        self._channel = channel
        self._load = load or LoopLoad()
        self._streams_max = streams_max
        self._age_max_s = age_max_s
        self._current: DecodeLink | None = None
        self._open: set[DecodeLink] = set()

    @property
    def channel(self) -> grpc.aio.Channel:
        """For RPCs beside the links."""
        return self._channel()

    @property
    def count(self) -> int:
        """Links that have not ended."""
        return len(self._open)

    def usable(self) -> DecodeLink:
        """The link for the next request."""
        link = self._current
        if link is not None and not link.ended:
            age_s = time.monotonic() - link.started_s
            if len(link.answers.by_stream) < self._streams_max and age_s < self._age_max_s:
                return link
            link.retire()
        link = self._current = DecodeLink(self._channel(), self._open.discard, self._load)
        self._open.add(link)
        return link

    def fail(self, failure: Callable[[], HeadraceError]) -> None:
        """Ends every link that has requests, with errors that `failure` makes, one for each request."""
        for link in tuple(self._open):
            if link.answers.by_stream:
                link.fail(failure)

    async def close(self) -> None:
        """Ends every link, with the requests on it."""
        await asyncio.gather(*(link.close() for link in tuple(self._open)))
