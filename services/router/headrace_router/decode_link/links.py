"""The links to one decode worker: usually one, which is replaced when it has broken, is full or is old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc.aio
from opentelemetry.context import Context

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError
from headrace_common.limits import LINK_STREAMS_MAX
from headrace_common.process.pacing import LoopLoad
from headrace_router.decode_link.answer import AnswerEvent, LinkedAnswer, TokenSink
from headrace_router.decode_link.link import DecodeLink

# The next link presents the certificate and the token that are in force then.
_AGE_MAX_S: Final = 600.0


class LinkedCall:
    """One request on a link."""

    def __init__(self, link: DecodeLink, answer: LinkedAnswer) -> None:
        self._link = link
        self.answer = answer
        """What has arrived."""

    async def read(self) -> AnswerEvent:
        """See LinkedAnswer."""
        return await self.answer.read()

    def forward(self, sink: TokenSink) -> None:
        """See LinkedAnswer."""
        self.answer.forward(sink)

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        self._link.release(self.answer)


class DecodeLinks:
    """Opens requests on the current link. `channel` returns the channel to the worker.

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

    def open(
        self,
        request: decode_pb2.GenerateRequest,
        token_ids: inference_pb2.TokenIds,
        deadline: Deadline,
        context: Context,
    ) -> LinkedCall:
        """Sends a request, with these tokens. Close the call when its attempt ends."""
        link = self._usable()
        return LinkedCall(link, link.open(request, token_ids, deadline, context))

    def _usable(self) -> DecodeLink:
        link = self._current
        if link is not None and not link.ended:
            if link.count < self._streams_max and link.age_s < self._age_max_s:
                return link
            link.retire()
        link = self._current = DecodeLink(self._channel(), self._open.discard, self._load)
        self._open.add(link)
        return link

    def fail(self, failure: Callable[[], HeadraceError]) -> None:
        """Ends every link that has requests, with errors that `failure` makes, one for each request."""
        for link in tuple(self._open):
            if link.count:
                link.fail(failure)

    async def close(self) -> None:
        """Ends every link, with the requests on it."""
        await asyncio.gather(*(link.close() for link in tuple(self._open)))
