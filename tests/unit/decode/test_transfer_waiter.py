"""Which events the engine gets when a transfer has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from headrace_decode.transfer_waiter import TransferWaiter
from headrace_engine.interface import Arrived


async def test_the_engine_learns_of_an_arrival_although_its_callback_fails() -> None:
    loop = asyncio.get_running_loop()
    bugs: list[Any] = []
    loop.set_exception_handler(lambda _, context: bugs.append(context))
    events: list[object] = []

    def on_arrived() -> None:
        raise ValueError("a bug")

    transfer: Any = SimpleNamespace(
        transfer_id="x1", notify=lambda _, on_end: on_end(object()), active=False
    )
    engine: Any = SimpleNamespace(transfer_event=events.append)
    timestamps: Any = SimpleNamespace(kv_arrived=lambda: None)
    waiter = TransferWaiter(
        transfer, engine, timestamps, bugs.append, forwards_state=False, on_arrived=on_arrived
    )
    await asyncio.sleep(0.01)
    await waiter.wait_ended()
    assert events == [Arrived("x1")]
    (bug,) = bugs
    assert isinstance(bug["exception"], ValueError)
