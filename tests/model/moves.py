"""The move of an answer between two workers, as a world in which every message is a step.

The routers are the product's own, on an event loop that stops whenever it is idle. The workers are modelled: each token
follows from the number of tokens before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import grpc.aio

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.kv.v1 import prefix_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import Conflict, Draining, HeadraceError
from headrace_common.rpc.status import rpc_error_of, status_of
from headrace_common.telemetry.setup import init_telemetry
from headrace_frontend.request.computations import TextThreads
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_router.app import Router
from headrace_router.config import RouterConfig
from headrace_router.workers.connection import WorkerConnection
from headrace_simulator.virtual_time import VirtualLoop
from headrace_text.load import ByteCodec
from tests.kit.openai_app import NoThreads
from tests.kit.workers import linked
from tests.model.ground import Action, Violation
from tests.router_key import RouterKey
from tests.sim_layout import LAYOUT

PROMPT: Final = "a prompt of seventeen tokens: "
TOKENS: Final = 9
BEGUN: Final = 2
"""Tokens of the answer when the move begins."""
LATE_S: Final = (1.0, 2.5, 40.0)
"""Less and more than a switch may take, and more than a warm request may."""
WORKERS: Final = ("d0", "d1")
_KEY: Final = RouterKey()


class _IdleLoop(VirtualLoop):
    """Stops when nothing can run before `next_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.next_s = math.inf
        self._clock.select = self._select  # type: ignore[method-assign]

    def _select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self.next_s = self.time() + (math.inf if timeout is None else timeout)
            self.stop()
        return []

    def settle(self, *acts: Callable[[], object]) -> None:
        """Calls `acts`, and runs what follows from them at this moment."""
        for act in acts:
            self.call_soon(act)
        self.run_forever()


@dataclass(eq=False)
class _Request:
    """A request in a worker."""

    link: _Link
    stream_id: int
    call: decode_pb2.GenerateRequest
    reserved: bool = False
    has_kv: bool = False
    sent: int = 0

    @property
    def left(self) -> int:
        return self.call.sampling.max_tokens - self.call.generated_token_count - self.sent

    @property
    def name(self) -> str:
        return f"{self.link.router.name} {self.stream_id} on {self.link.worker.name}"

    def send(self, event: Any) -> None:
        self.link.to_router.append(linked(self.stream_id, event))


@dataclass(eq=False)
class _Link:
    """A stream of a router to a worker, with the messages on their way."""

    router: _Router
    worker: _Worker
    to_worker: deque[decode_pb2.LinkRequest | None] = field(default_factory=deque)
    to_router: deque[decode_pb2.LinkResponse] = field(default_factory=deque)
    open_s: float = 0.0
    """When messages arrive again."""
    arrived: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    over: bool = False

    # The methods of a call.
    async def write(self, message: decode_pb2.LinkRequest | None) -> None:
        if not self.over and not self.router.dead:
            self.to_worker.append(message)

    async def read(self) -> Any:
        message = await self.arrived.get()
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self) -> None:
        if not self.over:
            self.to_worker.append(None)

    def deliver_to_worker(self) -> None:
        if (message := self.to_worker.popleft()) is None:
            self.break_()
        else:
            self.worker.receive(self, message)

    def deliver_to_router(self) -> None:
        self.arrived.put_nowait(self.to_router.popleft())

    def break_(self) -> None:
        """The stream ends, and what is on its way is lost."""
        self.over = True
        self.to_worker.clear()
        self.to_router.clear()
        self.worker.requests = [one for one in self.worker.requests if one.link is not self]
        self.arrived.put_nowait(_unavailable())


def _unavailable() -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "as modelled")


class _Worker:
    """A decode worker without KV."""

    def __init__(self, world: MoveWorld, name: str) -> None:
        self.world, self.name = world, name
        self.ref = WorkerRef(name, "ab" * 8)
        self.alive = True
        self.requests: list[_Request] = []
        self.sending: list[tuple[prefix_pb2.SendPrefixRequest, asyncio.Future[Any]]] = []
        """SendPrefix calls that are not answered."""

    def receive(self, link: _Link, message: decode_pb2.LinkRequest) -> None:
        for opened in message.opens:
            call = opened.request
            self.requests.append(_Request(link, opened.stream_id, call))
        gone = [(link, stream_id) for stream_id in message.cancelled_stream_ids]
        self.requests = [one for one in self.requests if (one.link, one.stream_id) not in gone]

    def steps(self) -> Iterator[Action]:
        """What the engine may do next."""
        for one in self.requests:
            if not one.reserved:
                yield f"reserve {one.name}", partial(self.reserve, one)
            elif one.call.remote_prefill and not one.has_kv:
                continue
            elif not one.left:
                yield f"finish {one.name}", partial(self.finish, one)
            else:
                yield f"token of {one.name}", partial(self.generate, one)
        for asked in self.sending:
            yield f"send KV from {self.name}", partial(self.end_sending, asked, False)

    def reserve(self, one: _Request) -> None:
        one.reserved = True
        end = len(one.call.token_ids) - 1 if one.call.remote_prefill else 0
        one.send(decode_pb2.Reserved(start_token=0, end_token=end))

    def generate(self, one: _Request) -> None:
        token = (len(one.call.token_ids) + one.sent - len(PROMPT)) % 256
        one.sent += 1
        self.world.steps_since_token = 0
        one.send(decode_pb2.Tokens(token_ids=[token]))

    def finish(self, one: _Request) -> None:
        self.requests.remove(one)
        one.send(decode_pb2.Finished(reason=sampling_pb2.FINISH_REASON_LENGTH))

    def fail(self, one: _Request, error: HeadraceError | None = None) -> None:
        self.world.failed(self, begun=bool(one.sent))
        self.requests.remove(one)
        status = status_of(error or Draining("as modelled")).SerializeToString()
        failure = decode_pb2.LinkFailure(stream_id=one.stream_id, status=status)
        one.link.to_router.append(decode_pb2.LinkResponse(failures=[failure]))

    def end_sending(self, asked: tuple[prefix_pb2.SendPrefixRequest, Any], refused: bool) -> None:
        """The source's ranks have written all, and the target has it. Or the source refuses."""
        self.sending.remove(asked)
        request, answer = asked
        there = [
            one
            for one in self.world.workers[request.worker_id].requests
            if one.call.transfer_id == request.target_transfer_id
        ]
        has_it = any(one.call.transfer_id == request.transfer_id for one in self.requests)
        if answer.done():
            return
        if refused or not has_it or not there:
            answer.set_exception(rpc_error_of(Conflict("as modelled")))
        else:
            there[0].has_kv = True
            answer.set_result(prefix_pb2.SendPrefixResponse(payload_bytes=1))

    def kill(self) -> None:
        self.world.failed(self)
        self.alive = False
        for link in self.world.links:
            if link.worker is self and not link.over:
                link.break_()
        while self.sending:
            self.end_sending(self.sending[0], refused=True)

    # The other RPCs that a router calls.
    async def status(self) -> worker_pb2.WatchStatusResponse:
        if not self.alive:
            raise _unavailable()
        return worker_pb2.WatchStatusResponse(
            worker_id=self.name,
            incarnation=self.ref.incarnation,
            state=worker_pb2.WatchStatusResponse.STATE_SERVING,
            # The first worker is preferred.
            running_requests=len(self.requests) + WORKERS.index(self.name),
            total_blocks=100,
        )


@dataclass(eq=False)
class _Channel:
    """That of a router to a worker."""

    router: _Router
    worker: _Worker

    async def close(self) -> None:
        """Nothing is open."""

    def stream_stream(self, path: str, **_: Any) -> Any:
        def call() -> _Link:
            link = _Link(self.router, self.worker)
            self.worker.world.links.append(link)
            if not self.worker.alive:
                link.break_()
            return link

        return call

    def unary_stream(self, path: str, **_: Any) -> Any:
        watches = path.endswith("WatchStatus")
        first = True

        async def read() -> Any:
            nonlocal first
            if not watches:
                await asyncio.get_running_loop().create_future()
            if not first:
                await asyncio.sleep(1.0)
            first = False
            return await self.worker.status()

        call = SimpleNamespace(read=read, cancel=lambda: None)
        return lambda *_, **__: call

    def unary_unary(self, path: str, **_: Any) -> Any:
        async def send_prefix(request: Any, timeout: float) -> Any:
            answer = asyncio.get_running_loop().create_future()
            self.worker.sending.append((request, answer))
            if not self.worker.alive:
                self.worker.end_sending((request, answer), refused=True)
            async with asyncio.timeout(timeout):
                return await answer

        return lambda request, timeout: asyncio.ensure_future(send_prefix(request, timeout))


class _Router:
    """A router, and the client that reads the answer from it."""

    def __init__(self, world: MoveWorld, name: str) -> None:
        self.world, self.name = world, name
        self.tasks: list[asyncio.Task[None]] = []
        self.dead = False

    def start(self) -> None:
        settings: dict[str, Any] = {"insecure": True, "traces_sampler": "always_off"}
        config = RouterConfig(model=("sim",), router_id=self.name, **settings)
        telemetry = init_telemetry("router", self.name, config)
        codecs = {"sim": ByteCodec()}
        self.router = Router(config, codecs, telemetry, registry_pb2.Policy, lambda: 1, _KEY.key)
        self.router.update([_member(name) for name in WORKERS])

    def start_task(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.tasks.append(asyncio.ensure_future(work()))

    async def ask(self) -> None:
        world = self.world
        sampling = sampling_pb2.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        request = inference_pb2.GenerateRequest(request_id="r", text=PROMPT, sampling=sampling)
        request.generated.ids.extend(world.tokens)
        try:
            await self.router.runner.run(request, "", Deadline.after(90.0), self._write)
        except HeadraceError as error:
            world.error = error
        world.ended = True

    async def _write(self, message: inference_pb2.GenerateResponse) -> None:
        await self.world.client_reads.wait()
        self.world.read(message)

    async def move(self) -> None:
        with suppress(HeadraceError):
            await self.router.moves.move_request("r", "")

    @property
    def leader(self) -> Any:
        """The attempt that the answer is of."""
        return next(iter(self.router.moves.dispatcher.running.values()), None)

    @property
    def connections(self) -> dict[WorkerRef, WorkerConnection]:
        return self.router.workers._connections

    def die(self) -> None:
        """What it has sent arrives, and nothing more."""
        for link in self.world.links:
            if link.router is self and not link.over:
                link.to_worker.append(None)
        self.dead = True
        for task in self.tasks:
            task.cancel()


def _member(name: str) -> registry_pb2.Member:
    return registry_pb2.Member(
        worker_id=name,
        incarnation="ab" * 8,
        endpoint=name,
        role=registry_pb2.Member.ROLE_DECODE,
        model="sim",
        max_num_seqs=8,
        layout=layout_to_proto(LAYOUT),
        max_model_len=1_024,
    )


class MoveWorld:
    """One answer that moves once.

    The source generates a token after `ahead` other steps. When the first of two routers dies, the second one goes on.
    """

    def __init__(self, ahead: int = 100, routers: int = 1) -> None:
        random.seed(0)
        self._ahead = ahead
        self.loop = _IdleLoop()
        self.links: list[_Link] = []
        self.workers = {name: _Worker(self, name) for name in WORKERS}
        self.tokens: list[int] = []
        self.last: inference_pb2.GenerateResponse | None = None
        self.ended = self.cancelled = self._asked = False
        self.error: HeadraceError | None = None
        self.retries = 0
        """The failures of the worker that had the answer."""
        self.unfit: set[str] = set()
        """Workers that have failed with a request. A router may use no other."""
        self.problem: Violation | None = None
        self.steps_since_token = 0
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch.object(TextThreads, "run", NoThreads.run))
        self._patches.enter_context(mock.patch("headrace_router.app.open_channel", self._channel))
        self.loop.set_exception_handler(self._bug)
        self.client_reads = asyncio.Event()
        self.client_reads.set()
        self.routers = [_Router(self, f"router-{n}") for n in range(routers)]
        self.current = self.routers[0]
        self.loop.settle(*(one.start for one in self.routers))
        self._wait(self.loop.next_s)
        self.loop.settle(partial(self.current.start_task, self.current.ask))

    def _channel(self, endpoint: str, config: RouterConfig) -> Any:
        (router,) = [one for one in self.routers if one.name == config.router_id]
        return _Channel(router, self.workers[endpoint])

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def _bug(self, loop: Any, context: dict[str, Any]) -> None:
        self.problem = Violation(f"{context.get('message')}: {context.get('exception')!r}")

    def read(self, message: inference_pb2.GenerateResponse) -> None:
        self.tokens += message.token_ids
        self.last = message
        if self.tokens != list(range(len(self.tokens))):
            self.problem = Violation(f"the client has tokens {self.tokens}")

    def failed(self, worker: _Worker, *, begun: bool = False) -> None:
        """A worker fails with a request. One that has begun may lead, or its first token is on its way."""
        self.unfit.add(worker.name)
        leader = self.current.leader
        if begun or (leader is not None and leader.decode_worker == worker.ref):
            self.retries += 1

    # What may happen.

    def choices(self) -> list[Action]:
        """The possible steps. The source's tokens come late."""
        early: list[Action] = []
        late: list[Action] = []
        for number, link in enumerate(self.links):
            if link.open_s > self.now_s:
                continue
            if link.to_worker:
                early.append((f"deliver {number} to worker", link.deliver_to_worker))
            if link.to_router:
                early.append((f"deliver {number} to router", link.deliver_to_router))
        leader = self.current.leader
        if leader is not None and not self._asked and leader.response.completion_tokens >= BEGUN:
            early.insert(0, ("move", self._move))
        for worker in self.workers.values():
            slow = self._asked and leader is not None and leader.decode_worker == worker.ref
            for name, act in worker.steps():
                slow = slow and not name.startswith("send")
                (late if slow else early).append((name, act))
        if self.steps_since_token >= self._ahead:
            early, late = late, early
        found = [(name, self._settled(act)) for name, act in (*early, *late)]
        arriving = [act for name, act in (*early, *late) if name.endswith("to router")]
        if len(arriving) > 1:
            found.append(("deliver all to router", self._settled(*arriving)))
        next_s = self._next_s()
        if next_s < math.inf:
            found.append(("wait", partial(self._wait, next_s)))
        return found

    def _move(self) -> None:
        self._asked = True
        self.current.start_task(self.current.move)

    def _settled(self, *acts: Callable[[], None]) -> Callable[[], None]:
        return partial(self.loop.settle, *acts)

    def _next_s(self) -> float:
        opened = [link.open_s for link in self.links if link.open_s > self.now_s]
        return min([self.loop.next_s, *opened])

    def _wait(self, until_s: float) -> None:
        self.loop.pass_over(until_s - self.now_s)
        self.loop.settle()

    def faults(self) -> list[Action]:
        found = [(name, self._settled(act)) for name, act in self._faults()]
        if not self.cancelled and self._asked and not self.ended:
            found.append(("cancel", self._settled(self._cancel)))
            if self.current is not self.routers[-1]:
                found.append(("kill the router", self._kill_router))
        return found

    def _faults(self) -> Iterator[Action]:
        if not self._asked:
            return
        both = all(one.alive for one in self.workers.values())
        for worker in self.workers.values():
            if worker.alive and both:
                yield f"kill {worker.name}", worker.kill
            for one in worker.requests:
                yield f"fail {one.name}", partial(worker.fail, one)
            for asked in worker.sending:
                yield f"refuse KV from {worker.name}", partial(worker.end_sending, asked, True)
        for number, link in enumerate(self.links):
            if not link.over and link.open_s <= self.now_s:
                for late_s in LATE_S:
                    cut = partial(setattr, link, "open_s", self.now_s + late_s)
                    yield f"cut {number} for {late_s:g}", cut
        if self.client_reads.is_set():
            yield "pause the client", self._pause

    def _pause(self) -> None:
        self.client_reads.clear()
        self.loop.call_later(LATE_S[1], self.client_reads.set)

    def _cancel(self) -> None:
        self.cancelled = True
        self.current.tasks[0].cancel()

    def _kill_router(self) -> None:
        """Its client goes to the next one with the tokens that it has."""
        self.loop.settle(self.current.die)
        self.retries = sum(not one.alive for one in self.workers.values())
        self.current = self.routers[1]
        self.loop.settle(partial(self.current.start_task, self.current.ask))

    @property
    def at_rest(self) -> bool:
        return (
            (self.ended or self.cancelled)
            and all(task.done() for one in self.routers for task in one.tasks)
            and not any(one.requests or one.sending for one in self.workers.values())
            and not any(link.to_worker or link.to_router for link in self.links)
        )

    # What must hold.

    def check_step(self) -> None:
        """Of the tokens that clients read, each comes once, and the answer is of one running attempt."""
        self.steps_since_token += 1
        if self.problem is not None:
            raise self.problem
        for router in self.routers:
            links = {link for c in router.connections.values() for link in c.links._open}
            count = sum(len(link.answers.by_stream) for link in links)
            if count > 1 and not router.router.moves._moving:
                raise Violation(f"{count} workers generate the answer, and it does not move")
        leader = self.current.leader
        if leader is None or self.ended or self.cancelled:
            return
        if leader.ended.done():
            raise Violation(f"the answer is of {leader.decode_worker}, which has ended it")
        if leader.stream_id not in leader._link.answers.by_stream:
            raise Violation(f"the answer is of {leader.decode_worker}, which has its cancel")

    def check_rest(self) -> None:
        """The answer is complete, and nothing is left."""
        if not self.at_rest:
            left = [one.name for worker in self.workers.values() for one in worker.requests]
            raise Violation(f"requests are left: {left}")
        if not (self.cancelled or (self.error and len(self.unfit) == len(WORKERS))):
            if self.error is not None or self.tokens != list(range(TOKENS)):
                raise Violation(f"the client has tokens {self.tokens} and {self.error!r}")
            assert self.last is not None
            attempts = self.last.timing.attempts
            if attempts > 1 + self.retries:
                raise Violation(f"{attempts} attempts after {self.retries} failures of its worker")
        for one in self.routers:
            moves = one.router.moves
            if moves._moving or moves._workers or moves.dispatcher.running:
                raise Violation(f"{one.name} has moves or attempts left")
            for ref, connection in one.connections.items():
                if connection._requests or connection.links.count > 1:
                    raise Violation(f"{one.name} has requests on {ref} left")

    def mark(self) -> object:
        """No two states compare equal: those of a router's tasks cannot be read."""
        return object()

    def close(self) -> None:
        self._patches.close()

        async def end() -> None:
            for one in self.routers:
                await one.router.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        ending = self.loop.create_task(end())
        while not ending.done():
            self._wait(min(self.loop.next_s, self.now_s + 1.0))
        self.loop.close()
