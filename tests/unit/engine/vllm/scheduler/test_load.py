"""What the scheduler's hooks tell of an engine's load."""

from __future__ import annotations

import asyncio

from headrace_engine.vllm.link.messages import EngineLoad, load_from_proto, load_to_proto
from headrace_engine.vllm.scheduler.load import REPORT_S, LoadMeter, report_changes


def test_requests_are_followed_through_every_state() -> None:
    meter = LoadMeter()
    assert meter.read() == EngineLoad()
    meter.bind(lambda: (3, 10))
    meter.added("a")
    meter.added("b")
    assert meter.read() == EngineLoad(0, 2, 3, 10)
    meter.stepped(["a", "b"], ())
    assert meter.read() == EngineLoad(2, 0, 3, 10)
    # One that is not in a step for lack of tokens still has its place.
    meter.stepped(["a"], ())
    assert meter.read() == EngineLoad(2, 0, 3, 10)
    meter.stepped(["a"], ["b"])
    assert meter.read() == EngineLoad(1, 1, 3, 10)
    # Preempted between two steps, and back in the next.
    meter.stepped(["a", "b"], ["a"])
    assert meter.read() == EngineLoad(2, 0, 3, 10)
    meter.finished("a")
    meter.finished("b")
    assert meter.read() == EngineLoad(0, 0, 3, 10)


def test_a_request_that_never_ran_leaves_nothing() -> None:
    meter = LoadMeter()
    meter.added("a")
    meter.finished("a")
    assert meter.read() == EngineLoad()


async def test_only_changes_are_sent() -> None:
    meter = LoadMeter()
    held = [0]
    meter.bind(lambda: (held[0], 4))
    sent: list[EngineLoad] = []
    task = asyncio.create_task(report_changes(meter, sent.append))
    await asyncio.sleep(3 * REPORT_S)
    held[0] = 2
    await asyncio.sleep(3 * REPORT_S)
    task.cancel()
    assert sent == [EngineLoad(0, 0, 0, 4), EngineLoad(0, 0, 2, 4)]


def test_the_link_carries_it_whole() -> None:
    load = EngineLoad(1, 2, 3, 4)
    assert load_from_proto(load_to_proto(load)) == load
