"""Fetches KV caches for reserved blocks, on decode. Runs on one event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np
import xxhash

from headrace.kv.v1 import pair_pb2, pair_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import Cancelled, HeadraceError, InvalidRequest
from headrace_common.limits import TRANSFER_ID_CHARACTERS_MAX
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_engine.vllm.settings import PARAMS_KEY
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import Reservation
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary

PORT_MAX = 65_535
REMOTE_PREFILL = "do_remote_prefill"
REMOTE_DECODE = "do_remote_decode"


@dataclass(frozen=True, slots=True)
class ConsumerParams:
    """The engine fetches the prompt's KV cache from `pair_address`. An empty `incarnation` accepts any engine there."""

    transfer_id: str
    pair_address: str
    incarnation: str
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class ProducerParams:
    """Another engine fetches the prompt's KV cache. With an empty `transfer_id`, this engine makes one up."""

    transfer_id: str
    deadline: Deadline


def read_request(
    params: Mapping[str, Any] | None, timeout_s: float
) -> ConsumerParams | ProducerParams | None:
    """Parses a request's parameters. None when they ask for no transfer. Deadlines are at most `timeout_s` away.

    Raises InvalidRequest naming every field that is wrong.
    """
    if not params or PARAMS_KEY in params:
        return None
    consumes, produces = params.get(REMOTE_PREFILL) is True, params.get(REMOTE_DECODE) is True
    if not consumes and not produces:
        return None
    problems: dict[str, str] = {}
    if consumes and produces:
        problems[REMOTE_PREFILL] = f"must not be true together with {REMOTE_DECODE}"
    transfer_id = params.get("transfer_id") or ""
    if not isinstance(transfer_id, str) or len(transfer_id) > TRANSFER_ID_CHARACTERS_MAX:
        problems["transfer_id"] = f"must be text of at most {TRANSFER_ID_CHARACTERS_MAX} characters"
    elif consumes and not transfer_id:
        problems["transfer_id"] = "must not be empty"
    if params.get("first_token", "decode") != "decode":
        problems["first_token"] = "must be decode: the other ways need Headrace's services"
    deadline = _read_deadline(params, timeout_s, problems)
    pair_address = _read_pair_address(params, problems) if consumes else ""
    if problems:
        raise InvalidRequest(problems)
    if not consumes:
        return ProducerParams(transfer_id, deadline)
    return ConsumerParams(
        transfer_id, pair_address, str(params.get("remote_incarnation") or ""), deadline
    )


def _read_deadline(
    params: Mapping[str, Any], timeout_s: float, problems: dict[str, str]
) -> Deadline:
    """The earliest of `timeout_s` and both parameters. Only `remaining_s` is independent of the hosts' wall clocks."""
    left_s = timeout_s
    for name, wanted, now_s in (
        ("remaining_s", "seconds from now", 0.0),
        ("deadline_unix_s", "seconds since the Unix epoch", time.time()),
    ):
        value = params.get(name)
        if value is None:
            continue
        if isinstance(value, int | float) and math.isfinite(value):
            left_s = min(left_s, value - now_s)
        else:
            problems[name] = f"must be {wanted}"
    return Deadline.after(left_s)


def _read_pair_address(params: Mapping[str, Any], problems: dict[str, str]) -> str:
    host, port = params.get("remote_host"), str(params.get("remote_port"))
    if not isinstance(host, str) or not host:
        problems["remote_host"] = "must be the host of the prefill engine's pair address"
    if not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        problems["remote_port"] = "must be the port of the prefill engine's pair address"
    return f"{host}:{port}"


def clear_request(params: MutableMapping[str, Any] | None) -> None:
    """Removes what `read_request` reads: from now on, vLLM computes the request without a transfer."""
    if params is not None:
        params.pop(REMOTE_PREFILL, None)
        params.pop(REMOTE_DECODE, None)


def held_params(transfer_id: str, ref: WorkerRef, endpoint: str) -> dict[str, Any]:
    """Parameters in the response to a prefill request that holds its prompt. A proxy passes them to decode."""
    host, _, port = endpoint.rpartition(":")
    return {
        REMOTE_PREFILL: True,
        REMOTE_DECODE: False,
        "transfer_id": transfer_id,
        "remote_engine_id": ref.worker_id,
        "remote_incarnation": ref.incarnation,
        "remote_host": host,
        "remote_port": int(port),
    }


