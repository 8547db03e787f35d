"""The memory for what clients send: which input ends when it is in use."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass, field

import pytest

from headrace_common.callers.bounds import InputMemory, RequestInput, current_input
from headrace_common.errors import QueueFull
from headrace_common.rpc.status import reported_error


@dataclass(eq=False)
class Part:
    """An input that records its end."""

    caller: str
    ended: list[str] = field(default_factory=list)

    def end_input(self) -> None:
        self.ended.append(self.caller)


def test_the_oldest_input_of_the_caller_with_most_bytes_ends() -> None:
    memory = InputMemory(100)
    small, first, second = Part("small"), Part("large"), Part("large")
    memory.hold(small, 30)
    memory.hold(first, 40)
    memory.hold(second, 20)
    assert [part.ended for part in (small, first, second)] == [[], [], []]
    memory.hold(second, 60)
    assert (small.ended, first.ended, second.ended) == ([], ["large"], [])
    assert memory.bytes == 90


def test_a_caller_that_only_grows_ends_its_own_inputs() -> None:
    memory = InputMemory(100)
    other, many = Part("other"), [Part("large") for _ in range(50)]
    memory.hold(other, 10)
    for part in many:
        memory.hold(part, 10)
    assert [bool(part.ended) for part in many] == [True] * 41 + [False] * 9
    assert not other.ended
    assert memory.bytes == 100


def test_released_inputs_count_no_more_and_a_single_one_is_not_ended() -> None:
    memory = InputMemory(100)
    large, small = Part("large"), Part("small")
    memory.hold(large, 500)
    assert not large.ended
    memory.hold(small, 1)
    assert large.ended
    memory.release(large)
    memory.release(small)
    assert memory.bytes == 0


async def send(caller: str, memory: InputMemory, *sizes: int) -> int:
    """A request that never ends by itself, unless its input has no room. Returns the bytes that were counted."""
    with RequestInput(caller, memory) as sent:
        for size in sizes:
            sent.add(size)
            await asyncio.sleep(1)
        await asyncio.Event().wait()
    return sent.size


async def test_the_oldest_request_of_the_caller_with_most_bytes_is_refused() -> None:
    """While it waits, or as it counts more."""
    memory = InputMemory(100)
    small = asyncio.create_task(send("small", memory, 30))
    large = asyncio.create_task(send("large", memory, 40))
    await asyncio.sleep(2)
    growing = asyncio.create_task(send("large", memory, 20, 20, 60))
    with pytest.raises(QueueFull, match="send the request again") as refused:
        await large
    assert refused.value.metadata["queue"] == "input"
    with pytest.raises(QueueFull):
        await growing
    assert large.cancelling() == 0
    assert (memory.bytes, small.done()) == (30, False)
    small.cancel()
    with pytest.raises(asyncio.CancelledError):
        await small
    assert memory.bytes == 0


async def test_the_tasks_of_a_request_count_for_it_until_it_is_admitted() -> None:
    memory = InputMemory(100)

    async def fetch() -> None:
        sent = current_input()
        assert sent is not None
        sent.add(30)

    with RequestInput("a", memory) as sent:
        sent.add(10)
        await asyncio.gather(fetch(), fetch())
        assert memory.bytes == sent.size == 70
        sent.admit()
        sent.add(500)
        assert memory.bytes == 0
    assert current_input() is None


async def test_a_request_of_a_caller_with_half_of_the_memory_is_received_later() -> None:
    memory = InputMemory(100)
    first, other = RequestInput("a", memory), RequestInput("b", memory)
    with first, other:
        first.add(50)
        await other.wait_for_room()
        waiting = asyncio.create_task(first.wait_for_room())
        await asyncio.sleep(1)
        assert not waiting.done()
        first.admit()
        await waiting
        other.add(60)
        with pytest.raises(QueueFull):
            await other.wait_for_room()


async def test_what_a_refused_request_had_is_freed_without_a_garbage_collection() -> None:
    class Image: ...

    async def answer(images: list[weakref.ref[Image]]) -> None:
        image = Image()
        images.append(weakref.ref(image))
        try:
            await send("a", InputMemory(100), 1)
        except asyncio.CancelledError as error:
            # The error refers to this function, and it to the error.
            held = error
            raise QueueFull("no room") from held

    images: list[weakref.ref[Image]] = []
    task = asyncio.create_task(answer(images))
    await asyncio.sleep(0)
    task.cancel()
    gc.disable()
    try:
        try:
            await task
        except QueueFull as error:
            reported_error(error, "/a")
        assert images[0]() is None
    finally:
        gc.enable()
