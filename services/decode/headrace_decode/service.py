"""DecodeService: the RPCs of a decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_decode.attempts import Attempts
from headrace_decode.link.session import LinkSession

_FLUSH_S = 2.0


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Runs attempts for routers, and reports the worker's status."""

    def __init__(self, attempts: Attempts, default_deadline_s: float) -> None:
        self.attempts = attempts
        """The attempts of this worker."""
        self._default_deadline_s = default_deadline_s
        self._links: dict[LinkSession, asyncio.Task[None]] = {}

    async def Link(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[decode_pb2.LinkRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """See decode.proto."""
        session = LinkSession(self.attempts.start, context.write, self._default_deadline_s)
        running = self._links[session] = asyncio.ensure_future(session.run(request_iterator))
        try:
            await running
        finally:
            del self._links[session]

    async def SetFirstToken(
        self,
        request: decode_pb2.SetFirstTokenRequest,
        context: grpc.aio.ServicerContext[
            decode_pb2.SetFirstTokenRequest, decode_pb2.SetFirstTokenResponse
        ],
    ) -> decode_pb2.SetFirstTokenResponse:
        """See decode.proto."""
        self.attempts.set_first_token(request)
        return decode_pb2.SetFirstTokenResponse()

    async def Keep(
        self,
        request: decode_pb2.KeepRequest,
        context: grpc.aio.ServicerContext[decode_pb2.KeepRequest, decode_pb2.KeepResponse],
    ) -> decode_pb2.KeepResponse:
        """See decode.proto."""
        return await self.attempts.keep(
            request, Deadline.from_context(context, self._default_deadline_s)
        )

    async def finish_drain(self, deadline: Deadline) -> None:
        """Returns once no attempt is left, none can start, and every link has sent what it had.

        At the deadline, attempts end with Draining, so that their routers continue on other workers.
        """
        await self.attempts.finish_drain(deadline)
        for link in self._links:
            link.end(self.attempts.refusal())
        if self._links:
            # A router may not read. The server ends its link next.
            await asyncio.wait(self._links.values(), timeout=_FLUSH_S)
