"""The clients of a chaos run, and the outcome of each request."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import grpc.aio

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InternalError,
    TransferTimeout,
    WorkerGone,
)
from headrace_common.rpc.status import error_from_rpc
from headrace_engine.sim.model.model import SimModel
from tests.chaos.kinds import ModelFolder, adapter_of, second_turn, to_proto
from tests.chaos.plan import ChaosRequest, Kind

_TICK_S = 0.05
_LONG_TOKENS = 30
# The router's own reason.
RETRY_BUDGET = 2


@dataclass(slots=True)
class Outcomes:
    """Counts of outcomes, and a line for each request that broke a promise.

    `transferred_tokens` counts the tokens with KV from a prefill worker, in streams that ended well.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The same counts by the kinds of the requests."""
    violations: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    stood_still_s: float = 0.0
    on_error: Callable[[str], None] = lambda line: None
    transferred_tokens: int = 0

    def failed(self, line: str) -> None:
        """Counts a request that ended in a named error."""
        self.errors.append(line)
        self.on_error(line)

    def count(self, request: ChaosRequest, what: str) -> None:
        """Counts what a request has met."""
        self.counts[what] += 1
        self.kinds[request.kind][what] += 1

    def violated(self, request: ChaosRequest, what: str) -> None:
        self.count(request, f"WRONG: {what.partition(':')[0]}")
        self.violations.append(f"request {request.number}, {request.kind}: {what}")


@dataclass(slots=True)
class _Stream:
    """What a client has of an answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    is_stored: bool = True
    """Whether the router of the request has the whole answer, if it was asked to store it."""


