"""The bounds on each caller of a client listener: calls in flight, the memory of their requests, and turns of work.

A caller is a tenant, or where no API key is known, a host.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import ipaddress
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Final, Protocol, TypeAlias
from urllib.parse import unquote

from headrace_common.access.authorizer import CREDENTIAL_CHECK_S, Rechecked
from headrace_common.errors import QueueFull, Unauthenticated
from headrace_common.tasks import Recent

# Addresses of which the host is remembered. Clients keep connections, so each has many requests.
_HOSTS_MAX: Final = 4_096


@lru_cache(maxsize=_HOSTS_MAX)
def host_of(address: str) -> str:
    """The host of an IP address. The addresses of one IPv6 network of 64 bits are one host."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        # Such as the path of a Unix socket.
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((ip, 64), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


def host_of_peer(peer: str) -> str:
    """The host of a peer as gRPC names it, such as "ipv4:10.0.0.7:40112"."""
    address = unquote(peer.partition(":")[2]).rpartition(":")[0]
    return host_of(address.strip("[]"))


CALLERS_MAX: Final = 4_096


class RateByCaller:
    """Permits `per_s` events of each caller, and at first `burst` of them.

    Knows the last `CALLERS_MAX` callers. A forgotten one has its whole burst again.
    """

    def __init__(
        self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._debts: Recent[str, tuple[float, float]] = Recent(CALLERS_MAX)
        """Events that no time has paid for yet, and when they were counted."""

    def count(self, caller: str, weight: float = 1.0) -> None:
        """Counts an event as `weight` events, also one beyond the rate."""
        # What exceeds the burst by far would outlast its cause.
        debt = min(self._debt(caller) + weight, 2.0 * self._burst)
        self._debts[caller] = (debt, self._clock())

    def excess_s(self, caller: str) -> float:
        """Seconds until the caller is within the rate again. 0 while it is."""
        if caller not in self._debts:
            return 0.0
        return max(0.0, (self._debt(caller) - self._burst) / self._per_s)

    def _debt(self, caller: str) -> float:
        debt, at_s = self._debts.get(caller, (0.0, 0.0))
        return max(0.0, debt - (self._clock() - at_s) * self._per_s)


TURNS_S: Final = 0.004
"""Time of one iteration of the event loop that turns may take, by the time of those before."""
_TURNS_MAX: Final = 16
_Turn: TypeAlias = tuple[asyncio.Task[object], asyncio.Future[None]]


class CallerTurns:
    """A few turns for each waiting caller in each iteration of the event loop, which owns this. At least one.

    A turn lasts until the task waits for something, so nothing must be released. While there is but one of `calls`, no
    turn is waited for. Each iteration and each message to a worker costs something, which turns in one iteration share.
    """

    def __init__(
        self, calls: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`calls` are those in flight, by caller."""
        self._calls = calls
        self._clock = clock
        self._waiting: OrderedDict[str, deque[_Turn]] = OrderedDict()
        self._tasks_of: dict[str, set[asyncio.Task[object]]] = {}
        """The tasks of each caller with a turn in this iteration, which began at `_began_s`."""
        self._began_s = 0.0
        self._at_once = 1
        """Turns of each caller in an iteration."""
        self._next: asyncio.Handle | None = None

    async def wait(self, caller: str) -> None:
        """Returns at a turn of the caller for the current task. At once while it has one, and without a caller."""
        calls = self._calls
        if not caller or (not self._waiting and len(calls) <= 1 and sum(calls.values()) <= 1):
            return
        # Each look for the loop is a system call.
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None, "turns are for tasks"
        tasks = self._tasks_of.setdefault(caller, set())
        if task in tasks:
            return
        if self._next is None:
            self._began_s = self._clock()
            self._next = loop.call_soon(self._begin_iteration)
        if caller not in self._waiting and len(tasks) < self._at_once:
            tasks.add(task)
            return
        given: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(caller, deque()).append((task, given))
        await given

    def _begin_iteration(self) -> None:
        now_s, taken = self._clock(), sum(map(len, self._tasks_of.values()))
        if taken:
            fitting = taken * TURNS_S / max(1e-6, now_s - self._began_s)
            self._at_once = max(1, min(_TURNS_MAX, int(fitting / max(1, len(self._waiting)))))
        self._began_s = now_s
        self._tasks_of.clear()
        for caller, turns in tuple(self._waiting.items()):
            tasks = self._tasks_of[caller] = set()
            while turns and len(tasks) < self._at_once:
                task, given = turns.popleft()
                # It is done when its request was cancelled.
                if not given.done():
                    given.set_result(None)
                    tasks.add(task)
            if not turns:
                del self._waiting[caller]
        self._next = None
        if self._waiting or self._tasks_of:
            self._next = asyncio.get_running_loop().call_soon(self._begin_iteration)


class FewEach:
    """Lets so many tasks of each caller into a block at a time, in the order of their calls."""

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._turns: dict[str, tuple[asyncio.Semaphore, int]] = {}
        """The places of each caller with tasks here, and the number of its tasks."""

    @asynccontextmanager
    async def of(self, caller: str) -> AsyncIterator[None]:
        """A block that other tasks of the caller wait for."""
        places, users = self._turns.get(caller, (asyncio.Semaphore(self._count), 0))
        self._turns[caller] = (places, users + 1)
        try:
            async with places:
                yield
        finally:
            _, users = self._turns[caller]
            if users > 1:
                self._turns[caller] = (places, users - 1)
            else:
                del self._turns[caller]


# The allocator keeps freed memory that lies below memory in use. A request with images leaves much of it.
_TRIM_BYTES_MIN: Final = 4 * 1024 * 1024
_TRIM_AFTER_S: Final = 5.0


def _trim() -> None:
    # Errors of requests may be in cycles with what these had.
    gc.collect(1)
    ctypes.CDLL(None).malloc_trim(0)


class Input(Protocol):
    """What one client sends. `caller` shares the memory with its other inputs."""

    caller: str

    def end_input(self) -> None:
        """Frees the memory, and refuses the request."""


class InputMemory:
    """Ends inputs while they have more than `bytes_max` together: the oldest of the caller with the most bytes.

    One event loop owns it. An input that is alone is not ended: it has bounds of its own.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._inputs: dict[str, dict[Input, int]] = {}
        self._by_caller: Counter[str] = Counter()
        self._released = asyncio.Event()
        self._trimmed_s = -_TRIM_AFTER_S
        self.bytes = 0
        """Of all inputs."""

    async def wait_for_room(self, caller: str) -> None:
        """Waits while the inputs of a caller have half of the memory or more."""
        while 2 * self._by_caller[caller] >= self._bytes_max:
            self._released.clear()
            await self._released.wait()

    def hold(self, holder: Input, size: int) -> None:
        """Sets the bytes of an input. May end it, or others."""
        held = self._inputs.setdefault(holder.caller, {})
        growth = size - held.get(holder, 0)
        held[holder] = size
        self._by_caller[holder.caller] += growth
        self.bytes += growth
        while self.bytes > self._bytes_max and self._end_oldest():
            pass

    def release(self, holder: Input) -> None:
        """Forgets an input. Does nothing when it has ended."""
        held = self._inputs.get(holder.caller, {})
        size = held.pop(holder, None)
        if size is None:
            return
        self.bytes -= size
        self._by_caller[holder.caller] -= size
        self._released.set()
        if not held:
            del self._inputs[holder.caller], self._by_caller[holder.caller]

    def trim_later(self) -> None:
        """Returns freed memory to the system in a while, on a thread. Repeats are ignored until then."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._trimmed_s + _TRIM_AFTER_S:
            self._trimmed_s = loop.time()
            loop.call_later(_TRIM_AFTER_S, loop.run_in_executor, None, _trim)

    def _end_oldest(self) -> bool:
        caller = max(self._by_caller, key=self._by_caller.__getitem__)
        held = self._inputs[caller]
        if len(held) == len(self._inputs) == 1:
            return False
        oldest = next(iter(held))
        self.release(oldest)
        oldest.end_input()
        return True


INPUT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes in one process that clients have sent, or had fetched, in requests that are not admitted with them yet."""
COUNTED_BYTES: Final = 65_536
"""Whole requests of fewer bytes are not counted there: calls in flight bound them."""
READS_MAX: Final = 8
"""Requests of a caller that are received at a time over gRPC. Only a complete one can be counted."""
_ROOM_WAIT_S: Final = 30.0
_INPUT: Final = InputMemory(INPUT_BYTES_MAX)
_CALLER: Final = ContextVar[str]("caller", default="")
_CURRENT: Final = ContextVar["RequestInput | None"]("input", default=None)


class RequestInput:
    """The bytes that a client has sent in one request: a context manager in the task of the request.

    Every byte of a client counts here from its arrival until `admit`, or the end of the block. Where the memory is used
    up, the oldest request of the caller with the most bytes ends with QueueFull.
    """

    def __init__(
        self,
        caller: str,
        memory: InputMemory | None = None,
        calls: Counter[str] | None = None,
    ) -> None:
        """`calls` counts the calls in flight of each caller, of which this is one."""
        self.caller, self._calls = caller, calls
        self._memory = memory or _INPUT
        self.size = 0
        """Bytes that have arrived, without those of a small request."""
        self._is_held = self._is_admitted = self._is_refused = self._is_cancelled = False
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> RequestInput:
        self._task = asyncio.current_task()
        if self._calls is not None:
            _CALLER.set(self.caller)
            self._calls[self.caller] += 1
        _CURRENT.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._calls is not None:
            self._calls[self.caller] -= 1
            if not self._calls[self.caller]:
                del self._calls[self.caller]
        self.admit()
        if self.size >= _TRIM_BYTES_MIN:
            self._memory.trim_later()
        _CURRENT.set(None)
        # An error of the task refers to this object.
        task, self._task = self._task, None
        if self._is_cancelled and task is not None:
            task.uncancel()
            if kind is asyncio.CancelledError:
                raise _no_memory() from None

    async def wait_for_room(self) -> None:
        """Waits while the caller has half of the memory or more. So its large requests are received in turn.

        Raises QueueFull when that takes too long.
        """
        try:
            async with asyncio.timeout(_ROOM_WAIT_S):
                await self._memory.wait_for_room(self.caller)
        except TimeoutError:
            raise _no_memory() from None

    def set_size(self, size: int) -> None:
        """So many bytes have arrived so far. Raises QueueFull in a task of the request that is refused."""
        self.size = size
        if not (self._is_admitted or self._is_refused):
            self._is_held = True
            self._memory.hold(self, size)
        if self._is_refused and asyncio.current_task() is not None:
            raise _no_memory()

    def add(self, size: int) -> None:
        """So many more bytes have arrived. Raises QueueFull as `set_size` does."""
        self.set_size(self.size + size)

    def admit(self) -> None:
        """The bytes count elsewhere from now on."""
        self._is_admitted = True
        if self._is_held:
            self._memory.release(self)

    def end_input(self) -> None:
        """See Input."""
        self._is_refused = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._is_cancelled = self._task.cancel()


def current_input() -> RequestInput | None:
    """The input of the request that the current task works for."""
    return _CURRENT.get()


def _no_memory() -> QueueFull:
    return QueueFull(
        "other requests use the memory for what clients send; send the request again",
        metadata={"queue": "input", "maxsize": str(INPUT_BYTES_MAX)},
        retry_after_s=1.0,
    )


REFUSED_CALLS: Final = "calls in flight"
REFUSED_BODY: Final = "late request"
REFUSED_KEY: Final = "removed key"


def _ignore_refusal(reason: str, count: int) -> None:
    pass


class CallerBounds:
    """One event loop owns it. Every client listener of a process shares it.

    `calls_max` bounds a caller's calls in flight. `count_refused` gets a reason, such as `REFUSED_CALLS`, and a number
    of calls. The API key of an open call is looked up again every `check_s`.
    """

    def __init__(
        self,
        calls_max: int = 2_048,
        count_refused: Callable[[str, int], None] = _ignore_refusal,
        *,
        check_s: float = CREDENTIAL_CHECK_S,
    ) -> None:
        self.count_refused = count_refused
        self._calls_max = calls_max
        self._check_s = check_s
        self._calls: Counter[str] = Counter()
        # Calls of one caller take turns too. Work for all of them in one iteration would delay the first answer until
        # the last request is routed.
        self._turns = CallerTurns(self._calls)

    def calls(self, caller: str) -> int:
        """Calls in flight of a caller."""
        return self._calls[caller]

    def call(self, caller: str) -> RequestInput:
        """Counts a call while the block runs. Raises QueueFull for one that exceeds the caller's calls in flight."""
        if self._calls[caller] >= self._calls_max:
            self.count_refused(REFUSED_CALLS, 1)
            raise QueueFull(
                f"{self._calls_max} calls of this caller are in flight; wait for one to end, or raise "
                "max_concurrent_requests",
                metadata={"queue": "calls", "maxsize": str(self._calls_max)},
            )
        return RequestInput(caller, calls=self._calls)

    def rechecked(self, tenant_now: Callable[[], str], tenant: str) -> AbstractContextManager[None]:
        """Ends the block with Unauthenticated once `tenant_now` does not return the tenant of the call any more."""

        def check() -> None:
            if tenant_now() != tenant:
                self.count_refused(REFUSED_KEY, 1)
                raise Unauthenticated(
                    "the API key was removed while its request ran; use another key"
                )

        return Rechecked(check, self._check_s) if tenant else nullcontext()

    def wait_turn(self) -> Awaitable[None]:
        """Waits until the caller may do expensive work, up to the next wait. Outside `call` it is no wait."""
        return self._turns.wait(_CALLER.get())
