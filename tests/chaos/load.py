"""The clients of a chaos run, and what became of each request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import grpc.aio

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from headrace_common.errors import (
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InternalError,
    TransferTimeout,
    WorkerGone,
)
from headrace_common.status import error_from_rpc
from headrace_engine.sim.model import SimModel
from tests.chaos.plan import ChaosRequest

# The router's own.
RETRY_BUDGET = 2


@dataclass(slots=True)
class Outcomes:
    """Counts of how requests ended, and a line for each that broke a promise.

    `transferred_tokens` are those of the streams that ended well whose KV came from a prefill worker.
    """

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    on_error: Callable[[str], None] = lambda line: None
    transferred_tokens: int = 0

    def failed(self, line: str) -> None:
        """A request has ended in an error that says what happened."""
        self.errors.append(line)
        self.on_error(line)

    def violated(self, request: ChaosRequest, what: str) -> None:
        self.counts[f"WRONG: {what.partition(':')[0]}"] += 1
        self.violations.append(f"request {request.number}: {what}")


class Clients:
    """Sends the requests of a plan, some at a time, each to the router that it names."""

    def __init__(
        self,
        routers: Sequence[str],
        model: SimModel,
        deadline_s: float,
        outcomes: Outcomes,
        late_s: float = 1.0,
    ) -> None:
        self._channels = [grpc.aio.insecure_channel(endpoint) for endpoint in routers]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(one) for one in self._channels]
        self._model = model
        self._deadline_s = deadline_s
        self._late_s = late_s
        self._outcomes = outcomes
        self.done = 0

    async def run(self, requests: Iterable[ChaosRequest], concurrency: int) -> None:
        """Returns when every request has ended."""
        source = iter(requests)

        async def one_client() -> None:
            for request in source:
                await self._send(request)
                self.done += 1

        await asyncio.gather(*(one_client() for _ in range(concurrency)))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _send(self, request: ChaosRequest) -> None:
        tokens: list[int] = []
        started_s = time.monotonic()
        error = await self._attempt(request, request.router, tokens)
        if _is_of_router(error):
            # A client may retry once when its router goes, and brings along what it has.
            what = "gone on with" if tokens else "retried"
            self._outcomes.counts[f"{what} on another router"] += 1
            await asyncio.sleep(0.05)
            started_s = time.monotonic()
            error = await self._attempt(request, request.router + 1, tokens)
        self._judge(request, tokens, error, time.monotonic() - started_s)

    async def _attempt(
        self, request: ChaosRequest, router: int, tokens: list[int]
    ) -> HeadraceError | None:
        """None when the stream ended well or its client has cancelled it."""
        call = self._stubs[router % len(self._stubs)].Generate(
            inference_pb2.GenerateRequest(
                tokens=inference_pb2.TokenIds(ids=request.prompt),
                generated=inference_pb2.TokenIds(ids=tokens),
                sampling=sampling_pb2.SamplingParams(
                    temperature=0.0, max_tokens=request.answer_tokens, ignore_eos=True
                ),
            ),
            timeout=self._deadline_s,
        )
        try:
            async with asyncio.timeout(request.cancel_after_s):
                async for response in call:
                    tokens += response.token_ids
                    self._outcomes.transferred_tokens += response.usage.transferred_tokens
        except TimeoutError:
            call.cancel()
            self._outcomes.counts["cancelled by its client"] += 1
        except grpc.aio.AioRpcError as rpc_error:
            return error_from_rpc(rpc_error)
        return None

    def _judge(
        self,
        request: ChaosRequest,
        tokens: Sequence[int],
        error: HeadraceError | None,
        elapsed_s: float,
    ) -> None:
        expected = self._model.expected_tokens(request.prompt, request.answer_tokens)
        outcomes = self._outcomes
        outcomes.latencies_s.append(elapsed_s)
        if tuple(tokens) != expected[: len(tokens)]:
            outcomes.violated(request, f"tokens: {list(tokens)} instead of {list(expected)}")
        if elapsed_s > self._deadline_s + self._late_s:
            outcomes.violated(request, f"late: ended after {elapsed_s:.1f} s")
        if error is None:
            if len(tokens) == len(expected):
                outcomes.counts["right"] += 1
            elif request.cancel_after_s is None:
                outcomes.violated(request, f"short: {len(tokens)} of {len(expected)} tokens")
        elif isinstance(error, InternalError):
            outcomes.violated(request, f"unnamed: {error.detail}")
        elif tokens and _could_go_on(error):
            attempts = error.metadata.get("attempts", "no")
            outcomes.violated(
                request, f"given up: {error.reason} after {attempts} attempts: {error.detail}"
            )
        else:
            seen = "after its first token" if tokens else "before its first token"
            outcomes.counts[f"{error.reason} {seen}"] += 1
            ended = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
            outcomes.failed(
                f"{ended}Z request {request.number} of router {request.router} {seen}, "
                f"{elapsed_s:.1f} s: {error.reason} {error.detail}"
            )


def _could_go_on(error: HeadraceError) -> bool:
    """Whether the router gave up an answer that had begun while it had attempts and time left."""
    if _is_of_router(error) or isinstance(error, DeadlineExceeded | TransferTimeout):
        return False
    return int(error.metadata.get("attempts", 0)) <= RETRY_BUDGET


def _is_of_router(error: HeadraceError | None) -> bool:
    """Whether the router itself is going or gone, and not a worker that it names."""
    return isinstance(error, WorkerGone | Draining) and "worker_id" not in error.metadata
