"""An engine that starts before the last layer gets each arrival; its tokens are sent once all are counted."""

from __future__ import annotations

from headrace_engine.interface import DecodeEnded, DecodeTokens
from headrace_kv.receive.observer import TransferObserver, TransferView
from tests.component.decode.conftest import Served
from tests.component.decode.prefill_rank import PrefillRank, failure_of
from tests.waiting import until


class Listener(TransferObserver):
    """Records the number of arrived layers, and whether the transfer is active."""

    def __init__(self, served: Served, generates_at: int) -> None:
        self._engine = served.engine
        self._generates_at = generates_at
        self.arrivals: list[tuple[int, bool]] = []
        served.engine.listener = self

    def on_progress(self, transfer: TransferView) -> None:
        layers = transfer.arrived_layers(0)
        self.arrivals.append((layers, transfer.active))
        if layers == self._generates_at:
            # Before the service can call `arrived`.
            self._engine.play(DecodeTokens((7,)), DecodeEnded(True, 0))


async def test_a_token_generated_with_the_last_layer_is_streamed(
    served: Served, rank: PrefillRank
) -> None:
    listener = Listener(served, generates_at=2)
    call = await served.reserve()
    await rank.open()
    for layer in (0, 1):
        rank.land(layer)
    tokens = [token async for response in call for token in response.tokens.token_ids]
    assert tokens == [7]
    assert listener.arrivals == [(1, True), (2, False)]
    assert served.engine.arrived_ids == ["x1"]


async def test_a_token_before_the_last_layer_is_an_error(served: Served, rank: PrefillRank) -> None:
    listener = Listener(served, generates_at=1)
    call = await served.reserve()
    await rank.open()
    rank.land(0)
    error = await failure_of(call)
    assert error.reason == "INTERNAL"
    assert "before the KV cache" in error.detail
    # The engine must learn that no more layers will arrive.
    await until(lambda: listener.arrivals[-1] == (1, False), what="the call for its end")
