"""Sends planned requests and measures each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headrace_cli.load.sample import RequestFailure, RequestSample
from headrace_cli.load.workload import PlannedRequest

Clock = Callable[[], float]
"""Seconds since the start of the run."""


class Target(Protocol):
    """A server under load."""

    async def send(self, request: PlannedRequest, sample: RequestSample, clock: Clock) -> None:
        """Reads the whole answer into `sample`. Raises RequestFailure."""


async def run_load(
    target: Target,
    requests: Sequence[PlannedRequest],
    *,
    concurrency: int,
    on_end: Callable[[RequestSample], None] = lambda sample: None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[list[RequestSample], float]:
    """Sends every request, at most `concurrency` at once, and returns the samples in their order and the duration.

    A request without a start time is sent as soon as a place is free. One with a start time is sent then, or later
    when no place is free; its times count from the sending.
    """
    begin_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begin_s

    places = asyncio.Semaphore(concurrency)
    samples: list[RequestSample] = []

    async def measure(request: PlannedRequest, sample: RequestSample) -> None:
        try:
            await target.send(request, sample, clock)
        except RequestFailure as error:
            sample.fail(error)
        finally:
            sample.end(clock())
            places.release()
        on_end(sample)

    async with asyncio.TaskGroup() as group:
        for request in requests:
            if request.start_s is not None:
                await sleep(max(0.0, request.start_s - clock()))
            await places.acquire()
            now_s = clock()
            sample = RequestSample(now_s if request.start_s is None else request.start_s, now_s)
            samples.append(sample)
            group.create_task(measure(request, sample))
    return samples, clock()
