"""Step plans on a rank: what its sender gets, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest

from headrace_common.errors import QueueFull, TransferFailed
from headrace_engine.connector import step_executor
from headrace_engine.connector.step_executor import LayerKind, StepExecutor
from headrace_engine.connector.step_plan import HostSend, StepPlan, TokenRange
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import LayerRange, SendReport, TransferTarget
from headrace_kv.send.sender import RankSender
from headrace_kv.transport.memory import PASSED, Mark
from tests.blocking_clock import BlockingClock

TARGET = TransferTarget("x1", WorkerRef("d0", "1"), "127.0.0.1:1", 0, 96, 1e12)
FIRST = TokenRange("x1", 0, 64, ((1, 2), ()))
TAIL = TokenRange("x1", 64, 96, ((1, 2, 3), (9,)))
TOKENS, STATE = LayerKind(0, is_state=False), LayerKind(1, is_state=True)


class Recorder:
    """A sender that records its calls. When it is full, it opens no transfer."""

    def __init__(self, full: bool = False) -> None:
        self.full = full
        self.pieces: list[LayerRange] = []
        self.marks: list[Mark] = []
        self.events: list[str] = []
        self.stops: list[tuple[str, str, str]] = []

    def open(self, target: TransferTarget) -> None:
        if self.full:
            raise QueueFull("too many")
        self.events.append(f"open {target.transfer_id}")

    def push(self, piece: LayerRange, mark: Mark) -> None:
        self.pieces.append(piece)
        self.marks.append(mark)

    def push_hidden_state(self, transfer_id: str, read: Callable[[], bytes], mark: Mark) -> None:
        self.events.append(f"hidden {transfer_id} {read().decode()}")
        self.marks.append(mark)

    def finish(self, transfer_id: str) -> None:
        self.events.append(f"finish {transfer_id}")

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        self.stops.append((transfer_id, reason, detail))
        self.events.append(f"stop {transfer_id}")


def started(
    full: bool = False,
    layers: Sequence[LayerKind] = (),
    fence: Callable[[], None] = lambda: None,
    mark: Callable[[], Mark] = lambda: PASSED,
) -> tuple[StepExecutor, Recorder, list[SendReport]]:
    reports: list[SendReport] = []
    executor = StepExecutor(0, reports.append)
    sender = Recorder(full)
    kinds = dict(enumerate(layers or (TOKENS, TOKENS)))
    executor.start(fence, cast("RankSender", sender), kinds, mark)
    return executor, sender, reports


def quiet(executor: StepExecutor, transfer_id: str = "x1", reason: str = "") -> None:
    executor.transfer_quiet(SendReport(transfer_id, 0, reason, "", ()))


def reported(executor: StepExecutor) -> set[str]:
    """The requests that a step reports as finished, of those that ended before it."""
    executor.begin_step(StepPlan(finished_sends={"r": "x1"}))
    return executor.end_step()[0]


def test_ready_tokens_are_sent_first_then_each_layer_as_it_is_written() -> None:
    executor, sender, _ = started()
    executor.begin_step(StepPlan(opened=[TARGET], ready=[FIRST], computed=[TAIL]))
    assert [(p.layer, p.start_token) for p in sender.pieces] == [(0, 0), (1, 0)]
    executor.layer_written(0)
    executor.layer_written(1)
    assert [(p.layer, p.start_token, p.end_token) for p in sender.pieces[2:]] == [
        (0, 64, 96),
        (1, 64, 96),
    ]
    executor.end_step()
    executor.layer_written(0)
    assert len(sender.pieces) == 4


class NumberedMark:
    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        raise AssertionError("the executor does not wait for the device")


def test_what_the_device_writes_is_pushed_with_a_mark_behind_it() -> None:
    marked: list[Mark] = []

    def mark() -> Mark:
        marked.append(NumberedMark(len(marked)))
        return marked[-1]

    executor, sender, _ = started(layers=(TOKENS, STATE), mark=mark)
    executor.begin_step(
        StepPlan(opened=[TARGET], ready=[FIRST], computed=[TAIL], final={"r": "x1"})
    )
    executor.layer_written(0)
    executor.hidden_states_computed(lambda request_id: request_id.encode)
    executor.forward_ended()
    assert sender.marks == marked
    assert len(marked) == 4
    # Blocks of main memory wait for no kernel.
    executor.send_from_host(HostSend(7, TokenRange("x1", 0, 64, ((4, 5), (6,))), 0), lost=False)
    assert sender.marks[4:] == [PASSED, PASSED]


def test_a_layer_of_a_draft_is_sent_once_although_each_draft_has_a_pass() -> None:
    executor, sender, _ = started()
    executor.begin_step(StepPlan(opened=[TARGET], computed=[FIRST]))
    executor.layer_written(0)
    # vLLM asks for results before the draft's passes.
    executor.end_step()
    for _ in range(3):
        executor.layer_written(1)
    executor.forward_ended()
    assert [(p.layer, p.end_token) for p in sender.pieces] == [(0, 64), (1, 64)]
    executor.begin_step(StepPlan(computed=[TAIL]))
    executor.layer_written(0)
    executor.end_step()
    # Nothing is drafted in this step.
    executor.forward_ended()
    assert [(p.layer, p.end_token) for p in sender.pieces[2:]] == [(0, 96), (1, 96)]


def test_a_finished_request_is_reported_once_when_its_sender_is_quiet() -> None:
    executor, sender, _ = started()
    executor.begin_step(StepPlan(opened=[TARGET]))
    assert executor.end_step() == (set(), set(), set())
    assert reported(executor) == set()
    assert "finish x1" in sender.events
    quiet(executor)
    executor.begin_step(StepPlan())
    assert executor.end_step()[0] == {"r"}
    assert executor.end_step()[0] == set()


def test_a_transfer_that_is_quiet_before_its_request_ends_is_reported_with_it() -> None:
    executor, _, reports = started()
    executor.begin_step(StepPlan(opened=[TARGET]))
    quiet(executor)
    assert reported(executor) == {"r"}
    assert [report.transfer_id for report in reports] == ["x1"]


def test_a_full_sender_fails_only_the_new_transfer() -> None:
    executor, _, reports = started(full=True)
    executor.begin_step(StepPlan(opened=[TARGET], ready=[FIRST]))
    assert [(report.transfer_id, report.reason) for report in reports] == [("x1", "QUEUE_FULL")]
    assert reported(executor) == {"r"}


@pytest.mark.parametrize("preempted", [True, False])
def test_blocks_are_overwritten_only_once_the_sender_is_quiet(
    monkeypatch: pytest.MonkeyPatch, preempted: bool
) -> None:
    """Blocks of a preempted request, or a state that the next step overruns."""
    clock = BlockingClock()
    clock.install(monkeypatch, step_executor)
    executor, sender, _ = started(layers=(STATE, TOKENS))
    executor.begin_step(StepPlan(opened=[TARGET], computed=[TAIL]))
    executor.forward_ended()
    executor.end_step()
    start_s = clock.time()
    clock.call_later(0.1, lambda: quiet(executor))
    if preempted:
        executor.preempt(StepPlan(preempted=["x1"]))
    else:
        executor.begin_step(StepPlan(overrun=["x1"]))
    assert clock.time() - start_s == pytest.approx(0.1)
    assert [stop[:2] for stop in sender.stops] == [("x1", "TRANSFER_FAILED")]


def test_received_kv_is_fenced_before_a_step_reads_it() -> None:
    fences: list[str] = []
    executor, _, _ = started(fence=lambda: fences.append("fenced"))
    executor.begin_step(StepPlan(failed=["f"]))
    assert executor.end_step() == (set(), {"f"}, {"f"})
    assert fences == []
    executor.begin_step(StepPlan(received=["r", "s"], failed=["f"]))
    assert executor.end_step() == (set(), {"r", "s", "f"}, {"f"})
    assert executor.end_step() == (set(), set(), set())
    assert fences == ["fenced"]


def test_kv_of_a_request_that_runs_in_the_step_is_fenced_before_its_forward_pass() -> None:
    fences: list[str] = []
    executor, _, _ = started(fence=lambda: fences.append("fenced"))
    executor.begin_step(StepPlan(fences=True))
    assert fences == ["fenced"]
    assert executor.end_step() == (set(), set(), set())
    assert fences == ["fenced"]


def test_a_step_that_cannot_read_received_kv_does_not_begin() -> None:
    def fail() -> None:
        raise TransferFailed("code 700")

    executor, _, _ = started(fence=fail)
    with pytest.raises(TransferFailed, match="code 700"):
        executor.begin_step(StepPlan(fences=True))


def test_received_kv_that_cannot_be_fenced_has_failed() -> None:
    def fail() -> None:
        raise TransferFailed("code 700")

    executor, _, _ = started(fence=fail)
    executor.begin_step(StepPlan(received=["r"]))
    assert executor.end_step() == (set(), {"r"}, {"r"})


def read_state(request_id: str) -> Callable[[], bytes]:
    return f"state of {request_id}".encode


def test_only_the_hidden_state_of_a_last_token_is_sent() -> None:
    executor, sender, _ = started()
    executor.begin_step(StepPlan(opened=[TARGET], computed=[FIRST]))
    executor.end_step()
    executor.hidden_states_computed(read_state)
    # The second transfer is not open.
    executor.begin_step(StepPlan(computed=[TAIL], final={"r1": "x1", "r2": "x2"}))
    executor.end_step()
    # vLLM computes further logits in a step when a client wants those of the prompt.
    for _ in range(2):
        executor.hidden_states_computed(read_state)
    executor.begin_step(StepPlan())
    executor.hidden_states_computed(read_state)
    states = [event for event in sender.events if event.startswith("hidden")]
    assert states == ["hidden x1 state of r1"]


def test_a_hidden_state_that_cannot_be_read_fails_its_transfer_only() -> None:
    executor, sender, _ = started()

    def unknown(request_id: str) -> Callable[[], bytes]:
        raise KeyError(request_id)

    executor.begin_step(StepPlan(opened=[TARGET], computed=[FIRST], final={"r1": "x1"}))
    executor.hidden_states_computed(unknown)
    assert sender.stops == [("x1", TransferFailed.reason, "the hidden state cannot be read: 'r1'")]


def test_the_hidden_state_of_a_stopped_transfer_is_not_sent() -> None:
    executor, sender, _ = started()
    executor.begin_step(StepPlan(opened=[TARGET], computed=[FIRST], final={"r1": "x1"}))
    quiet(executor)
    executor.hidden_states_computed(read_state)
    assert not any(event.startswith("hidden") for event in sender.events)


def test_blocks_of_main_memory_are_reported_once_nothing_reads_them() -> None:
    executor, sender, _ = started()
    send = HostSend(7, TokenRange("x1", 0, 64, ((4, 5),)), 0)
    executor.begin_step(StepPlan(opened=[TARGET]))
    executor.send_from_host(send, lost=False)
    assert [(p.layer, p.end_token, p.block_ids, p.in_host_memory) for p in sender.pieces] == [
        (0, 64, (4, 5), True),
        (1, 64, (4, 5), True),
    ]
    executor.begin_step(StepPlan(computed=[TAIL]))
    executor.layer_written(0)
    assert not sender.pieces[-1].in_host_memory
    assert executor.take_ended_host_sends() == []
    quiet(executor, "other")
    assert executor.take_ended_host_sends() == []
    quiet(executor)
    assert executor.take_ended_host_sends() == [7]
    assert executor.take_ended_host_sends() == []


def test_a_transfer_of_lost_blocks_fails() -> None:
    executor, sender, _ = started()
    executor.begin_step(StepPlan(opened=[TARGET]))
    executor.send_from_host(HostSend(7, FIRST, 0), lost=True)
    assert sender.pieces == []
    assert sender.events[-1].startswith("stop x1")
    quiet(executor)
    assert executor.take_ended_host_sends() == [7]


@pytest.mark.parametrize("full", [False, True])
def test_a_transfer_that_is_not_open_reads_no_main_memory(full: bool) -> None:
    """It was stopped before, or could not be opened."""
    executor, sender, _ = started(full)
    if not full:
        executor.stop("x1")
    executor.begin_step(StepPlan(opened=[TARGET]))
    executor.send_from_host(HostSend(7, FIRST, 0), lost=False)
    assert sender.pieces == []
    assert executor.take_ended_host_sends() == [7]


def test_a_refused_prefix_is_reported_once() -> None:
    executor, sender, reports = started()
    executor.begin_step(StepPlan(refused=["x1"]))
    executor.stop("x1")
    executor.begin_step(StepPlan(refused=["x1"]))
    assert [(report.transfer_id, report.reason) for report in reports] == [("x1", "NOT_FOUND")]
    assert sender.events == []


def test_a_rank_that_cannot_send_refuses_prefixes() -> None:
    reports: list[SendReport] = []
    executor = StepExecutor(3, reports.append)
    executor.begin_step(StepPlan(opened=[TARGET]))
    assert [(report.rank, report.reason) for report in reports] == [(3, TransferFailed.reason)]
