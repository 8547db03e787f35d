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
from headrace_common.errors import Conflict, HeadraceError

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
            failure = ""
            try:
                await self._apply(response.target)
            except HeadraceError as error:
                failure = error.detail
                self._console.print(f"the planner's target failed: {failure}", markup=False)
            await self._acknowledge(stub, response.target.id, failure)

    async def _apply(self, target: planner_pb2.Target) -> None:
        """Raises Conflict for a target that was decided from other workers than those that run.

        Else raises as the scaler does.
        """
        wanted = (target.workers.prefill, target.workers.decode)
        observed = (target.current.prefill, target.current.decode)
        counts = self._scaler.counts()
        if counts not in (observed, wanted):
            raise Conflict(
                f"it was decided from {_counts_text(observed)}, and {_counts_text(counts)} run here",
                metadata={"observed": _counts_text(observed), "running": _counts_text(counts)},
            )
        await self._scaler.apply(*wanted)

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


def _counts_text(counts: tuple[int, int]) -> str:
    return f"{counts[0]} P, {counts[1]} D"
