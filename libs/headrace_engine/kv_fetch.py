"""A worker has another one send KV into blocks that it has reserved: prefixes to prefill, prompts to stock decode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc.aio

from headrace_common.errors import HeadraceError
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tasks import end_task
from headrace_common.time_model.model import StepTimes, TimeModel
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary

ALL_LAYERS: Final = 1 << 30
_LATE_STEPS: Final = 3.0
_LATE_MIN_S: Final = 1.0
# Steps wait longer for a layer: LayerArrivals.
_LATE_MAX_S: Final = 30.0
_LATE_UNKNOWN_S: Final = 5.0


def late_layers_s(times: StepTimes, tokens: int) -> float:
    """How long a worker waits for the layers of so many tokens that another one computes: three steps, and 1 s.

    At most 30 s.
    """
    step_s = TimeModel(times).step_s(tokens)
    known_s = _LATE_UNKNOWN_S if step_s is None else _LATE_MIN_S + _LATE_STEPS * step_s
    return min(_LATE_MAX_S, known_s)


async def fetch_kv(
    receiver: Receiver,
    transfer: IncomingTransfer,
    request: Coroutine[Any, Any, object],
    on_whole: Callable[[TransferSummary], None],
    answer_wait_s: float,
) -> TransferSummary:
    """Returns after the end of the transfer and of `request`, the RPC that makes the other worker send.

    `on_whole` is called as soon as the transfer is complete. The RPC's answer follows the last byte: without it within
    `answer_wait_s`, the call is cancelled. Raises the RPC's error when that ends the transfer, or else the transfer's.
    """
    arrival = asyncio.create_task(transfer.wait())
    asking = asyncio.create_task(_error_of(request), name=f"fetch of {transfer.transfer_id}")
    try:
        await asyncio.wait({asking, arrival}, return_when=asyncio.FIRST_COMPLETED)
        refusal = None if arrival.done() else asking.result()
        if refusal is not None:
            receiver.cancel(transfer.transfer_id, refusal.reason, refusal.detail)
        try:
            summary = await arrival
        except HeadraceError as failure:
            raise refusal or failure from None
        on_whole(summary)
        await asyncio.wait({asking}, timeout=answer_wait_s)
        return summary
    finally:
        arrival.cancel()
        await end_task(asking)


async def _error_of(request: Coroutine[Any, Any, object]) -> HeadraceError | None:
    try:
        await request
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    return None
