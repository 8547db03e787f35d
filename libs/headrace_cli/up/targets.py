"""Carries out the targets that a planner publishes."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc.aio
from rich.console import Console

from headrace.planner.v1 import planner_pb2, planner_pb2_grpc
from headrace_cli.client import CALL_TIMEOUT_S, call_channel, rpc_errors
from headrace_cli.up.scaling import Scaler
from headrace_common.errors import HeadraceError

_LOG = logging.getLogger(__name__)
_RETRY_S: Final = 0.2
_FAILURE_CHARACTERS_MAX: Final = 1_000


class TargetFollower:
    """Applies each target of the planner at `planner`, and acknowledges it.

    A planner that is lost and returns publishes targets of its own, decided from the workers that run then.
    """

    def __init__(self, planner: str, scaler: Scaler, console: Console) -> None:
        self._planner = planner
        self._scaler = scaler
        self._console = console

    async def run(self) -> None:
        """Never returns. While the planner does not answer, the numbers of workers stay."""
        while True:
            async with call_channel(self._planner) as channel:
                try:
                    with rpc_errors(f"the planner on {self._planner}"):
                        await self._follow(planner_pb2_grpc.PlannerServiceStub(channel))
                except HeadraceError as error:
                    # The supervisor reports the end of the planner's process.
                    _LOG.debug("the targets are not watched: %s", error.detail)
            await asyncio.sleep(_RETRY_S)

    async def _follow(self, stub: planner_pb2_grpc.PlannerServiceAsyncStub) -> None:
        """Raises AioRpcError when the stream ends."""
        async for response in stub.WatchTargets(planner_pb2.WatchTargetsRequest()):
            workers = response.target.workers
            failure = ""
            try:
                await self._scaler.apply(workers.prefill, workers.decode)
            except HeadraceError as error:
                failure = error.detail
                self._console.print(f"the planner's target failed: {failure}", markup=False)
            await self._acknowledge(stub, response.target.id, failure)

    async def _acknowledge(
        self, stub: planner_pb2_grpc.PlannerServiceAsyncStub, target_id: str, failure: str
    ) -> None:
        """A planner that has started again since does not have the target: nothing is lost then."""
        request = planner_pb2.AcknowledgeTargetRequest(
            target_id=target_id, failure=failure[:_FAILURE_CHARACTERS_MAX]
        )
        try:
            await stub.AcknowledgeTarget(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
