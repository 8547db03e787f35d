"""A forward pass waits for the layers that it needs, for so long, and for nobody else."""

from __future__ import annotations

import threading
import time

import pytest

from headrace_common.errors import TransferFailed
from headrace_engine.vllm.rank.layer_wait import LayerWait
from headrace_engine.vllm.step.plan import LateLoad

LAYERS = 6
NEVER = 1e12


def late(transfer_id: str = "x1", *, lost: bool = False, deadline: float = NEVER) -> LateLoad:
    number = int(transfer_id[1:])
    return LateLoad(transfer_id, (number * 10, number * 10 + 1), deadline, lost)


def forward(wait: LayerWait) -> float:
    """A whole pass, and the seconds that it took."""
    start_s = time.monotonic()
    for layer in range(LAYERS):
        wait.before_attention(layer)
    wait.end_step()
    return time.monotonic() - start_s


def test_nothing_late_costs_nothing() -> None:
    wait = LayerWait(LAYERS, 5.0)
    wait.begin_step([])
    assert forward(wait) < 1
    assert wait.take_invalid_blocks() == set()


def test_each_hook_needs_the_next_layer_as_well() -> None:
    wait = LayerWait(LAYERS, 0.05)
    wait.heard("x1", 4, failed=False)
    wait.begin_step([late()])
    for layer in range(3):
        wait.before_attention(layer)
    assert wait.take_invalid_blocks() == set()
    # The new token of layer 4 is written before that layer's own hook.
    wait.before_attention(3)
    assert wait.take_invalid_blocks() == {10, 11}


def test_what_comes_in_time_is_waited_for() -> None:
    wait = LayerWait(LAYERS, 10.0)
    wait.heard("x1", 4, failed=False)
    wait.begin_step([late()])
    passed: list[int] = []

    def run() -> None:
        for layer in range(LAYERS):
            wait.before_attention(layer)
            passed.append(layer)
        wait.end_step()

    thread = threading.Thread(target=run)
    thread.start()
    for arrived, expected in ((4, [0, 1, 2]), (5, [0, 1, 2, 3]), (6, list(range(LAYERS)))):
        wait.heard("x1", arrived, failed=False)
        deadline_s = time.monotonic() + 5
        while len(passed) < len(expected) and time.monotonic() < deadline_s:
            time.sleep(0.005)
        time.sleep(0.02)
        assert passed == expected
    thread.join(5)
    assert not thread.is_alive()
    assert wait.take_invalid_blocks() == set()


def test_a_step_waits_once_for_all_that_is_late() -> None:
    wait = LayerWait(LAYERS, 0.2)
    wait.begin_step([late("x1"), late("x2")])
    assert 0.2 <= forward(wait) < 0.4
    assert wait.take_invalid_blocks() == {10, 11, 20, 21}
    assert wait.take_invalid_blocks() == set()


def test_what_was_given_up_is_not_waited_for_again() -> None:
    wait = LayerWait(LAYERS, 0.2)
    wait.begin_step([late()])
    forward(wait)
    wait.take_invalid_blocks()
    wait.heard("x1", LAYERS, failed=False)
    wait.begin_step([late()])
    assert forward(wait) < 0.2
    assert wait.take_invalid_blocks() == {10, 11}


def test_only_what_is_late_is_given_up() -> None:
    wait = LayerWait(LAYERS, 0.1)
    wait.heard("x2", LAYERS, failed=False)
    wait.begin_step([late("x1"), late("x2")])
    forward(wait)
    assert wait.take_invalid_blocks() == {10, 11}


def test_the_transfers_own_deadline_is_sooner() -> None:
    wait = LayerWait(LAYERS, 5.0)
    wait.heard("x2", LAYERS - 1, failed=False)
    wait.begin_step([late("x1", deadline=time.time() + 0.1), late("x2")])
    threading.Timer(0.3, lambda: wait.heard("x2", LAYERS, failed=False)).start()
    assert 0.1 <= forward(wait) < 2
    assert wait.take_invalid_blocks() == {10, 11}


def test_a_failure_ends_the_wait() -> None:
    wait = LayerWait(LAYERS, 10.0)
    wait.begin_step([late()])
    threading.Timer(0.1, lambda: wait.heard("x1", 0, failed=True)).start()
    assert forward(wait) < 5
    assert wait.take_invalid_blocks() == {10, 11}


@pytest.mark.parametrize("order", ["failed first", "failed last"])
def test_what_is_whole_cannot_fail_and_what_failed_cannot_come(order: str) -> None:
    wait = LayerWait(LAYERS, 0.1)
    news = [(0, True), (LAYERS, False)]
    for layer_count, failed in news if order == "failed first" else reversed(news):
        wait.heard("x1", layer_count, failed=failed)
    wait.begin_step([late()])
    assert forward(wait) < 5
    assert wait.take_invalid_blocks() == ({10, 11} if order == "failed first" else set())


def test_a_transfer_that_was_lost_before_its_step_is_said_at_once() -> None:
    wait = LayerWait(LAYERS, 10.0)
    wait.begin_step([late(lost=True)])
    assert forward(wait) < 5
    assert wait.take_invalid_blocks() == {10, 11}


def test_a_pass_without_hooks_has_read_nothing_whole() -> None:
    wait = LayerWait(LAYERS, 10.0)
    wait.begin_step([late()])
    wait.heard("x1", LAYERS, failed=False)
    wait.end_step()
    assert wait.take_invalid_blocks() == {10, 11}


def test_layers_that_were_there_before_the_step_need_no_hook() -> None:
    wait = LayerWait(LAYERS, 10.0)
    wait.heard("x1", LAYERS, failed=False)
    wait.begin_step([late()])
    wait.end_step()
    assert wait.take_invalid_blocks() == set()


def test_what_has_come_is_fenced_before_it_is_read() -> None:
    wait = LayerWait(LAYERS, 5.0)
    fences: list[int] = []
    wait.fence = lambda: fences.append(0)
    wait.begin_step([late(lost=True)])
    wait.before_attention(0)
    assert fences == []
    wait.take_invalid_blocks()
    wait.heard("x2", LAYERS - 1, failed=False)
    wait.begin_step([late("x2")])
    assert len(fences) == 1
    wait.before_attention(0)
    assert len(fences) == 2
    wait.heard("x2", LAYERS, failed=False)
    wait.before_attention(LAYERS - 2)
    wait.before_attention(LAYERS - 1)
    # Nothing is late any more after the first of these.
    assert len(fences) == 3
    wait.end_step()
    assert wait.take_invalid_blocks() == set()
    wait.begin_step([late("x2")])
    assert len(fences) == 4


def test_what_cannot_be_fenced_is_given_up() -> None:
    wait = LayerWait(LAYERS, 5.0)

    def fail() -> None:
        raise TransferFailed("code 700")

    wait.fence = fail
    wait.heard("x1", LAYERS, failed=False)
    wait.begin_step([late()])
    assert forward(wait) < 1
    assert wait.take_invalid_blocks() == {10, 11}