class Clients:
    """Sends the requests of a plan with bounded concurrency, each to its router."""

    def __init__(
        self,
        channels: Sequence[grpc.aio.Channel],
        model: SimModel,
        folder: ModelFolder,
        deadline_s: float,
        outcomes: Outcomes,
        late_s: float = 1.0,
        hostile: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """`channels`: one for each router. `close` closes them. `hostile` has the requests of workers that lie."""
        self._hostile = hostile
        self._channels = channels
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(one) for one in channels]
        self._model, self._folder = model, folder
        self._deadline_s = deadline_s
        self._late_s = late_s
        self._outcomes = outcomes
        self.done = 0
        self.running: dict[str, int] = {}
        """The router of each request in progress with a long answer, by request id."""

    async def run(
        self, requests: Iterable[ChaosRequest], concurrency: int, last_s: float = math.inf
    ) -> None:
        """Returns when every request has ended, or every request that was sent within `last_s`."""
        source = iter(requests)
        end_s = time.monotonic() + last_s

        async def one_client() -> None:
            for request in source:
                if time.monotonic() > end_s:
                    return
                await self._send(request)
                self.done += 1

        clock = asyncio.create_task(self._watch_clock())
        try:
            await asyncio.gather(*(one_client() for _ in range(concurrency)))
        finally:
            clock.cancel()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _watch_clock(self) -> None:
        """Measures the time in which this process got no processor. No event can arrive in it."""
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self._outcomes.stood_still_s += max(0.0, time.monotonic() - slept_s - 2 * _TICK_S)

    async def _send(self, request: ChaosRequest) -> None:
        sent = to_proto(request)
        stream = await self._answered(request, sent, sent)
        # A client that cancels may have all tokens, but not the end of the answer, with which it is stored.
        is_stored = stream.is_stored and request.cancel_after_s is None
        if request.kind is Kind.CONVERSATION and is_stored:
            await self._answered(request, *second_turn(sent, stream.text))

    async def _answered(
        self,
        request: ChaosRequest,
        sent: inference_pb2.GenerateRequest,
        whole: inference_pb2.GenerateRequest,
    ) -> _Stream:
        """Judges the answer. `whole` has all messages of the conversation."""
        expected = self._model.expected_tokens(
            self._folder.prompt_of(whole), request.answer_tokens, adapter=adapter_of(request)
        )
        stream = _Stream()
        still_s = self._outcomes.stood_still_s
        started_s = time.monotonic()
        error = await self._attempt(request, sent, request.router, stream)
        if _is_of_router(error):
            # A client may retry once when its router stops, and sends the messages and tokens that it has.
            what = "gone on with" if stream.tokens else "retried"
            self._outcomes.count(request, f"{what} on another router")
            await asyncio.sleep(0.05)
            still_s = self._outcomes.stood_still_s
            started_s = time.monotonic()
            again = inference_pb2.GenerateRequest()
            again.CopyFrom(whole)
            again.generated.ids.extend(stream.tokens)
            again.store = False
            error = await self._attempt(request, again, request.router + 1, stream)
            stream.is_stored = False
        elapsed_s = time.monotonic() - started_s
        late_s = self._late_s + self._outcomes.stood_still_s - still_s
        stream.is_stored &= error is None and tuple(stream.tokens) == expected
        if self._hostile is not None and sent.request_id in self._hostile():
            self._judge_lie(request, expected, stream.tokens, error)
            return stream
        self._judge(request, expected, stream.tokens, error, elapsed_s, late_s)
        return stream

    async def _attempt(
        self,
        request: ChaosRequest,
        sent: inference_pb2.GenerateRequest,
        router: int,
        stream: _Stream,
    ) -> HeadraceError | None:
        """Returns the error of a stream, or None when it ended well or its client cancelled it."""
        router %= len(self._stubs)
        if request.answer_tokens >= _LONG_TOKENS:
            self.running[sent.request_id] = router
        call = self._stubs[router].Generate(sent, timeout=self._deadline_s)
        try:
            async with asyncio.timeout(request.cancel_after_s):
                async for response in call:
                    stream.tokens += response.token_ids
                    stream.text += response.text
                    self._outcomes.transferred_tokens += response.usage.transferred_tokens
                    if response.usage.kept.tokens:
                        self._outcomes.count(request, "promised")
        except TimeoutError:
            call.cancel()
            self._outcomes.count(request, "cancelled by its client")
        except grpc.aio.AioRpcError as rpc_error:
            return error_from_rpc(rpc_error)
        finally:
            self.running.pop(sent.request_id, None)
        return None

    def _judge_lie(
        self,
        request: ChaosRequest,
        expected: tuple[int, ...],
        tokens: Sequence[int],
        error: HeadraceError | None,
    ) -> None:
        """Of a request that a hostile worker has got: any answer, or an error with a name."""
        if isinstance(error, InternalError):
            self._outcomes.violated(request, f"unnamed, of a hostile worker: {error.detail}")
            return
        is_right = tuple(tokens) == expected[: len(tokens)]
        what = "wrong tokens" if not is_right else "right tokens" if error is None else error.reason
        self._outcomes.count(request, f"of a hostile worker: {what}")
        if error is not None:
            self._outcomes.failed(f"of a hostile worker: {error.reason} {error.detail}")

    def _judge(
        self,
        request: ChaosRequest,
        expected: tuple[int, ...],
        tokens: Sequence[int],
        error: HeadraceError | None,
        elapsed_s: float,
        late_s: float,
    ) -> None:
        outcomes = self._outcomes
        outcomes.latencies_s.append(elapsed_s)
        if tuple(tokens) != expected[: len(tokens)]:
            outcomes.violated(request, f"tokens: {list(tokens)} instead of {list(expected)}")
        if elapsed_s > self._deadline_s + late_s:
            outcomes.violated(request, f"late: ended after {elapsed_s:.1f} s")
        elif elapsed_s > self._deadline_s + self._late_s:
            outcomes.count(request, "late, while the clients stood still")
        if error is None:
            if len(tokens) == len(expected):
                outcomes.count(request, "right")
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
            outcomes.count(request, f"{error.reason} {seen}")
            ended = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
            outcomes.failed(
                f"{ended}Z request {request.number} of router {request.router} {seen}, "
                f"{elapsed_s:.1f} s: {error.reason} {error.detail}"
            )


def _could_go_on(error: HeadraceError) -> bool:
    """Whether the router gave up a started stream although it had attempts and time left."""
    if _is_of_router(error) or isinstance(error, DeadlineExceeded | TransferTimeout):
        return False
    return int(error.metadata.get("attempts", 0)) <= RETRY_BUDGET


def _is_of_router(error: HeadraceError | None) -> bool:
    """Whether the error means that the router itself is stopping or gone, rather than a worker that it names."""
    # A call that arrives while the server stops is cancelled by gRPC, without our details.
    if isinstance(error, Cancelled):
        return "grpc_code" in error.metadata
    return isinstance(error, WorkerGone | Draining) and "worker_id" not in error.metadata