def prompt_digest(token_ids: Sequence[int], extras: Sequence[str]) -> int:
    """64 bits over all that determines a prompt's KV cache: the tokens, and `extras` such as an adapter's name."""
    digest = xxhash.xxh3_64(np.asarray(token_ids, dtype=np.int64).tobytes())
    for extra in extras:
        digest.update(b"\0" + extra.encode())
    return digest.intdigest()


log = logging.getLogger(__name__)

DECLINE_TIMEOUT_S = 5.0
# Prefill's ranks report after their last byte has landed. Until then, cancelling the Fetch would stop ended transfers.
FETCH_END_S = 5.0


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Blocks that wait for a prompt's KV cache, and the engine to fetch it from."""

    reservation: Reservation
    params: ConsumerParams
    prompt_digest: int


class FetchClient:
    """Calls `on_whole` once for each transfer when its KV cache has arrived, and `on_rejected` for a transfer that the
    receiver does not accept. The receiver itself reports all other failures.
    """

    def __init__(
        self,
        *,
        ref: WorkerRef,
        endpoint: str,
        receiver: Receiver,
        on_whole: Callable[[str, TransferSummary], None],
        on_rejected: Callable[[str], None],
    ) -> None:
        self._ref = ref
        self._endpoint = endpoint
        self._receiver = receiver
        self._on_whole = on_whole
        self._on_rejected = on_rejected
        self._tasks: set[asyncio.Task[None]] = set()

    def start_fetch(self, plan: FetchPlan) -> None:
        """Peers may write into the reserved blocks from now on. An empty reservation is declined."""
        reservation = plan.reservation
        if reservation.start_token == reservation.end_token:
            self._spawn(self._decline(plan))
            return
        try:
            transfer = self._receiver.reserve(reservation, plan.params.deadline)
        except HeadraceError as exc:
            log.error("transfer %s was rejected: %s", reservation.transfer_id, exc.detail)
            self._on_rejected(reservation.transfer_id)
            return
        self._spawn(self._receive(plan, transfer))

    def cancel_fetch(self, transfer_id: str) -> None:
        """The request has ended. Changes nothing for a transfer that is whole or has failed."""
        self._receiver.cancel(transfer_id, Cancelled.reason, "the request has ended")

    async def close(self) -> None:
        """Cancels everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, plan: FetchPlan, transfer: IncomingTransfer) -> None:
        transfer_id, pair_address = transfer.transfer_id, plan.params.pair_address
        arrival = asyncio.create_task(transfer.wait())
        fetch = asyncio.create_task(self._fetch(plan, plan.params.deadline.remaining_s()))
        try:
            await asyncio.wait({arrival, fetch}, return_when=asyncio.FIRST_COMPLETED)
            if fetch.done() and not arrival.done():
                error = fetch.exception()
                if isinstance(error, HeadraceError):
                    self._receiver.cancel(transfer_id, error.reason, error.detail)
            summary = await arrival
            log.info(
                "transfer %s: %d tokens, %d bytes from %s",
                transfer_id,
                plan.reservation.end_token - plan.reservation.start_token,
                summary.payload_bytes,
                pair_address,
            )
            self._on_whole(transfer_id, summary)
            await asyncio.wait({fetch}, timeout=FETCH_END_S)
        except HeadraceError as exc:
            log.warning("transfer %s from %s: %s", transfer_id, pair_address, exc.detail)
        finally:
            arrival.cancel()
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)

    async def _decline(self, plan: FetchPlan) -> None:
        """Reports to prefill that decode needs no tokens, so that the prompt does not wait for a Fetch."""
        try:
            await self._fetch(plan, DECLINE_TIMEOUT_S)
        except HeadraceError as exc:
            log.info("%s: %s", plan.reservation.transfer_id, exc.detail)

    async def _fetch(self, plan: FetchPlan, timeout_s: float) -> None:
        reservation = plan.reservation
        try:
            async with open_channel(plan.params.pair_address) as channel:
                await pair_pb2_grpc.PairServiceStub(channel).Fetch(
                    pair_pb2.FetchRequest(
                        transfer_id=reservation.transfer_id,
                        worker_id=self._ref.worker_id,
                        incarnation=self._ref.incarnation,
                        handoff_endpoint=self._endpoint,
                        start_token=reservation.start_token,
                        end_token=reservation.end_token,
                        prompt_digest=plan.prompt_digest,
                        source_incarnation=plan.params.incarnation,
                    ),
                    timeout=timeout_s,
                )
        except grpc.aio.AioRpcError as exc:
            raise error_from_rpc(exc) from exc
