"""An engine that begins before the last layer is there hears of each, and is heard once all are counted."""

from __future__ import annotations

from headrace_engine.interface import DecodeEnded, DecodeTokens
from headrace_kv.receive.observer import TransferObserver, TransferView
from tests.component.decode.conftest import Served, request
from tests.component.decode.test_generate import (
    RESERVATION,
    PrefillRank,
    failure_of,
    next_event,
    until,
)


class Listener(TransferObserver):
    """Notes how many layers are there, and what the transfer has come to."""

    def __init__(self, served: Served, speaks_at: int) -> None:
        self._engine = served.engine
        self._speaks_at = speaks_at
        self.heard: list[tuple[int, bool]] = []
        served.engine.listener = self

    def on_progress(self, transfer: TransferView) -> None:
        layers = transfer.arrived_layers(0)
        self.heard.append((layers, transfer.active))
        if layers == self._speaks_at:
            # Sooner than anybody could have called `arrived`.
            self._engine.script.put_nowait(DecodeTokens((7,)))
            self._engine.script.put_nowait(DecodeEnded(True, 0))


async def test_a_token_that_comes_with_the_last_layer_is_streamed(served: Served) -> None:
    listener = Listener(served, speaks_at=2)
    call = served.decode.Generate(request())
    served.engine.script.put_nowait(RESERVATION)
    assert await next_event(aiter(call)) == "reserved"
    rank = PrefillRank(served)
    await rank.open()
    for layer in (0, 1):
        rank.land(layer)
    tokens = [token async for response in call for token in response.tokens.token_ids]
    assert tokens == [7]
    assert listener.heard == [(1, True), (2, False)]
    assert served.engine.arrived_ids == ["x1"]
    rank.leave()


async def test_a_token_before_the_last_layer_is_not(served: Served) -> None:
    listener = Listener(served, speaks_at=1)
    call = served.decode.Generate(request())
    served.engine.script.put_nowait(RESERVATION)
    assert await next_event(aiter(call)) == "reserved"
    rank = PrefillRank(served)
    await rank.open()
    rank.land(0)
    error = await failure_of(call)
    assert error.reason == "INTERNAL"
    assert "before the KV cache" in error.detail
    # The engine's steps must not wait for what will not come.
    await until(lambda: listener.heard[-1] == (1, False), "the news of its end")
    rank.leave()
